"""Environment providers and argument transports that are found by entry point."""

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, Literal

from raycrew.worker_groups.errors import EnvironmentProviderError
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider, NodeRunner

PROVIDERS = "raycrew.environment_providers"
TRANSPORTS = "raycrew.argument_transports"

logger = logging.getLogger(__name__)


def interpreter_for(
    environments: EnvironmentProvider | Literal["auto"] | None, fqn: str, runner: NodeRunner | None
) -> str | None:
    """Interpreter of a worker class, by the first provider that knows it; None for the driver's own.

    Raises:
        TypeError: `environments` is neither a provider nor "auto" nor None.
        EnvironmentProviderError: The provider failed.
    """
    for provider in _chosen(environments, PROVIDERS, EnvironmentProvider):
        try:
            python = provider.python_for(fqn, runner)
        except Exception as error:
            raise EnvironmentProviderError(f"no environment for workers of {fqn}: {error}") from error
        if python is not None:
            return str(python)
    return None


class EnvironmentOf:
    """A provider that gives the environment of one class to whoever asks.

    Args:
        environments: Who knows it.
        fqn: Fully qualified name of that class.
    """

    def __init__(self, environments: EnvironmentProvider | Literal["auto"], fqn: str) -> None:
        self._environments, self._fqn = environments, fqn

    def python_for(self, actor_class_fqn: str, runner: NodeRunner | None) -> str | None:  # noqa: ARG002
        """Interpreter of that class's environment, ready on every node.

        Raises:
            EnvironmentProviderError: It can't be had.
        """
        return interpreter_for(self._environments, self._fqn, runner)


def transport_of(transport: ArgumentTransport | Literal["auto"] | None) -> ArgumentTransport | None:
    """The transport to use.

    Raises:
        TypeError: `transport` is neither a transport nor "auto" nor None.
    """
    return next(_chosen(transport, TRANSPORTS, ArgumentTransport), None)


def _chosen(given: Any, group: str, protocol: Any) -> Iterator[Any]:
    if given is None:
        return iter(())
    if given == "auto":
        return _discovered(group, protocol)
    if not isinstance(given, protocol):
        raise TypeError(f"{given!r} is no {protocol.__name__}; give one, 'auto' or None")
    return iter((given,))


def _discovered(group: str, protocol: Any) -> Iterator[Any]:
    for point in entry_points(group=group):
        try:
            found = point.load()
            plugin = found() if isinstance(found, type) or not isinstance(found, protocol) else found
        except Exception as error:  # noqa: BLE001 - one broken plug-in must not disable the rest
            logger.warning("skipped %s %r (%s): %s", group, point.name, point.value, error)
            continue
        if isinstance(plugin, protocol):
            yield plugin
        else:
            logger.warning(
                "skipped %s %r (%s): it is no %s", group, point.name, point.value, protocol.__name__
            )
