"""The example agent: its sandboxed tool by itself, an episode, and runs of the whole."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

import pytest
import ray

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import sync_weights
from raycrew.worker_groups import WorkerFailureError, replicated
from raycrew.worker_groups.services import Service

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent"
sys.path.insert(0, str(EXAMPLE))

import episodes  # noqa: E402
import policy  # noqa: E402
import tool  # noqa: E402
from episodes import ASKED, PLACES, Puzzle, play  # noqa: E402
from interpreter import Answer, EndedError, Interpreter, Limits  # noqa: E402

LIMITS = Limits(wall_s=20, cpu_s=1)


def answers(*programs, limits=LIMITS):
    async def run():
        interpreter = await Interpreter.start(limits)
        try:
            return [await interpreter.run(program) for program in programs]
        finally:
            await interpreter.close()

    return asyncio.run(run())


def test_names_stay_from_one_program_to_the_next():
    assert answers("def f(x):\n  return 3 * x", "f(4) <= 12", "y = f(1)", "y") == [
        Answer(),
        Answer("True"),
        Answer(),
        Answer("3"),
    ]


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x =", "SyntaxError"),
        ("exit(1)", "NameError"),
        ("raise SystemExit", "SystemExit"),
        ("len(bytearray(1 << 40))", "MemoryError"),
        ("open('/tmp/by-an-agent', 'w').write('x' * 100_000)", "OSError"),
    ],
)
def test_what_a_program_gets_wrong_is_an_answer_and_the_next_one_runs(expression, error):
    wrong, after = answers(expression, "1 + 1")
    assert wrong.error.startswith(error)
    assert (wrong.value, after) == ("", Answer("2"))


def test_a_program_gets_nothing_of_the_servers_environment_and_long_answers_are_cut(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "sesame")
    _, environment, said, long = answers("import os", "dict(os.environ)", "print('x' * 10**6)", "'x' * 10**6")
    assert "sesame" not in environment.value
    assert said == Answer("None")
    assert len(long.value) == 1000


@pytest.mark.parametrize(
    "program", ["while True: pass", "import os; os._exit(0)", "import os; os.write(4, b'x' * 10**6)"]
)
def test_an_interpreter_that_uses_too_much_has_ended(program):
    async def run():
        interpreter = await Interpreter.start(LIMITS)
        for _ in range(2):
            with pytest.raises(EndedError):
                await interpreter.run(program)
        await interpreter.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
        "os.execv(sys.executable, [sys.executable, '-c', ''])",
        "threading.Thread(target=print).start()",
        "[os.fork() for _ in range(1 << 20)]",
        "os.kill(os.getppid(), 0)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid()))",
    ],
)
def test_a_program_starts_and_ends_no_other_one_and_changes_no_limits(start):
    _, started, after = answers("import fcntl, os, resource, socket, struct, sys, threading", start, "1 + 1")
    refused = ("PermissionError", "RuntimeError: can't start new thread", "ValueError: not allowed to raise")
    assert started.error.startswith(refused)
    assert after == Answer("2")


def test_a_program_that_waits_too_long_is_ended():
    async def run():
        interpreter = await Interpreter.start(LIMITS)
        pid = int((await interpreter.run("__import__('os').getpid()")).value)
        interpreter._limits = Limits(wall_s=0.2)
        with pytest.raises(EndedError, match="took longer"):
            await interpreter.run("__import__('time').sleep(1000)")
        assert not is_running(pid)

    asyncio.run(run())


def test_what_a_program_may_do_with_its_own_files_it_may():
    program = "import fcntl, os, termios; r, w = os.pipe(); os.write(w, b'abc')"
    flags = "fcntl.fcntl(r, fcntl.F_GETFD)"
    waiting = "int.from_bytes(fcntl.ioctl(r, termios.FIONREAD, b'0000'), 'little')"
    assert answers(program, flags, waiting) == [Answer(), Answer("1"), Answer("3")]


def test_a_program_has_nearly_all_of_its_memory():
    assert answers("len(bytearray(192 << 20))") == [Answer(str(192 << 20))]


@pytest.mark.hostile
def test_a_program_ends_with_its_server_though_that_is_killed(tmp_path):
    here = f"import os, pathlib, time; os.write(0, b'') or os.mkdir({str(tmp_path)!r} + f'/{{os.getpid()}}')"
    code = (
        "import asyncio, threading; from interpreter import *\n"
        "async def run():\n"
        "    interpreter = await Interpreter.start(Limits(wall_s=1000))\n"
        f"    await interpreter.run({here + '; time.sleep(1000)'!r})\n"
        "threading.Thread(target=asyncio.run, args=(run(),)).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=EXAMPLE) as server:
        try:
            assert eventually(lambda: list(tmp_path.iterdir())), "the program runs"
        finally:
            server.kill()
    (pid,) = (int(path.name) for path in tmp_path.iterdir())
    assert eventually(lambda: not is_running(pid))


def eventually(condition):
    deadline = time.monotonic() + 120
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


class Client:
    """Asks an application, without a server."""

    def __init__(self):
        self.app = tool.create()

    async def __call__(self, method, session, program=""):
        sent, body = [], json.dumps({"program": program}).encode()

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        headers = [(b"x-session", session.encode())]
        scope = {
            "type": "http",
            "method": method,
            "path": "/session",
            "headers": headers,
            "query_string": b"",
        }
        await self.app(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])


def test_sessions_do_not_see_each_other_and_end():
    async def run():
        ask = Client()
        asked = [("PUT", "a", "x = 1"), ("PUT", "b", "x = 2"), ("POST", "a", "x"), ("POST", "b", "x")]
        said = [await ask(*each) for each in asked]
        await ask("DELETE", "a")
        said += [await ask("POST", "a", "x"), await ask("PUT", "b"), await ask("POST", "b", "x")]
        ended = [await ask("POST", "b", "import os; os._exit(0)"), await ask("POST", "b", "1")]
        await ask("DELETE", "b")
        return [(status, body.get("value")) for status, body in said[2:]], [status for status, _ in ended]

    said, ended = asyncio.run(run())
    assert said == [(200, "1"), (200, "2"), (404, None), (200, ""), (200, "")]
    assert ended == [410, 410]


def test_sessions_that_nobody_uses_make_room_for_others(monkeypatch):
    async def run():
        ask = Client()
        monkeypatch.setattr(tool, "MOST", 1)
        statuses = [(await ask("PUT", "a", "x = 1"))[0], (await ask("PUT", "b", "x = 1"))[0]]
        monkeypatch.setattr(tool, "IDLE_S", -1.0)
        statuses += [(await ask("PUT", "b", "x = 1"))[0], (await ask("POST", "a", "x"))[0]]
        await ask("DELETE", "b")
        return statuses

    assert asyncio.run(run()) == [200, 503, 200, 404]


class Bisecting:
    """An agent that needs no learning, with the interpreter at hand."""

    def __init__(self):
        self.versions = iter(range(4, 100))

    async def act(self, seen):
        low, high, turn = seen
        return (low if turn == ASKED else (low + high) // 2), 0.0, next(self.versions)

    @asynccontextmanager
    async def interpreter(self, program):
        names = {}
        exec(program, names)

        async def run(expression):
            return repr(eval(expression, names))

        yield run


def test_an_agent_that_bisects_solves_every_puzzle_and_a_sample_is_as_old_as_its_first_turn():
    chance = Random(1)
    puzzles = [Puzzle.made(chance, is_held_out=bool(i % 2)) for i in range(200)]
    assert {puzzle.answer for puzzle in puzzles} == set(range(PLACES))
    for puzzle in puzzles:
        sample = asyncio.run(play(Bisecting(), puzzle))
        assert (sample.columns["reward"], sample.columns["solved"], sample.version) == (1.0, 1.0, 4)


def test_held_out_programs_are_not_among_the_others():
    chance = Random(2)
    learnt = {Puzzle.made(chance).program for _ in range(2000)}
    assert not learnt & {Puzzle.made(chance, is_held_out=True).program for _ in range(2000)}


@contextmanager
def run_module():
    """The program, whose classes travel with the calls, as do those of the modules beside it."""
    spec = importlib.util.spec_from_file_location("example_agent", EXAMPLE / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for each in (module, episodes, policy):
        ray.cloudpickle.register_pickle_by_value(each)
    try:
        yield module
    finally:
        for each in (module, episodes, policy):
            ray.cloudpickle.unregister_pickle_by_value(each)
        del sys.modules[spec.name]


def check_all_are_accounted_for(run, consumed):
    samples = run.samples
    assert samples.consumed == consumed
    assert run.rollouts.failed == 0
    assert run.rollouts.produced == samples.produced == samples.consumed + samples.dropped + samples.held


def test_every_sample_of_a_run_is_accounted_for_and_none_is_too_old(local_ray):
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4)
    with run_module() as program, cluster:
        run = program.learn(cluster, steps=12, batch=8, held_out=8, bound=1)
    assert len(run.curve) == 12
    assert 0 <= run.oldest <= 1
    check_all_are_accounted_for(run, 12 * 8)


class Failing(policy.Trainer):
    @replicated
    def train(self, columns):
        raise ArithmeticError("it diverged")


def test_a_run_whose_trainer_fails_fails(local_ray, monkeypatch):
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4)
    with run_module() as program, cluster:
        monkeypatch.setattr(program, "Trainer", Failing)
        with pytest.raises(WorkerFailureError, match="it diverged"):
            program.learn(cluster, steps=1, batch=8, held_out=2, bound=1)


@pytest.mark.long
def test_a_tool_server_that_is_killed_takes_no_episode_along(local_ray, monkeypatch):
    services, restarts = [], []

    class Seen(Service):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            services.append(self)

    def sync_and_kill(trainer, policies):
        report = sync_weights(trainer, policies)
        if report.version == 3:
            os.kill(services[0].replicas[0].pid, signal.SIGKILL)
        if report.version == 12:
            while not services[0].refresh()[0].restarts:
                time.sleep(0.05)
            restarts.append(services[0].refresh()[0].restarts)
        return report

    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4)
    with run_module() as program, cluster:
        monkeypatch.setattr(program, "Service", Seen)
        monkeypatch.setattr(program, "sync_weights", sync_and_kill)
        run = program.learn(cluster, steps=12, batch=8, held_out=8, bound=2)
    assert restarts == [1]
    check_all_are_accounted_for(run, 12 * 8)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_agent_learns_to_use_its_tool(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "held-out puzzles solved" in done.stdout
