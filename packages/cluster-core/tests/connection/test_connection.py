"""Joining and starting Ray: every branch against real Ray processes, and nothing left changed."""

import contextlib
import errno
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from raycrew.cluster_core import (
    ClusterAuthenticationError,
    ClusterClosedError,
    ClusterError,
    ClusterUnreachableError,
    NoClusterError,
    RayConnection,
    init_ray,
)
from raycrew.cluster_core._connection import folders
from raycrew.cluster_core._connection.discovery import running_clusters
from raycrew.cluster_core._connection.folders import folder_of_sessions, link_logs

STORE = 80 << 20


@pytest.fixture
def apart(monkeypatch):
    """This process without a connection, and with nothing in its environment that names a cluster."""
    ray.shutdown()
    for name in ("RAY_ADDRESS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield monkeypatch
    ray.shutdown()


def run_driver(code, env, *arguments):
    """Run a driver in a process of its own; its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def driver(code, env):
    """A driver that runs until the block ends; yields the first line that it prints after its set-up."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code) + "\nimport sys; sys.stdin.readline()"],
        env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in child.stdout:
            if line.startswith("ready "):
                break
        else:
            pytest.fail("the driver ended early")
        yield line.split()[1]
    finally:
        child.communicate("\n", timeout=240)


@ray.remote(num_cpus=0)
def environment_of_a_task():
    return dict(os.environ)


def traces():
    """What a library must leave alone in its caller's process."""
    logger = logging.getLogger("ray")
    state = (list(logger.handlers), logger.level, logger.propagate)
    return dict(os.environ), state, list(logging.getLogger().handlers), signal.getsignal(signal.SIGTERM)


@pytest.mark.hostile
def test_join_by_address_changes_nothing_here_and_forwards_by_policy(local_ray_session, apart):
    apart.setenv("NCCL_DEBUG", "WARN")
    apart.setenv("MY_SETTING", "7")
    apart.setenv("VLLM_API_KEY", "hush")
    apart.setenv("MY_SECRET", "hush-hush")
    apart.setenv("HTTPS_PROXY", "me:hush@proxy")
    apart.setenv("NO_PROXY", "*")
    ray_logger, handler = logging.getLogger("ray"), signal.getsignal(signal.SIGTERM)
    own = logging.NullHandler()
    ray_logger.addHandler(own)
    signal.signal(signal.SIGTERM, lambda *_: None)
    before = traces()
    try:
        with init_ray(
            local_ray_session, namespace="mine", forward_env=["MY_SETTING"], secrets=["MY_SECRET"]
        ) as connection:
            assert traces() == before
            assert (connection.address, connection.started_here) == (local_ray_session, False)
            assert connection.why == "its address was given"
            assert connection.namespace == "mine" == ray.get_runtime_context().namespace
            secrets = {"MY_SECRET": "hush-hush", "VLLM_API_KEY": "hush", "HTTPS_PROXY": "me:hush@proxy"}
            assert dict(connection.secrets).items() >= secrets.items()
            assert RayConnection.current() is connection
            forwarded = ray.get_runtime_context().runtime_env["env_vars"]
            assert {"NCCL_DEBUG": "WARN", "MY_SETTING": "7"}.items() <= forwarded.items()
            assert not {
                "VLLM_API_KEY",
                "MY_SECRET",
                "HTTPS_PROXY",
                "CUDA_VISIBLE_DEVICES",
                "RAY_TMPDIR",
            } & set(forwarded)
            seen = ray.get(environment_of_a_task.remote())
            assert seen["MY_SETTING"] == "7" and "VLLM_API_KEY" not in seen and "MY_SECRET" not in seen
    finally:
        ray_logger.removeHandler(own)
        signal.signal(signal.SIGTERM, handler)
    assert connection.closed and not ray.is_initialized() and RayConnection.current() is None
    with init_ray(local_ray_session, forward_env=None) as again:  # The cluster itself is still there.
        assert "env_vars" not in ray.get_runtime_context().runtime_env
        assert again is not connection


def test_variables_that_ray_hands_on_in_another_way_are_no_part_of_the_runtime_environment(
    local_ray_session, apart, caplog
):
    caplog.set_level(logging.INFO)
    odd = {"NRL_PLACE": "$HOME/x", "NRL_BYTES": "\udcff", "NRL_LINES": "a\nb\n", "NRL_LONG": "x" * 90_000}
    for name, value in odd.items():
        apart.setenv(name, value)
    with init_ray(local_ray_session) as connection:
        seen = ray.get(environment_of_a_task.remote(), timeout=120)
        assert {name: seen.get(name, connection.secrets.get(name)) for name in odd} == odd
    (said,) = [text for text in caplog.messages if text.startswith("worker groups alone")]
    assert "NRL_PLACE" in said and "NRL_BYTES" in said and "HOME" not in said


def test_what_other_threads_set_while_it_connects_stays(local_ray_session, apart):
    for name in ("MY_OLD", "MY_CHANGED", "PYTHONBREAKPOINT"):
        apart.setenv(name, "before")
    apart.delenv("MY_NEW", raising=False)
    connect = ray.init

    def connect_meanwhile(**options):
        context = connect(**options)
        apart.setenv("MY_NEW", "meanwhile")
        apart.setenv("MY_CHANGED", "meanwhile")
        apart.delenv("MY_OLD")
        return context

    apart.setattr(ray, "init", connect_meanwhile)
    with init_ray(local_ray_session):
        found = [os.environ.get(f"MY_{name}") for name in ("OLD", "CHANGED", "NEW")]
        assert found == [None, "meanwhile", "meanwhile"]
        assert os.environ["PYTHONBREAKPOINT"] == "before"


def test_join_by_environment_variable(local_ray_session, apart):
    apart.setenv("RAY_ADDRESS", local_ray_session)
    with init_ray() as connection:
        assert (connection.address, connection.why) == (local_ray_session, "RAY_ADDRESS names it")
    with pytest.raises(ValueError, match=r"\['num_cpus', 'dashboard'\] can't be given for a running cluster"):
        init_ray(num_cpus=1, dashboard=False)


def test_one_connection_per_process(local_ray_session, apart):
    apart.setenv("MY_SECRET", "hush")
    first = init_ray(local_ray_session)
    with init_ray() as second, init_ray(local_ray_session, secrets=["MY_SECRET"]) as third:
        assert first is second is third
        assert first.secrets["MY_SECRET"] == "hush"
    assert not first.closed, "the block of a later call ended the connection"
    with pytest.raises(ValueError, match=f"connected to {local_ray_session}; close that"):
        init_ray("127.0.0.1:1")
    assert "hush" not in repr(first.secrets)
    first.close()
    first.close()
    for use in (first.child_env, first.__enter__, lambda: first.run_on_each_node(os.getpid)):
        with pytest.raises(ClusterClosedError):
            use()


def test_the_block_of_the_first_call_ends_the_connection(local_ray_session, apart):
    with init_ray(local_ray_session) as connection:
        assert init_ray() is connection
        with connection, init_ray():
            pass
        assert not connection.closed
    assert connection.closed


def test_a_runtime_that_was_up_before_is_left_up(local_ray_session, apart):
    ray.init(address=local_ray_session, log_to_driver=False, logging_level="WARNING")
    with init_ray() as connection:
        assert isinstance(connection, RayConnection) and not connection.started_here
        assert connection.address == local_ray_session
    assert ray.is_initialized()


def test_run_on_each_node(ray_nodes):
    with init_ray() as connection:
        found = dict(connection.run_on_each_node(lambda: ray.get_runtime_context().get_node_id()))
    assert len(found) == 3 and all(node_id == result for node_id, result in found.items())


@pytest.fixture
def nothing_recorded(apart):
    """A folder for sessions, short as Ray wants it, in which no `ray start` wrote anything down."""
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        apart.setenv("RAY_TMPDIR", folder)
        yield
        ray.shutdown()


def test_a_fresh_cluster_ends_with_its_connection_and_children_can_join_it(
    local_ray_session, nothing_recorded, tmp_path
):
    """Somebody's own cluster that runs on this machine is none to join."""
    assert local_ray_session in [one.address for one in running_clusters()]
    before = traces()
    with init_ray(
        num_cpus=3, resources={"thing": 2}, object_store_memory=STORE, log_dir=tmp_path / "logs"
    ) as connection:
        assert traces() == before
        assert connection.started_here and connection.dashboard_url is None
        assert "none to join was found" in connection.why
        total = ray.cluster_resources()
        assert (total["CPU"], total["thing"], total["object_store_memory"]) == (3, 2, STORE)
        assert (tmp_path / "logs" / "ray" / "gcs_server.out").exists()
        environ = connection.child_env()
        assert environ["RAY_ADDRESS"] == connection.address
        child = """
            from raycrew.cluster_core import init_ray
            with init_ray() as connection:
                nodes = [node_id for node_id, _ in connection.run_on_each_node(lambda: 1)]
                print(connection.address, connection.started_here, *nodes)
        """
        node_id = ray.get_runtime_context().get_node_id()
        assert run_driver(child, environ).split() == [connection.address, "False", node_id]
    assert traces() == before
    with pytest.raises(ClusterUnreachableError):
        init_ray(connection.address)


@ray.remote(num_cpus=0)
def children_of_a_worker(codes):
    """What children say that a worker starts: one without being told of a cluster, one by `child_env()`."""
    told = init_ray().child_env()
    untold = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=environ, capture_output=True, text=True,
            timeout=240, check=True,
        ).stdout.split("|")[1:]
        for code, environ in zip(codes, (untold, untold | told), strict=True)
    ]  # fmt: skip


def test_what_a_worker_starts_joins_its_cluster(local_ray_session, apart, tmp_path):
    apart.setenv("RAY_TMPDIR", str(tmp_path))  # Nothing is recorded there.
    codes = (
        """
        from raycrew.cluster_core import init_ray
        with init_ray() as connection:
            print("", connection.address, connection.why, "", sep="|")
        """,
        """
        import ray
        ray.init()
        print("", ray.get_runtime_context().gcs_address, "", sep="|")
        """,
    )
    with init_ray(local_ray_session):
        untold, told = ray.get(children_of_a_worker.remote(codes), timeout=240)
    assert untold[:2] == [local_ray_session, "a worker of it started this process"]
    assert told[0] == local_ray_session


def test_no_cluster(apart, tmp_path):
    apart.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(NoClusterError, match="no running Ray cluster was found"):
        init_ray("auto")
    assert not ray.is_initialized()


@pytest.mark.hostile
def test_an_address_where_nobody_listens(apart):
    with pytest.raises(ClusterUnreachableError, match="refused") as caught:
        init_ray("127.0.0.1:1")
    assert caught.value.address == "127.0.0.1:1"


@pytest.mark.hostile
def test_an_address_where_something_else_listens(apart):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterUnreachableError, match="does not answer as Ray does"):
            init_ray(address, timeout_s=2)
    assert not ray.is_initialized()


def test_only_where_no_cluster_is_found_may_one_be_started(local_ray_session, tmp_path):
    """Neither a wrong token for a named cluster, nor for a found one, is a reason for one of one's own."""
    code = """
        import os, pathlib, ray
        from raycrew.cluster_core import ClusterConnectionError, init_ray

        def attempt(*address):
            try:
                init_ray(*address)
            except ClusterConnectionError as error:
                said.extend([type(error).__name__, str(error.address), str(ray.is_initialized())])

        said = []
        attempt()
        address = os.environ.pop("RAY_ADDRESS")
        record = pathlib.Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
        record.parent.mkdir()
        record.write_text(address)
        attempt()
        record.write_text("192.0.2.1:6379")  # Left behind by a cluster that is no more.
        attempt("auto")
        print(*said)
    """
    wrong = {"RAY_ADDRESS": local_ray_session, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    apart = {"RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_ID": ""}
    refused = ["ClusterAuthenticationError", local_ray_session, "False"]
    assert run_driver(code, wrong | apart).split() == [*refused, *refused, "NoClusterError", "None", "False"]


JOIN = """
    import os, sys
    from raycrew.cluster_core import NoClusterError, init_ray
    found = []
    for devices in sys.argv[1:]:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
        try:
            with init_ray("auto") as connection:
                found.append(connection.address)
        except NoClusterError:
            found.append("none")
    print(*found)
"""


@pytest.mark.long  # in short, without Ray: test_discovery's choices
@pytest.mark.slow
def test_reuse_by_visible_devices(tmp_path):
    start = f"""
        from raycrew.cluster_core import init_ray
        connection = init_ray("local", num_cpus=1, num_gpus=2, object_store_memory={STORE})
        print("ready", connection.address)
    """
    elsewhere = {"RAY_TMPDIR": str(tmp_path), "SLURM_JOB_ID": ""}  # Nothing is recorded there.
    with driver(start, {"CUDA_VISIBLE_DEVICES": "101,102"}) as address:
        joined = run_driver(JOIN, elsewhere, "101", "", "102,101", "102").split()
        assert joined == ["none", "none", address, "none"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"address": "/tmp/logs"}, ValueError, "is a path.*log_dir='/tmp/logs'"),
        ({"address": "./logs"}, ValueError, "is a path"),
        ({"address": "host"}, ValueError, "not host:port"),
        ({"address": "host:99999"}, ValueError, "not host:port"),
        ({"address": "http://host:1"}, ValueError, "not host:port"),
        ({"address": 6379}, TypeError, "int"),
        ({"forward_env": "NCCL_DEBUG"}, TypeError, "sequence of names"),
        ({"forward_env": ["HF_TOKEN"]}, ValueError, "looks like a secret"),
        ({"secrets": ["SURELY_NOT_SET"]}, ValueError, "not set"),
        ({"temp_dir": "/tmp/" + "x" * 60}, ValueError, "65 bytes; sockets below it allow 4"),
        ({"temp_dir": "/dev/full"}, ValueError, "temp_dir is '/dev/full', and /dev/full is no folder: name"),
        (
            {"log_dir": "/dev/full/logs"},
            ValueError,
            "log_dir is '/dev/full/logs', and /dev/full is no folder",
        ),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        init_ray(**arguments)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/env/tmp", "inside the active virtual environment /env"),
        ("some/folder", "not absolute"),
        ("/tmp/" + "x" * 60, "69 bytes; sockets below it allow"),
    ],
)
@pytest.mark.hostile
def test_a_session_folder_with_which_ray_would_hang_is_refused(monkeypatch, name, folder, message):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", "/env")
    monkeypatch.setenv(name, folder)
    with pytest.raises(ValueError, match=message):
        init_ray("local")
    assert not ray.is_initialized()


@pytest.mark.smoke
def test_sessions_lie_in_a_folder_of_the_users_own(short_folder):
    own = Path(short_folder) / f"raycrew-{os.getuid()}"
    own.mkdir(mode=0o755)
    assert folder_of_sessions({"TMPDIR": str(short_folder)}) == str(own / "ray")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.smoke
@pytest.mark.parametrize(
    "put", [Path.touch, lambda own: own.symlink_to("/tmp"), lambda own: own.symlink_to("/no")]
)
@pytest.mark.hostile
def test_a_folder_of_sessions_that_is_somebody_elses_is_refused(short_folder, put):
    put(Path(short_folder) / f"raycrew-{os.getuid()}")
    with pytest.raises(ClusterError, match=r"is not this user's own: pass another temp_dir"):
        folder_of_sessions({"TMPDIR": str(short_folder)})


@pytest.mark.smoke
@pytest.mark.hostile
def test_a_folder_of_sessions_of_another_user_is_refused(short_folder, monkeypatch):
    (Path(short_folder, "raycrew-12345")).mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ClusterError, match="is not this user's own"):
        folder_of_sessions({"TMPDIR": str(short_folder)})


@pytest.mark.smoke
def test_sessions_lie_where_ray_has_them_whatever_python_takes_for_temporary(short_folder, monkeypatch):
    monkeypatch.setattr(folders, "_TEMPORARY", short_folder)
    own = folder_of_sessions({"TEMP": "/not/rays", "TMP": "/not/rays"})
    assert own == f"{short_folder}/raycrew-{os.getuid()}/ray"


@pytest.mark.smoke
@pytest.mark.hostile
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_a_folder_of_sessions_that_cannot_be_made_is_said(short_folder, monkeypatch, code):
    def refuse(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ClusterError, match=rf"can't be made: {os.strerror(code)}\. Pass another temp_dir"):
        folder_of_sessions({"TMPDIR": short_folder})


@pytest.mark.smoke
@pytest.mark.hostile
@pytest.mark.parametrize(("mode", "said"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_it_is_said_where_others_may_put_another_folder_in_place_of_that_of_sessions(
    short_folder, caplog, mode, said
):
    shared = Path(short_folder, "shared")
    (shared / "mine").mkdir(parents=True)
    shared.chmod(mode)
    assert folder_of_sessions({"TMPDIR": str(shared / "mine")})
    assert ("others may replace it" in caplog.text) == said
    assert not said or f"{shared} is open to all" in caplog.text


@pytest.mark.smoke
def test_a_folder_that_is_named_for_ray_is_left_to_it(short_folder, caplog):
    assert folder_of_sessions({"RAY_TMPDIR": str(short_folder), "TMPDIR": "/none"}) is None
    assert not list(Path(short_folder).iterdir())
    assert not caplog.text
    long = "/tmp/" + "x" * 32
    assert folder_of_sessions({"TMPDIR": long}) is None
    assert f"{long}/ray, is open to all" in caplog.text
    assert not Path(long).exists()


def test_clusters_that_start_at_once_may_link_their_logs_in_one_folder(tmp_path):
    def link(number):
        for _ in range(200):
            link_logs(tmp_path / "logs", f"/session-{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(link, range(4)))
    (left,) = (tmp_path / "logs").iterdir()
    assert left.name == "ray" and str(left.readlink()).startswith("/session-")


def test_what_is_in_the_way_of_the_link_to_logs_stays(tmp_path):
    (tmp_path / "ray").write_text("mine")
    with pytest.raises(ClusterError, match="in the way of the link to Ray's logs"):
        link_logs(tmp_path, "/session")
    assert (tmp_path / "ray").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_errors_are_connection_errors():
    for error in (NoClusterError, ClusterUnreachableError, ClusterAuthenticationError):
        assert issubclass(error, ConnectionError)
