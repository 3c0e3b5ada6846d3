"""Runs the tests of modules against their mutations, each in a fork of a process that has collected them.

Nothing of the packages is imported before the first fork: each package is tried in a fresh process. There
pytest collects the tests once, and runs them once to learn which of them call which function. For each
mutation a fork then changes the code of a function in place and runs the tests that call it. A mutation of
more than functions (a default, a field, a constant), or of what was called by then, is tried the plain way:
the changed source in the file, everything imported anew, all tests of the module.
"""

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest
from codes import Key, caches_of, changed_functions, functions_of, key_of
from hypothesis import Phase, settings
from mutations import Mutation

# A whole Ray for each mutation would take too long: other tests stand for the modules.
RAY_FIXTURES = frozenset({"local_ray_session", "ray_nodes_session", "ray_cluster"})
IMPOSSIBLE = 77  # to change in place
NOTICED, UNNOTICED, ENDLESS, PLAIN = "noticed", "unnoticed", "ended at a limit", "plain"
OUTCOMES = {0: UNNOTICED, IMPOSSIBLE: PLAIN}
SHOWN = (UNNOTICED, ENDLESS)


@dataclass(frozen=True)
class Limits:
    """How long the tests of one mutation may take, and how much memory."""

    wall_s: float = 1800.0
    cpu_s: int = 300
    memory_bytes: int = 6 << 30

    def scaled(self, took_s: float) -> "Limits":
        """Enough for what took so long without a mutation, on a machine that has become busy since."""
        return Limits(min(self.wall_s, 120 + 20 * took_s), min(self.cpu_s, int(10 + 5 * took_s)))


ALL = Limits(wall_s=7200.0, cpu_s=7200)


def forked(work: Callable[[], int], limits: Limits) -> int:
    """The exit code of a function in a fork, all of whose processes end with it; at a limit a signal's."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s))
            resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
            code = work()
        finally:
            os._exit(code)
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], limits.wall_s)
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome_of(code: int) -> str:
    """What an exit code says; that of a signal: it did not end by itself."""
    return OUTCOMES.get(code, ENDLESS if code < 0 else NOTICED)


@dataclass
class Selected:
    """A pytest plugin: the tests that need no Ray and no patience, but those that fail anyway."""

    failed: Collection[str] = ()

    def pytest_sessionstart(self) -> None:
        """A property need not be broken by the smallest example, only by the same ones each time."""
        settings.register_profile(
            "mutants",
            parent=settings.get_profile("unhurried"),
            phases=(Phase.explicit, Phase.generate),
            derandomize=True,
            report_multiple_bugs=False,
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        items[:] = [
            item
            for item in items
            if not item.get_closest_marker("long")
            and item.nodeid not in self.failed
            and RAY_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        ]


@dataclass
class Learnt:
    """What the tests do without a mutation: who calls what, how long it takes, who fails."""

    calls: dict[str, set[Key]] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def covering(self, keys: Iterable[Key], tests: Iterable[pytest.Item]) -> list[pytest.Item]:
        """Those of the tests that call one of the functions, the quick ones first."""
        wanted = set(keys)
        found = [test for test in tests if not wanted.isdisjoint(self.calls.get(test.nodeid, ()))]
        return sorted(found, key=lambda test: self.took_s[test.nodeid])


@dataclass(frozen=True)
class Module:
    """A module to mutate, the files and folders of its tests, and its mutations."""

    source: Path
    tests: Sequence[Path]
    mutations: Sequence[Mutation]


class Living(NamedTuple):
    """What lives of the modules: functions, and those that remember what they gave."""

    functions: Sequence[FunctionType]
    caches: Sequence[Any]

    @classmethod
    def of(cls, modules: Sequence[Module]) -> "Living":
        """Of these modules."""
        files = {str(module.source) for module in modules}
        return cls(list(functions_of(files)), list(caches_of(files)))

    def forget(self) -> None:
        """Else only the first caller would seem to call what is remembered, and get what it gives."""
        for cache in self.caches:
            cache.cache_clear()


@dataclass
class InPlace(Selected):
    """A pytest plugin that tries the mutations of several modules instead of running the tests once."""

    modules: Sequence[Module] = ()
    tell: Callable[[object], None] = print
    learnt: Path = Path("learnt")
    early: set[Key] = field(default_factory=set)

    def run(self, arguments: Sequence[str]) -> int:
        """Collect, watching which functions are called by then."""
        with self.watched(self.early):
            return int(pytest.main([*arguments], plugins=[self]))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Learn, then try all."""
        sys.setprofile(None)
        forked(lambda: self._learn(session), ALL)
        learnt = pickle.loads(self.learnt.read_bytes())
        living = Living.of(self.modules)
        gc.freeze()
        for at, module in enumerate(self.modules):
            tests = [
                item
                for item in session.items
                if item.nodeid not in learnt.failed
                and any(item.path.is_relative_to(place) for place in module.tests)
            ]
            for which, mutation in enumerate(module.mutations):
                self.tell((at, which, self._try(session, module, tests, learnt, living, mutation)))
        self.tell({"failed": sorted(learnt.failed)})
        return True

    @contextlib.contextmanager
    def watched(self, seen: set[Key]) -> Iterator[None]:
        """Note each function of the modules that is called."""
        files = {str(module.source) for module in self.modules}

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename in files:
                seen.add(key_of(frame.f_code))

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _learn(self, session: pytest.Session) -> int:
        learnt, living = Learnt(), Living.of(self.modules)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            started, failed = time.monotonic(), session.testsfailed
            living.forget()
            with self.watched(learnt.calls.setdefault(item.nodeid, set())):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            learnt.took_s[item.nodeid] = time.monotonic() - started
            if session.testsfailed > failed:
                learnt.failed.add(item.nodeid)
        return self.learnt.write_bytes(pickle.dumps(learnt))

    def _try(
        self,
        session: pytest.Session,
        module: Module,
        tests: Sequence[pytest.Item],
        learnt: Learnt,
        living: Living,
        mutation: Mutation,
    ) -> str:
        codes = [
            compile(text, str(module.source), "exec") for text in (module.source.read_text(), mutation.source)
        ]
        changed = changed_functions(*codes)
        if not changed or not self.early.isdisjoint(changed):
            return PLAIN
        chosen = learnt.covering(changed, tests)
        limits = Limits().scaled(sum(learnt.took_s[item.nodeid] for item in chosen))
        if not chosen:
            return UNNOTICED
        code = forked(lambda: run_changed(session, chosen, living, changed), limits)
        if code < 0:  # once more, as the machine may have been busy
            code = forked(lambda: run_changed(session, chosen, living, changed), limits)
        return outcome_of(code)


def run_changed(
    session: pytest.Session,
    tests: Sequence[pytest.Item],
    living: Living,
    changed: Mapping[Key, CodeType],
) -> int:
    """Change the functions, run the tests: 1 at the first that fails."""
    for function in living.functions:
        code = changed.get(key_of(function.__code__))
        if code is not None and code.co_freevars != function.__code__.co_freevars:
            return IMPOSSIBLE
        function.__code__ = code or function.__code__
    for item, following in zip(tests, [*tests[1:], None], strict=True):
        living.forget()
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


@dataclass(frozen=True)
class Trial:
    """How pytest is called, a folder of its own, and whom to show what went unnoticed or did not end."""

    arguments: Sequence[str]
    folder: Path
    show: Callable[[Module, Mutation, str], None]

    def outcomes(self, modules: Sequence[Module]) -> tuple[list[tuple[Module, str]], list[str]]:
        """For each mutation its module and what became of it; and the tests that fail without one.

        Raises:
            RuntimeError: The tests could not be collected.
        """
        told, failed = self._in_place(modules)
        found = []
        for at, which, outcome in told:
            module, mutation = modules[at], modules[at].mutations[which]
            found.append((module, self._plain(module, mutation, failed) if outcome == PLAIN else outcome))
        return found, failed

    def _in_place(self, modules: Sequence[Module]) -> tuple[list[tuple[int, int, str]], list[str]]:
        told = self.folder / "told"
        told.write_text("")
        places = sorted({str(place) for module in modules for place in module.tests})

        def tell(what: Any) -> None:
            with told.open("a") as file:
                file.write(json.dumps(what) + "\n")
            if isinstance(what, tuple) and what[2] in SHOWN:
                self.show(modules[what[0]], modules[what[0]].mutations[what[1]], what[2])

        plugin = InPlace((), modules, tell, self.folder / "learnt")
        code = forked(lambda: plugin.run([*self.arguments, *places]), ALL)
        *outcomes, last = [*map(json.loads, told.read_text().splitlines())] or [[]]
        if not isinstance(last, dict):
            raise RuntimeError(f"the tests could not be collected or did not end (exit code {code})")
        return outcomes, last["failed"]

    def _plain(self, module: Module, mutation: Mutation, failed: Sequence[str]) -> str:
        original = module.source.read_text()
        module.source.write_text(mutation.source)
        arguments = ["-x", *self.arguments, *map(str, module.tests)]
        try:
            outcome = outcome_of(
                forked(lambda: int(pytest.main(arguments, plugins=[Selected(failed)])), Limits())
            )
        finally:
            module.source.write_text(original)
        if outcome in SHOWN:
            self.show(module, mutation, outcome)
        return outcome
