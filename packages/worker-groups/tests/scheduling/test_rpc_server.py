"""The host of engines, without Ray: what it makes, calls and ends, and what it says where that fails."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S, eventually

from raycrew.worker_groups.scheduling import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    PortAllocationError,
    RayRPCServer,
    WorkerConfigurationError,
)

ECHO = "engines.Echo"


@pytest.fixture
def server():
    return RayRPCServer()


@pytest.fixture
def call(server):
    """Calls a method of the engine "a", which is an `Echo`."""
    server.create_engine(ECHO, "a", "hey")

    def call(method, /, *args, time_s=60.0, **kwargs):
        return server.call(["a", method, time_s, "1"], *args, **kwargs)

    return call


def test_several_engines_have_names_of_their_own(server):
    server.create_engine(ECHO, "a", "one")
    server.create_engine("engines:Echo", "b", word="two")
    assert [server.call([name, "say", None, "1"])[0] for name in "ab"] == ["one", "two"]
    assert server.ping() == ["a", "b"]
    with pytest.raises(EngineCreationError, match="already"):
        server.create_engine(ECHO, "a")
    assert server.call(["a", "say", None, "1"])[0] == "one"


def test_arguments_may_have_any_name(call):
    assert call("say", 1, name="n", method="m", timeout=3)[1:] == (
        (1,),
        {"name": "n", "method": "m", "timeout": 3},
    )


def test_results_that_are_futures_are_waited_for(call):
    assert [call("later", 1), call("future", 2), call("later", 3)] == [1, 2, 3]
    with pytest.raises(TimeoutError):
        call("never", time_s=0.01)
    assert call("later", 4) == 4, "the loop goes on"


def test_futures_of_a_loop_that_runs_in_a_thread_are_waited_for_there(server):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server._engines["a"] = Threaded(loop)
        assert server.call(["a", "soon", 60.0, "1"]) == "done"
        with pytest.raises(TimeoutError):
            server.call(["a", "never", 0.01, "1"])
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_future_of_a_loop_that_does_not_run_is_refused_unless_it_is_done(server):
    loop = asyncio.new_event_loop()
    server._engines["a"] = Threaded(loop)
    with pytest.raises(RuntimeError, match="isn't running: run it in a thread"):
        server.call(["a", "never", 60.0, "1"])
    server._engines["a"].never = lambda: done
    done = loop.create_future()
    done.set_result("done")
    assert server.call(["a", "never", 60.0, "1"]) == "done"
    loop.close()


class Threaded:
    """An engine with a loop of its own."""

    def __init__(self, loop):
        self.loop = loop

    def never(self):
        return self.loop.create_future()

    def soon(self):
        future = self.loop.create_future()
        self.loop.call_soon_threadsafe(future.set_result, "done")
        return future


def test_what_is_not_there_is_named(server, call):
    with pytest.raises(EngineCallError, match=r"no engine 'b'.*\['a'\]"):
        server.call(["b", "say", None, "1"])
    for name in ("nothing", "word"):
        with pytest.raises(EngineCallError, match=f"no method '{name}': it is a Echo"):
            call(name)
    with pytest.raises(KeyError, match="lost"):
        call("oops")


def test_imports_and_constructors_that_fail_are_told_apart(server):
    for path in ("engines.Nothing", "no_such_package.Engine"):
        with pytest.raises(EngineImportError, match="can't be imported"):
            server.create_engine(path, "a")
    with pytest.raises(EngineImportError, match="neither a class"):
        server.create_engine("engines.__doc__", "a")
    with pytest.raises(EngineCreationError, match="no luck") as caught:
        server.create_engine(ECHO, "a", fail="no luck")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)).cause, ValueError)
    with pytest.raises(EngineCreationError, match="gave None"):
        server.create_engine("engines.gives_none", "a")
    assert server.ping() == []


@pytest.mark.parametrize("path", ["os.system", "engines_of_others.Echo", "Echo", "engines..Echo", "", None])
def test_only_allowed_paths_are_imported(path):
    server = RayRPCServer(["engines.*"])
    with pytest.raises(EngineImportError):
        server.create_engine(path, "a")
    with pytest.raises(EngineImportError):
        server.configure(path)
    server.create_engine(ECHO, "a")


def test_what_a_module_has_imported_is_not_allowed_with_it():
    server = RayRPCServer(["engines.*", "other.Engine"])
    for path in ("engines.os.system", "engines:os.system", "engines.shell", "engines.Echo.__base__"):
        with pytest.raises(EngineImportError, match="is defined as"):
            server.create_engine(path, "a")
        with pytest.raises(EngineImportError, match="is defined as"):
            server.configure(path)
    RayRPCServer(["engines.shell"]).create_engine("engines:shell", "a", ["true"])  # what is named is meant


@pytest.mark.parametrize("method", ["one_by_one", "one_by_one_later"])
def test_a_generator_is_refused(call, method):
    with pytest.raises(TypeError, match="return a list"):
        call(method)


def test_an_engine_that_leaves_ends_no_worker(server, call):
    for method in ("leave", "leave_later"):
        with pytest.raises(EngineCallError, match="SystemExit: enough") as caught:
            call(method)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)).cause, SystemExit)
    with pytest.raises(EngineCreationError, match="SystemExit: enough"):
        server.create_engine("engines.leaves", "b")
    with pytest.raises(WorkerConfigurationError, match="SystemExit: enough"):
        server.configure("engines.leaves")
    assert call("later", 1) == 1


def test_which_calls_have_begun_is_known(server, call):
    call("say")
    assert (server.has_begun("1"), server.has_begun("2")) == (True, False)


def test_calls_under_way_stay_known_and_those_that_ended_long_ago_may_have_begun(server, tmp_path):
    server.create_engine(ECHO, "a")
    with ThreadPoolExecutor(1) as thread:
        server.create_engine(ECHO, "b")
        under_way = thread.submit(server.call, ["b", "wait", None, "me-5"], tmp_path / "gate")
        eventually(lambda: server.has_begun("me-5"), "it has begun")
        for number in range(10, 1012):
            server.call(["a", "say", None, f"they-{number}"])
        told = {number: server.has_begun(f"they-{number}") for number in (9, 10, 11, 12, 1011, 1012)}
        assert told == {9: True, 10: True, 11: True, 12: True, 1011: True, 1012: False}
        assert (server.has_begun("me-5"), server.has_begun("me-4")) == (True, False)
        (tmp_path / "gate").touch()
        under_way.result(PATIENCE_S)


def test_engines_end_the_newest_first_and_all_of_them(server, tmp_path):
    path = tmp_path / "ends"
    for name, fail in {"a": False, "b": True, "c": False}.items():
        server.create_engine("engines.Closing", name, path, name, fail=fail)
    server.create_engine(ECHO, "d")
    with pytest.raises(ExceptionGroup, match="1 of 4 engines"):
        server.destroy()
    assert path.read_text().split() == ["c", "b", "a"]
    assert (server.ping(), server.destroy()) == ([], [])


def test_some_engines_end_by_name(server):
    for name in "abc":
        server.create_engine(ECHO, name)
    assert server.destroy(["b", "nothing"]) == ["b"]
    assert server.ping() == ["a", "c"]
    server.create_engine_of("ref", ECHO, "b")
    assert (server.destroy(owner="ref"), server.ping()) == (["b"], ["a", "c"])


def test_a_worker_is_configured(server, monkeypatch):
    monkeypatch.setenv("RAYCREW_TEST_SEED", "")
    server.create_engine(ECHO, "a")
    assert server.configure("engines.seeded", 7) == 7
    server.set_env({"RAYCREW_TEST_OTHER": "x"})
    assert server.call(["a", "env", None, "1"], "RAYCREW_TEST_SEED", "RAYCREW_TEST_OTHER") == ["7", "x"]
    monkeypatch.delenv("RAYCREW_TEST_OTHER")
    with pytest.raises(WorkerConfigurationError, match="no seed"):
        server.configure("engines.refuses")
    with pytest.raises(WorkerConfigurationError, match="A=B"):
        server.set_env({"A=B": "1"})


def test_ports_are_leased_and_differ():
    server = RayRPCServer(port_range=(23000, 23100))
    ports = [*server.alloc_ports(2), *server.alloc_ports(3)]
    assert len(set(ports)) == 5
    with pytest.raises(PortAllocationError, match="200 ports"):
        server.alloc_ports(200)


def test_the_ports_of_a_role_that_ends_can_be_leased_again(tmp_path):
    own = (7200, 7202)  # who names no range is given other ports
    server = RayRPCServer(["engines.*"], port_range=own)
    kept = server.alloc_ports(1, "actor")
    server.alloc_ports(2, "ref")
    server.create_engine_of("ref", "engines.Closing", "bad", str(tmp_path / "ends"), "bad", 0.0, fail=True)
    with pytest.raises(PortAllocationError):
        server.alloc_ports(2, "other")
    with pytest.raises(ExceptionGroup):
        server.end_role("ref")
    assert not set(kept) & set(server.alloc_ports(2, "other"))


def test_engines_run_in_the_thread_that_calls(call):
    assert call("is_main_thread") is True
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(call, "is_main_thread").result() is False
