"""No module has a lock that a forked process could wait for for ever, as nobody there is done with it."""

import functools
import importlib
import os
import pkgutil
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import raycrew

KEPT = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
KEPT += (threading.Event, threading.Barrier, queue.Queue)


def import_all() -> None:
    """Import each module, but for those of programs that are not installed."""
    for found in pkgutil.walk_packages(raycrew.__path__, "raycrew.", onerror=lambda _: None):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("raycrew"):
                    raise


def is_ours(kind: type) -> bool:
    """Whether a class is of these packages."""
    return kind.__module__.startswith("raycrew.")


def parts_of(thing: object) -> Iterable[tuple[object, object]]:
    """(name, what it holds) of whatever a lock may be in."""
    if isinstance(thing, dict):
        return list(thing.items())
    if isinstance(thing, functools.cached_property):
        return vars(thing).items()  # Until Python 3.12 it has a lock for all objects of a class.
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return list(enumerate(thing))
    if isinstance(thing, type) or not is_ours(type(thing)):
        return list(vars(thing).items()) if isinstance(thing, type) and is_ours(thing) else ()
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    own = [(name, getattr(thing, name)) for name in slots if hasattr(thing, name)]
    return [*own, *getattr(thing, "__dict__", {}).items()]


def kept_by_modules() -> Iterator[tuple[str, object]]:
    """(where it is, what it is) of each lock that can be reached from a module."""
    seen = set[int]()
    waiting = [
        (f"{name}.{key}", value)
        for name, module in list(sys.modules.items())
        if name.startswith("raycrew.")
        for key, value in list(vars(module).items())
        if not key.startswith("__")
    ]
    while waiting:
        where, thing = waiting.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, KEPT):
                yield where, thing
            waiting += [(f"{where}.{name}", part) for name, part in parts_of(thing)]


def print_those_of_a_child() -> None:
    """Print where a forked child has the very locks of its parent, and how many there are in all."""
    import_all()
    before = dict(kept_by_modules())
    if not os.fork():
        held = {id(one) for one in before.values()}
        print(*(where for where, one in kept_by_modules() if id(one) in held), sep="\n", flush=True)
        os._exit(0)
    os.wait()
    print(len(before))


def test_a_forked_process_has_locks_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *shared, count = done.stdout.split()
    assert int(count) > 10, "they are not found"
    assert shared == [], "to be made by the package's PerProcess"


if __name__ == "__main__":
    print_those_of_a_child()
