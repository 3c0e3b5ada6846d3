"""Worker classes of the tests; workers import this module by name."""

import asyncio
import ctypes
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import ray

from raycrew.worker_groups import current_worker
from raycrew.worker_groups._on_nodes.page import read
from raycrew.worker_groups._worker import heart

AT_IMPORT = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "COLOUR", "API_TOKEN")}


def await_file(path):
    deadline = time.monotonic() + 200
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.01)


class Worker:
    """Does a bit of everything."""

    def __init__(self, base=0, *, scale=1):
        self.base = base
        self.scale = scale
        self.kept = None
        self.on_main_thread = threading.current_thread() is threading.main_thread()

    def add(self, x, y=0, *, z=0):
        return (self.base + x + y + z) * self.scale

    def where(self):
        return current_worker()

    def environment(self, *names):
        return {name: os.environ.get(name) for name in names}

    def at_import(self):
        return AT_IMPORT

    def main_thread(self):
        return self.on_main_thread and threading.current_thread() is threading.main_thread()

    def count_to(self, n):
        yield from range(n)

    def count_and_fail_on(self, ranks, n):
        yield from range(n)
        if current_worker().rank in ranks:
            raise ValueError("no more numbers")

    def total(self, values):
        return sum(values)

    def echo(self, *args, **kwargs):
        return current_worker().rank, args, kwargs

    def pid(self):
        return os.getpid()

    def nothing(self):
        return None

    def keep(self, value):
        self.kept = value

    def get_kept(self):
        return self.kept

    def wait_for(self, path):
        """Until a file is there; None waits for nothing."""
        if path is not None:
            await_file(path)
        return current_worker().rank

    def fail_on(self, ranks, gate=None):
        if current_worker().rank in ranks:
            sys.stdout.write("the last words\n")
            sys.stdout.flush()
            raise ValueError(f"rank {current_worker().rank} was told to fail")
        self.wait_for(gate)
        return "fine"

    def die_on(self, ranks, gate=None):
        if current_worker().rank in ranks:
            os._exit(7)
        self.wait_for(gate)
        return "fine"

    def nap(self, seconds):
        time.sleep(seconds)
        return current_worker().rank

    def fail_to_clean(self):
        raise RuntimeError("no clean-up")

    def clean_with_timeout(self, timeout="its own"):
        if timeout != "its own":
            raise TypeError(f"the timeout is {timeout}")

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def label(cls):
        return cls.__name__

    def _hidden(self):
        return "seen"

    def count_and_wait_for(self, n, path):
        yield from range(n)
        self.wait_for(path)
        yield "end"

    def really(self):
        """Where Ray says that this is, and which device it assigned."""
        return ray.get_runtime_context().get_node_id(), ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def note(self, folder):
        return Noted(folder)


class Noted:
    """Leaves the numbers of the processes that unpickle it in a folder; may be large."""

    def __init__(self, folder, size=0):
        self.folder, self.load = folder, bytes(size)

    def __reduce__(self):
        return _noted, (self.folder, self.load)


def _noted(folder, load):
    Path(folder, str(os.getpid())).touch()
    return Noted(folder, len(load))


class AsyncWorker:
    """Has async methods, so all its methods run on an event loop."""

    def __init__(self):
        self.loop_at_init = asyncio.get_event_loop_policy()

    async def slowly(self, x):
        await asyncio.sleep(0.01)
        return x

    async def gather(self, values):
        return sum(values)

    async def forever(self):
        await asyncio.sleep(3600)

    async def count_to(self, n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    def rank(self):
        return current_worker().rank


@ray.remote(num_cpus=0, max_concurrency=2)
class Decorated:
    """Decorated, as much code in this field is."""

    def __init__(self, name="none"):
        self.name = name

    @ray.method(num_returns=1)
    def get_name(self):
        return self.name


class Grouped:
    """Has a concurrency group of its own."""

    @ray.method(concurrency_group="side")
    def side(self):
        return threading.current_thread().name

    def plain(self, path):
        await_file(path)
        return threading.current_thread().name


class RaisesInInit:
    def __init__(self, rank):
        sys.stdout.write("the last words\n")
        sys.stdout.flush()
        if current_worker().rank == rank:
            raise RuntimeError("not today")
        time.sleep(3600)


class RaisesOnAll:
    def __init__(self, folder):
        me = current_worker()
        Path(folder, str(me.rank)).touch()
        while len(list(Path(folder).iterdir())) < me.world_size:
            time.sleep(0.01)
        raise RuntimeError(f"not today on {current_worker().rank}")


class DiesInInit:
    def __init__(self):
        if current_worker().rank == 1:
            os._exit(9)


class SleepsInInit:
    def __init__(self):
        if current_worker().rank == 1:
            time.sleep(3600)


class Configured:
    """Tells its options by itself."""

    @staticmethod
    def configure_worker(num_gpus, bundle_indices, num_gpus_per_node):
        resources = {"num_cpus": 0.5}
        env_vars = {"COLOUR": "green", "LEADER": str(bundle_indices)}
        return resources, env_vars, {"told": (num_gpus, bundle_indices, num_gpus_per_node)}

    def __init__(self, told=None, other=None):
        self.told = told
        self.other = other

    def answer(self):
        return self.told, self.other, os.environ.get("COLOUR"), os.environ.get("LEADER")


class KeywordOnlyError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class RenamedError(OSError):
    def __init__(self, path, reason):
        super().__init__(5, f"{reason} at {path}")
        self.path = path


class LockedError(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Thrower:
    """Raises what is hard to send, or to tell."""

    def __init__(self, at_once=False):
        if at_once:
            raise KeywordOnlyError(code=1)

    def throw(self, kind):
        errors = {
            "keyword": lambda: KeywordOnlyError(code=3),
            "renamed": lambda: RenamedError("/there", "broken"),
            "locked": lambda: LockedError("held"),
            "speechless": SpeechlessError,
            "noted": lambda: ValueError("odd notes"),
        }
        error = errors[kind]()
        if kind == "noted":
            error.__notes__ = 5
        raise error

    def stream(self, kind):
        yield 1
        self.throw(kind)


class SlowAgain:
    """Starts at once the first time, and never the second."""

    def __init__(self, folder):
        Path(folder, str(os.getpid())).touch()
        if len(list(Path(folder).iterdir())) > 1:
            time.sleep(3600)

    def die(self):
        os._exit(7)


class Listener:
    """Notes what it hears of generations, and at which port they meet."""

    def __init__(self):
        self.heard = []

    def on_generation(self, worker):
        self.heard.append((worker.generation, worker.master_port, os.environ["MASTER_PORT"]))
        if worker.generation in self.refused():
            raise RuntimeError(f"generation {worker.generation} is not for rank {worker.rank}")

    def refused(self):
        return {int(number) for number in os.environ.get("REFUSED", "").split(",") if number}

    def get_heard(self):
        return self.heard

    def die_on(self, ranks):
        if current_worker().rank in ranks:
            os._exit(7)

    def pid(self):
        return os.getpid()


class GeneratorListener:
    def on_generation(self, worker):
        yield worker


class DeafListener:
    def on_generation(self):
        pass


class Marker(str):
    """A path to which there may be weak references."""


class Mortal:
    """Dies when it is told to; its peers then fail of that."""

    def pid(self):
        return os.getpid()

    def meet(self, pids, dies):
        """Rank `dies` ends its process, and the others raise once they see that it is gone."""
        if current_worker().rank == dies:
            os._exit(7)
        while Path(f"/proc/{pids[dies]}").exists():
            time.sleep(0.001)
        raise ConnectionError("the peer closed the connection")

    def stream(self, pids, dies):
        yield current_worker().rank
        self.meet(pids, dies)

    def stream_and_die_once(self, marker, rank):
        """Three items; rank `rank` ends its process before the second, unless the marker is there."""
        yield 0
        self.die_once(marker, rank)
        yield 1
        yield 2

    def die_once(self, marker, rank):
        """Rank `rank` ends its process, unless the marker is there; gives the rank and its generation."""
        if current_worker().rank == rank and not Path(marker).exists():
            Path(marker).touch()
            os._exit(7)
        return current_worker().rank, current_worker().generation

    def die_or_note(self, marker, rank, folder):
        """As `die_once`, but gives something large that notes who loads it."""
        self.die_once(marker, rank)
        return Noted(folder, 2**20)

    def die_on(self, rank):
        if current_worker().rank == rank:
            os._exit(7)


class SlowMortal(Mortal):
    """Starts at once the first time; later ones tell that they begin and wait for a gate."""

    def __init__(self, begun, gate):
        if current_worker().generation > 0:
            Path(begun).touch()
            await_file(gate)


class Latecomer:
    """Rank 1 does not start before there is a file, and not at all without one to wait for."""

    def __init__(self, gate):
        if current_worker().rank == 1:
            if not gate:
                raise ValueError("rank 1 can't start")
            await_file(gate)


class Patient:
    """Is slow, or stuck in several ways."""

    def pid(self):
        return os.getpid()

    def say(self, text):
        print(text, flush=True)  # noqa: T201

    def go_on_until(self, path):
        while not Path(path).exists():
            current_worker().tick()
            time.sleep(0.01)

    def sit_until(self, path):
        await_file(path)

    def hold_the_lock_until(self, fifo):
        """Until somebody writes into a named pipe; no other thread of Python's runs meanwhile."""
        with Path(fifo).open("rb", buffering=0) as pipe:
            ctypes.PyDLL(None).read(pipe.fileno(), ctypes.create_string_buffer(1), 1)

    def tick_in_a_child(self):
        """In a forked child, as a pool may; gives how it ended, and whether the page is as before."""
        before = read(heart._own[-1]._bytes).calls
        child = os.fork()
        if child == 0:
            status = 1
            try:
                current_worker().tick()
                status = 0
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1], read(heart._own[-1]._bytes).calls == before

    def share(self, size):
        """Take memory that others could map."""
        self.shared = mmap.mmap(-1, size)
        for _ in range(size // 2**20):
            self.shared.write(b"x" * 2**20)

    def grow(self):
        """Until the end."""
        taken = []
        while True:
            taken.append(b"x" * 2**20)
            time.sleep(0.001)
