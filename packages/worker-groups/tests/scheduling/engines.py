"""Engines that the tests of roles have made on workers."""

import asyncio
import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import ray
from patience import eventually

from raycrew.worker_groups import current_worker
from raycrew.worker_groups.scheduling import SchedulerClosedError, WorkerTimeoutError

shell = Popen  # what a module imports is no engine of it


class Echo:
    """Says who and where it is, and what it is given."""

    def __init__(self, word="", *, fail=""):
        if fail:
            raise ValueError(fail)
        self.word, self.counted = word, 0

    def count(self):
        self.counted += 1
        return self.counted

    def say(self, *args, **kwargs):
        return self.word, args, kwargs

    def where(self):
        worker = current_worker()
        return worker.group_name, worker.rank, os.getpid(), worker.node_id

    def env(self, *names):
        return [os.environ.get(name) for name in names]

    def is_main_thread(self):
        return threading.current_thread() is threading.main_thread()

    def oops(self):
        raise KeyError("lost")

    def nested(self):
        raise WorkerTimeoutError("an engine's own worker is late", worker_id="inner/0")

    def closed(self):
        raise SchedulerClosedError("an engine's own scheduler is closed")

    def leave(self):
        sys.exit("enough")

    async def leave_later(self):
        sys.exit("enough")

    def one_by_one(self):
        return (number for number in range(3))

    async def one_by_one_later(self):
        yield 1

    def wait(self, path):
        eventually(Path(path).exists, path)

    def nap(self, seconds):
        time.sleep(seconds)
        return seconds

    def die(self):
        sys.stderr.write("the last words\n")
        os._exit(3)

    async def later(self, value):
        await asyncio.sleep(0)
        return value

    async def never(self):
        await asyncio.sleep(3600)

    def future(self, value):
        return ThreadPoolExecutor(1).submit(lambda: value)

    def ref(self, value):
        return ray.put(value)


class Closing:
    """Notes its end in a file, after some time; `fail` makes it end badly."""

    def __init__(self, path, name, seconds=0.0, fail=False):
        self.path, self.name, self.seconds, self.fail = Path(path), name, seconds, fail

    def destroy(self):
        time.sleep(self.seconds)
        with self.path.open("a") as file:
            file.write(f"{self.name}\n")
        if self.fail:
            raise RuntimeError(f"{self.name} did not want to")

    def busy(self, seconds):
        time.sleep(seconds)


class Spawning:
    """Starts actors on the first and the last bundle of its placement group, as engines with executors do."""

    def __init__(self):
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        self.bundles = group.bundle_specs
        amounts = {"num_cpus": 0, "num_gpus": self.bundles[0].get("GPU", 0)}
        strategies = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index in (0, group.bundle_count - 1)
        ]
        remote = ray.remote(Child)
        self.children = [
            remote.options(scheduling_strategy=strategy, **amounts).remote() for strategy in strategies
        ]

    def places(self):
        """How many bundles there are, and on which nodes the actors are."""
        return len(self.bundles), ray.get([child.node.remote() for child in self.children], timeout=60)


class Child:
    def node(self):
        return ray.get_runtime_context().get_node_id()


def seeded(value):
    os.environ["RAYCREW_TEST_SEED"] = str(value)
    return value


def gives_none():
    pass


def leaves():
    sys.exit("enough")


def refuses():
    raise RuntimeError("no seed")


class Peer:
    """Gives what it is given to its peers through a folder, in place of a collective operation."""

    def __init__(self, folder):
        self.path = Path(folder, "arguments")

    def broadcast_arguments(self, arguments):
        if arguments is not None:
            if arguments[0] == ("wrong",):
                raise ValueError("wrong")
            part = self.path.with_suffix(".part")
            part.write_bytes(pickle.dumps(arguments))
            part.rename(self.path)
            return arguments
        while not self.path.exists():
            time.sleep(0.005)
        return pickle.loads(self.path.read_bytes())

    def add(self, one, *, other):
        return one + other
