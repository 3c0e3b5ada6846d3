"""Servers kept up, here without a worker: ready, watched, started anew, ended with all they started."""

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
from asking import ask, is_open, told
from patience import eventually, is_running
from service_values import TOKEN, options

from raycrew.cluster_core import lease_ports
from raycrew.worker_groups.services import ServiceStartError, ServiceStartTimeoutError
from raycrew.worker_groups.services._replicas import process as process_module
from raycrew.worker_groups.services._replicas import upkeep as upkeep_module
from raycrew.worker_groups.services._replicas.launching import ReplicaSpec, launch
from raycrew.worker_groups.services._replicas.probing import answer_of
from raycrew.worker_groups.services._replicas.upkeep import Upkeep

pytest.importorskip("uvicorn")

PYTHON = sys.executable
SERVER = """import http.server, sys
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def upkeep_of(server="served_apps:create", token=TOKEN, run=launch, port_range=None, **changed):
    quick = {"probe_interval_s": 0.05, "ready_timeout_s": 60.0, "grace_s": 5.0}
    spec = ReplicaSpec(options(server=server, **quick | changed), "127.0.0.1", token, port_range)
    return Upkeep(spec, "127.0.0.1", 0, run)


@contextmanager
def kept(*args, **kwargs):
    upkeep = upkeep_of(*args, **kwargs)
    try:
        upkeep.begin()
        assert upkeep.state.reason == ""
        yield upkeep
    finally:
        assert upkeep.stop(5.0)


def refused(*args, **kwargs):
    """Why a server does not become ready; nothing of it is left."""
    upkeep = upkeep_of(*args, **kwargs)
    before = set(psutil.Process().children())  # not theirs: those of a Ray come and go
    with pytest.raises(ServiceStartError) as caught:
        upkeep.begin()
    assert set(psutil.Process().children()) <= before
    assert upkeep.state.status == "stopped"
    return caught.value


def is_ready_again(upkeep, restarts):
    return upkeep.state.status == "ready" and upkeep.state.restarts == restarts


def test_an_application_is_served_behind_its_token_and_is_gone_afterwards():
    with kept(ports=2) as upkeep:
        state = upkeep.state
        endpoint = state.endpoint
        assert (state.status, state.restarts, len(endpoint.ports)) == ("ready", 0, 2)
        seen = told(endpoint, "/where?RAYCREW_SERVICE_PORTS,RAYCREW_SERVICE_HOST")
        assert seen["word"] == "made"
        assert seen["pid"] == state.pid
        assert seen["env"]["RAYCREW_SERVICE_PORTS"] == ",".join(map(str, endpoint.ports))
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}):
            assert ask(endpoint, "/where?A", headers=headers, told=False)[0] == 401
        assert ask(endpoint, "/health", told=False)[0] == 401
        process = psutil.Process(state.pid)
        assert TOKEN not in " ".join(process.cmdline())
        assert TOKEN not in " ".join(process.environ().values())
        assert TOKEN not in repr(state) + repr(upkeep._spec)
        with lease_ports() as other:
            assert other.port not in endpoint.ports
    assert not is_running(state.pid)
    assert not is_open(endpoint.port)
    assert upkeep.state.status == "stopped"


def test_a_path_may_be_open_to_whoever_only_reads_it():
    with kept("served_apps:late", ready="/health?of=1", ready_is_open=True) as upkeep:
        assert ask(upkeep.state.endpoint, "/health", told=False)[0] == 200
        assert ask(upkeep.state.endpoint, "/health", method="POST", told=False)[0] == 401
        assert ask(upkeep.state.endpoint, "/where?A", told=False)[0] == 401


def test_a_command_gets_its_port_as_a_word_and_its_token_as_a_variable():
    words = [PYTHON, "-c", f"import os; assert os.environ['KEY'] == '{TOKEN}'\n{SERVER}", "{port}"]
    with kept(words, ready="/", token_variable="KEY") as upkeep:
        assert ask(upkeep.state.endpoint, "/")[0] == 200
    with kept([PYTHON, "-c", SERVER, "{port}"], ready=None, token=None) as upkeep:
        assert upkeep.state.endpoint.headers == {}


def test_a_server_that_ends_early_is_told_of_with_its_exit_code_and_last_words():
    error = refused("raises_at_import:app")
    assert error.exit_code == 1
    assert "just before the end" in error.log_tail
    assert "no model is here" in str(error)
    for none in ("number", "wants_more"):
        assert "neither an ASGI application" in refused(f"served_apps:{none}").log_tail
    assert refused([PYTHON, "-c", "import os; os._exit(7)", "{port}"], token=None).exit_code == 7
    assert "can't be started" in str(refused(["/no/such/program", "{port}"], token=None))
    killed = "import os, signal; print(os.environ['KEY'], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    error = refused([PYTHON, "-c", killed, "{port}"], token_variable="KEY")
    assert error.exit_code == -9
    assert TOKEN not in str(error)


def test_a_token_in_the_middle_of_a_long_line_is_hidden():
    long = "import os; print('x' * 4090 + os.environ['KEY'] + 'y' * 9000, flush=True); os._exit(7)"
    error = refused([PYTHON, "-c", long, "{port}"], token_variable="KEY")
    assert error.log_tail.replace("\n", "") == "x" * 4090 + "..." + "y" * 9000


def test_a_server_that_hangs_is_told_of_once_its_time_is_over():
    def heard(spec, site):
        server = launch(spec, site)
        eventually(lambda: "it hangs" in server.tail, "it says so")
        return server

    error = refused("served_apps:hangs", run=heard, ready_timeout_s=0.8)
    assert isinstance(error, ServiceStartTimeoutError)
    assert error.exit_code is None
    assert "it hangs" in error.log_tail
    assert "did not listen within 0.8 s" in str(error)


@pytest.mark.long
def test_a_server_that_answers_nothing_good_is_told_of_once_its_time_is_over():
    def listening(spec, site):
        server = launch(spec, site)
        eventually(lambda: server.listens_on(site.ports[0]), "it listens")
        return server

    words, asked = [PYTHON, "-c", SERVER, "{port}"], {"ready": "/none", "token": None, "ready_timeout_s": 0.8}
    assert "no good answer at /none" in str(refused(words, run=listening, **asked))


@pytest.mark.hostile
def test_a_command_that_forks_and_exits_leaves_nothing_behind(tmp_path):
    daemon = (
        "import os, sys, pathlib\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n{SERVER}"
    )
    error = refused([PYTHON, "-c", daemon, "{port}"], ready="/", token=None)
    assert error.exit_code == 0
    assert "foreground" in str(error)
    assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())


def test_a_server_that_dies_is_started_anew_on_its_port():
    with kept() as upkeep:
        before = upkeep.state
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: is_ready_again(upkeep, 1), "it serves again")
        after = upkeep.state
        assert after.endpoint == before.endpoint
        assert after.pid != before.pid
        assert "exit code -9" in after.reason
        assert told(after.endpoint, "/where?A")["pid"] == after.pid


@pytest.mark.hostile
def test_a_server_that_is_stopped_is_replaced():
    with kept("served_apps:app", token=None, silent_s=3.0) as upkeep:
        assert told(upkeep.state.endpoint, "/where?A")["word"] == "ready made"
        pid = upkeep.state.pid
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: upkeep.state.status == "ready" and upkeep.state.restarts, "another one serves")
        assert not is_running(pid)
        assert "no good answer" in upkeep.state.reason


def test_a_server_that_dies_too_often_is_given_up_with_its_last_words():
    with kept(max_restarts=0) as upkeep:
        pid = upkeep.state.pid
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: upkeep.state.status == "failed", "it is given up")
        assert upkeep.state.endpoint is None
        assert "max_restarts" in upkeep.state.reason


ON_TWO_PORTS = f"""import socket, sys
other = socket.create_server(("127.0.0.1", int(sys.argv[2])))
{SERVER}"""


@pytest.mark.hostile
@pytest.mark.parametrize("which", [0, 1])
def test_a_port_that_was_stolen_is_left_to_the_thief(which):
    stack, stolen, heard = ExitStack(), [], []

    def robbed(spec, site):
        if not stolen:
            stolen.append(site.ports[which])
            heard.append(stack.enter_context(thief_at(stolen[0])))
        return launch(spec, site)

    words = [PYTHON, "-c", ON_TWO_PORTS, "{port}", "{port1}"]
    with stack, kept(words, run=robbed, ports=2, ready="/", token_variable="KEY") as upkeep:
        assert stolen[0] not in upkeep.state.endpoint.ports
        assert ask(upkeep.state.endpoint, "/")[0] == 200
        assert upkeep.state.restarts == 0
    assert TOKEN.encode() not in b"".join(heard[0])


def test_a_server_whose_connections_are_all_taken_is_not_silent(monkeypatch):
    # A busy machine is not silence.
    monkeypatch.setattr(upkeep_module, "answer_of", lambda *asked: answer_of(*asked[:-1], timeout_s=60.0))
    with kept(max_connections=2, silent_s=0.4) as upkeep, ThreadPoolExecutor(2) as threads:
        before = upkeep.state
        naps = [threads.submit(ask, before.endpoint, "/nap?2") for _ in range(2)]
        assert [nap.result()[0] for nap in naps] == [200, 200]
        assert upkeep.state == before


LEAVES_ITS_PORT = """import http.server, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        if self.path == "/leave":
            threading.Thread(target=lambda: (server.shutdown(), server.server_close())).start()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.serve_forever()
time.sleep(600)
"""


@pytest.mark.hostile
def test_whoever_takes_the_port_of_a_server_that_left_it_is_told_nothing():
    words = [PYTHON, "-c", LEAVES_ITS_PORT, "{port}"]
    with kept(words, token_variable="KEY", ready="/", silent_s=3.0) as upkeep, ExitStack() as stack:
        before = upkeep.state
        ask(before.endpoint, "/leave")
        heard = stack.enter_context(thief_at(before.endpoint.port))
        eventually(lambda: upkeep.state.status == "ready" and upkeep.state.restarts, "another one serves")
        assert upkeep.state.endpoint.port != before.endpoint.port
    assert TOKEN.encode() not in b"".join(heard)


@contextmanager
def thief_at(port):
    """Answers whoever asks at a port, which it takes as soon as it can; gives what it heard."""
    heard, thief = [], socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def has_it():
        with suppress(OSError):
            thief.bind(("127.0.0.1", port))
            thief.listen()
            return True

    def lie():
        while True:
            try:
                connection, _ = thief.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                heard.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    eventually(has_it, "the port is taken")
    threading.Thread(target=lie, daemon=True).start()
    try:
        yield heard
    finally:
        thief.close()


@pytest.mark.hostile
def test_clients_that_send_nothing_keep_no_place(monkeypatch):
    with kept(max_connections=8) as upkeep:
        port = upkeep.state.endpoint.port
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        status, headers, _ = ask(upkeep.state.endpoint, "/health")
        assert (status, headers["x-raycrew-outcome"]) == (503, "surely-not-run")
        for one in idle[1:]:
            one.close()
        eventually(lambda: _answers(upkeep.state.endpoint), "there is room again")
        idle[0].close()


def _answers(endpoint):
    try:
        return ask(endpoint, "/health", timeout=5)[0] == 200
    except OSError:
        return False


def test_the_end_takes_what_a_server_has_started_and_who_does_not_listen():
    stubborn = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"{SERVER}"
    )
    upkeep = upkeep_of([PYTHON, "-c", stubborn, "{port}"], ready="/", token=None)
    upkeep.begin()
    family = [upkeep.state.pid, *(p.pid for p in psutil.Process(upkeep.state.pid).children(recursive=True))]
    assert len(family) == 2
    assert upkeep.stop(0.2)
    assert not any(is_running(pid) for pid in family)
    assert upkeep.stop(0.2)


STARTS_ANOTHER = """import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    probes = 0
    def do_GET(self):
        Handler.probes += self.path == "/"
        said = Handler.probes
        if self.path == "/start":
            said = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}).pid
        body = b"%d" % said
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.hostile
def test_the_end_takes_who_forgot_what_it_was_started_by():
    words = [PYTHON, "-c", STARTS_ANOTHER, "{port}"]
    with kept(words, ready="/", token=None, probe_interval_s=600.0) as upkeep:
        other = told(upkeep.state.endpoint, "/start")
        assert is_running(other)
    assert not is_running(other)


@pytest.mark.hostile
def test_a_server_that_dies_leaves_nobody_who_was_there_at_a_question(monkeypatch):
    monkeypatch.setattr(process_module, "_LOOK_AGAIN_S", 0.0)
    with kept([PYTHON, "-c", STARTS_ANOTHER, "{port}"], ready="/", token=None) as upkeep:
        before = upkeep.state
        other, asked = (told(before.endpoint, path) for path in ("/start", "/probes"))
        eventually(lambda: told(before.endpoint, "/probes") >= asked + 2, "it is asked again")
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: is_ready_again(upkeep, 1), "it serves again")
        assert not is_running(other)


def test_the_table_of_processes_is_not_read_for_each_question(monkeypatch):
    looks, look = [], process_module.Lookout.look
    monkeypatch.setattr(process_module, "_LOOK_AGAIN_S", 1e6)
    monkeypatch.setattr(process_module.Lookout, "look", lambda lookout: looks.append(1) or look(lookout))
    with kept([PYTHON, "-c", STARTS_ANOTHER, "{port}"], ready="/", token=None) as upkeep:
        before, asked = len(looks), told(upkeep.state.endpoint, "/probes")
        eventually(lambda: told(upkeep.state.endpoint, "/probes") >= asked + 3, "it is asked again")
        assert len(looks) == before


def test_a_stop_in_the_middle_of_a_start_leaves_nothing():
    upkeep = upkeep_of("served_apps:hangs")
    caught = []

    def begin():
        try:
            upkeep.begin()
        except ServiceStartError as error:
            caught.append(error)

    starting = threading.Thread(target=begin)
    starting.start()
    eventually(lambda: upkeep._server is not None, "it is being started")
    pid = upkeep._server.pid
    assert upkeep.stop(0.0)
    starting.join(60)
    assert caught
    assert not is_running(pid)
