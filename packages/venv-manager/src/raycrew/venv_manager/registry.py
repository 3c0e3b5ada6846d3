"""Which environment a worker's class runs in."""

import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager._uv import parse
from raycrew.venv_manager.errors import SpecError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "raycrew.actor_environments"


class PY_EXECUTABLES:  # noqa: N801 - the name that this field writes
    """Interpreters by name, to be used in `ACTOR_ENVIRONMENT_REGISTRY`."""

    SYSTEM = sys.executable
    """The driver's own interpreter: nothing is built."""
    BASE = "uv run --locked"
    """The project's base dependencies."""
    VLLM = "uv run --locked --extra vllm"
    """The project's extra `vllm`."""


class ActorEnvironmentRegistry(Mapping[str, EnvironmentSpec | str]):
    """Fully qualified class name to the environment of that class's actors.

    A name may end in `.*` and then stands for everything below it; the longest match counts. Besides what
    `register` was told there is what installed packages bring as entry points of the group
    `raycrew.actor_environments`: each names a mapping, or a function that returns one.
    """

    def __init__(self) -> None:
        self._entries: dict[str, EnvironmentSpec | str] = {}
        self._discovered: dict[str, EnvironmentSpec | str] | None = None

    def register(self, fqn: str, spec: EnvironmentSpec | str | Path) -> None:
        """Give a class, or all classes below a package (`pkg.sub.*`), an environment.

        Raises:
            SpecError: The spec makes no sense, or the name is no dotted name.
        """
        if not all(part.isidentifier() for part in fqn.removesuffix(".*").split(".")):
            raise SpecError(f"{fqn!r} is not the full name of a class, such as 'package.module.Class'")
        given = spec if isinstance(spec, (EnvironmentSpec, str)) else parse(spec)
        self._entries[fqn] = given

    def unregister(self, fqn: str) -> None:
        """Forget what `register` was told about a name; a name that was not registered is ignored."""
        self._entries.pop(fqn, None)

    def find(self, fqn: str) -> EnvironmentSpec | str | None:
        """The environment of a class, or None where nobody gave it one."""
        known = self._all()
        if fqn in known:
            return known[fqn]
        parts = fqn.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (found := known.get(".".join(parts[:end]) + ".*")) is not None:
                return found
        return None

    def __getitem__(self, fqn: str) -> EnvironmentSpec | str:
        return self._all()[fqn]

    def __setitem__(self, fqn: str, spec: EnvironmentSpec | str) -> None:
        self.register(fqn, spec)

    def __delitem__(self, fqn: str) -> None:
        del self._entries[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, EnvironmentSpec | str]:
        if self._discovered is None:
            self._discovered = _from_entry_points()  # Under no lock: they may register something, or fork.
        return self._discovered | self._entries


def _from_entry_points() -> dict[str, EnvironmentSpec | str]:
    found: dict[str, EnvironmentSpec | str] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            given = point.load()
            found |= given() if callable(given) else given
        except Exception as error:  # noqa: BLE001 - another package's code: named and skipped
            logger.warning("entry point %s (%s) brings no environments: %s", point.name, point.value, error)
    return found


ACTOR_ENVIRONMENT_REGISTRY = ActorEnvironmentRegistry()


def register_actor_environment(fqn: str, spec: EnvironmentSpec | str | Path) -> None:
    """Give the actors of a class, or of all classes below a package (`pkg.sub.*`), an environment.

    Args:
        fqn: Full name of the class, `"package.module.Class"`. It is not imported.
        spec: A spec, a `uv run …` command line, the path of an interpreter, or a project's folder.

    Raises:
        SpecError: The name or the spec makes no sense.

    Examples:
        >>> register_actor_environment("my_rl.workers.*", "uv run --locked --extra vllm")
        >>> get_actor_python_env("my_rl.workers.Generator")
        'uv run --locked --extra vllm'
    """
    ACTOR_ENVIRONMENT_REGISTRY.register(fqn, spec)


def get_actor_python_env(actor_class_fqn: str) -> EnvironmentSpec | str:
    """What the actors of a class run in, as it was registered.

    Raises:
        KeyError: Nothing is registered for the class.
    """
    found = ACTOR_ENVIRONMENT_REGISTRY.find(actor_class_fqn)
    if found is None:
        raise KeyError(
            f"no environment is registered for {actor_class_fqn}; `register_actor_environment` gives it one"
        )
    return found
