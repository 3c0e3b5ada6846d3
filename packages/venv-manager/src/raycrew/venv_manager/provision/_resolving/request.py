"""From a spec to a recipe: what is asked for, what was chosen for it, and the key that comes of both."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from raycrew.venv_manager import _spec
from raycrew.venv_manager._spec import (
    EnvironmentSpec,
    Package,
    counted_settings,
    extra_requirements,
    settings,
    source_paths,
    wheel_entry,
    without_credentials,
    write_lock,
)
from raycrew.venv_manager._store import Luggage, Recipe, Store, Sync, luggage, this_platform, wheel_of
from raycrew.venv_manager._uv import access_of, build_environment, configured, told_to_uv
from raycrew.venv_manager._waiting import Report, result_of, scratch, silent, workers
from raycrew.venv_manager.errors import InputsChangedError
from raycrew.venv_manager.provision._resolving.choices import Choice, ChoiceShelf
from raycrew.venv_manager.provision._resolving.resolution import (
    choose,
    expectation,
    is_synced,
    recipe_variables,
    sync_of,
    told_in,
)
from raycrew.venv_manager.provision._resolving.sources import Built, Source, SourceShelf, built_with

# Which decide, with settings of uv, what a source is built to.
_SETTING = ("interpreter", "platform", "variables")


class Request:
    """What somebody asks a store for.

    Args:
        spec: The spec.
        store: The store.

    Attributes:
        carried: What the driver's environment gives along.
        asked: All that decides the environment before versions are chosen.
        choosing: Digest of what decides which versions are chosen.
        by_lock: Its lock file alone decides, and uv installs it by itself: nothing is chosen.

    Raises:
        SpecError: The spec does not fit what lies on the disk.
    """

    def __init__(self, spec: EnvironmentSpec, store: Store) -> None:
        self.spec, self.store = spec, store
        self.carried = carried = luggage() if spec.carry else Luggage()
        environ = build_environment(spec, store.environ)
        given = carried.identity() if spec.carry else {}
        self.asked = _spec.asked(spec, environ, given, configured(store.environ))
        self._environ = {**environ, **dict(spec.environment)}
        self.by_lock = is_synced(spec, carried)
        self.choosing = _spec.choice_of(self.asked)
        self._paths = source_paths(spec, environ)
        self._told = told_to_uv(spec, store.environ)
        told = counted_settings(self._told, spec)
        self._setting = {part: self.asked[part] for part in _SETTING} | {"settings": told}
        self._built_now: dict[str, Built] = {}
        self._choices, self._sources = ChoiceShelf(store), SourceShelf(store)

    @property
    def sync(self) -> Sync | None:
        """How uv installs it by itself, if it does."""
        if not self.by_lock:
            return None
        same = partial(self._need_same, _spec.identity(self.asked, {}, {}))
        return replace(sync_of(self.spec, self.store.environ), need_same=same)

    def known(self) -> dict[str, Any] | None:
        """The identity of the environment, or None where something has to be chosen or built for it."""
        if self.by_lock:
            return _spec.identity(self.asked, {}, {})
        choice = self._choices.get(self.choosing)
        built = (
            {}
            if choice is None
            else {n: self._sources.known(self._source(choice, n)) for n in choice.sources}
        )
        if choice is None or not all(built.values()):
            return None
        return self._identity(choice, {name: found.content for name, found in built.items() if found})

    def identity(self, report: Report = silent, *, anew: bool = False) -> dict[str, Any]:
        """The identity of the environment: versions are chosen and local sources built, if need be.

        Args:
            report: Told what is going on.
            anew: Choose versions even if that was done before.

        Raises:
            UvError: There is no set of versions, or a local source does not build.
            StoreError: The store cannot be written to.
        """
        if (found := None if anew and not self.by_lock else self.known()) is not None:
            return found
        choice = self._chosen(report, anew)
        return self._identity(choice, {name: built.content for name, built in self._built(choice, report)})

    def recipe(self, identity: Mapping[str, Any], report: Report = silent, *, synced: bool = False) -> Recipe:
        """The recipe of the environment: the one that was kept, else a new one, which is kept.

        Args:
            identity: The environment's.
            report: Told what is going on.
            synced: uv installs it by itself meanwhile, and has still to find the lock to fit: it is not kept.

        Raises:
            UvError: uv failed.
            InputsChangedError: It would be that of another environment.
            StoreError: The store cannot be written to.
        """
        key = _spec.key_of(identity)
        if (kept := self.store.recipe(key)) is not None:  # how files come there may differ, not which
            return replace(kept, **self._own())
        self.store.need_writable(key)
        made = self._recipe(key, identity, report, synced)
        if not synced:
            self.store.keep_recipe(made)
        return made

    def _recipe(self, key: str, identity: Mapping[str, Any], report: Report, checked: bool) -> Recipe:
        choice = self._choose(report, checked) if self.by_lock else self._chosen(report, False)
        built = dict(self._built(choice, report))
        wheels = dict(self._wheels(choice, built))
        if not checked:  # else once uv has installed it
            self._need_same(identity, choice, {name: wheel.content for name, wheel in built.items()})
        entries: list[Package] = [*choice.entries(), *(wheel_entry(*pair) for pair in wheels.items())]
        return Recipe(
            key=key,
            identity=identity,
            lock=without_credentials(write_lock(entries)),
            wheels=wheels,
            platform=this_platform(),
            expectation=expectation(self.spec, self.carried),
            **self._own(),
        )

    def _own(self) -> dict[str, Any]:
        """What of a recipe belongs to who asks: others who come to the same environment have their own."""
        spec, environ = self.spec, self.store.environ
        told = told_to_uv(spec, environ)
        access = access_of(spec, environ, told)
        return {
            "spec": spec.to_dict(),
            "python": spec.python,
            "settings": settings(told, spec, access.urls),
            "variables": recipe_variables(spec, environ),
            "credentials": access.names,
            "secrets": access.secrets,
        }

    def _need_same(
        self,
        identity: Mapping[str, Any],
        choice: Choice | None = None,
        local: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See that what is made now is still what the identity says.

        Raises:
            InputsChangedError: What it is made from has changed since.
        """
        now = Request(self.spec, self.store)
        found = now._identity(choice, local) if choice else _spec.identity(now.asked, {}, {})
        if now.choosing != self.choosing or _spec.key_of(found) != _spec.key_of(identity):
            lines = _spec.explain(identity, found) or ["what versions are chosen by"]
            raise InputsChangedError(
                f"{self.spec} changed each time while its environment was made: " + "; ".join(lines)
            )

    def _wheels(self, choice: Choice, built: Mapping[str, Built]) -> Iterator[tuple[str, bytes]]:
        for wheel in built.values():
            yield wheel.name, wheel.file.read_bytes()
        environ = build_environment(self.spec, self.store.environ) | {"UV_NO_CONFIG": "1"}
        for carried in self.carried.distributions:
            if carried.name in choice.carried:
                yield wheel_of(carried, environ)

    def _identity(self, choice: Choice, local: Mapping[str, str]) -> dict[str, Any]:
        carried = {c.name: c.content for c in self.carried.distributions if c.name in choice.carried}
        return _spec.identity(self.asked, choice.packages, {**carried, **local})

    def _chosen(self, report: Report, anew: bool) -> Choice:
        """What was chosen before, or is chosen now: by one process, for which others wait."""

        def kept() -> Choice | None:
            return None if anew else self._choices.get(self.choosing)

        if (found := kept()) is not None:
            return found
        self.store.need_writable(self.choosing)
        locks = self.store.locks(f"choice-{self.choosing}")
        with locks.building(self.store.build_timeout_s, report, lambda: kept() is not None):
            if (found := kept()) is not None:
                return found
            with locks.telling(report) as tell:
                tell("choosing versions")
                made = self._choose(tell, False)
            if Request(self.spec, self.store).choosing != self.choosing:
                raise InputsChangedError(f"{self.spec} changed each time while versions were chosen for it")
            self._choices.keep(self.choosing, made)
        return made

    def _choose(self, report: Report, checked: bool) -> Choice:
        return choose(
            self.spec, self._paths, self.carried, environ=self.store.environ, on_line=report,
            timeout_s=self.store.build_timeout_s, checked=checked,
        )  # fmt: skip

    def _source(self, choice: Choice, name: str) -> Source:
        label = choice.sources[name]
        path = self._paths[label]
        needs = tuple(extra_requirements(self._told, name))
        setting = self._setting | {"built with": built_with(path, needs, self._environ)}
        return Source(path, self.asked["sources"][label], setting, name, self._environ, needs)

    def _built(self, choice: Choice, report: Report) -> Iterator[tuple[str, Built]]:
        """The wheels of all local sources that a choice has, those that changed built now, some at a time."""
        with scratch("raycrew-venv-resolve-") as folder, workers(4) as pool:
            environ = told_in(folder, self.spec, self.store.environ)

            def build(source: Source) -> Built:
                report(f"building {source.path.name}")
                return self._sources.build(source, environ, self.spec.python, report)

            sources = {name: self._source(choice, name) for name in choice.sources}
            known = {n: self._built_now.get(n) or self._sources.known(s) for n, s in sources.items()}
            made = {name: pool.submit(build, sources[name]) for name, found in known.items() if found is None}
            for name, found in known.items():
                self._built_now[name] = found or result_of(made[name])
                yield name, self._built_now[name]
