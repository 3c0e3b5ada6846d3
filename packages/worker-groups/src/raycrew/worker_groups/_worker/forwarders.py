"""The generated actor classes: a shell with a method for each of the user's, which notes its calls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

from raycrew.worker_groups._worker.hearing import HOOK
from raycrew.worker_groups._worker.heart import Running, as_text
from raycrew.worker_groups._worker.raised import told_to_the_caller
from raycrew.worker_groups._worker.shell import Shell, has_to_receive
from raycrew.worker_groups._worker.worker_class import ClassInfo, MethodInfo

#: Methods of the shell itself; a worker class can't have any of these names.
RESERVED_PREFIX = "_raycrew_"


def shell_class(info: ClassInfo) -> type:
    """A shell with the methods of a worker class.

    Raises:
        ValueError: The class has a method whose name belongs to the shell.
    """
    taken = [name for name in info.methods if name.startswith(RESERVED_PREFIX)]
    if taken:
        raise ValueError(
            f"{info.fqn} has methods {taken}; names that start with {RESERVED_PREFIX!r} are reserved"
        )
    methods = {name: _forwarder(method) for name, method in info.methods.items()}
    # Not this module's name: pickle must take the class by value, since no worker could import it.
    return type(info.name, (Shell,), {**methods, "__module__": "raycrew_worker", "__doc__": info.fqn})


def _forwarder(method: MethodInfo) -> Callable[..., Any]:
    forward = _FORWARDERS[method.kind](method.name, as_text(method.name))
    if method.name == HOOK and method.kind in _HEARING:
        forward = _HEARING[method.kind](forward)
    forward.__name__ = forward.__qualname__ = method.name
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    parameters = list(method.signature.parameters.values())
    forward.__signature__ = Signature([own, *parameters])  # type: ignore[attr-defined]
    for name, value in method.options.items():
        setattr(forward, name, value)
    return forward


def _sync(name: str, text: bytes) -> Callable[..., Any]:
    def forward(self: Shell, *args: Any, **kwargs: Any) -> Any:
        with Running(text):
            bound = self._raycrew_bound(name)
            args, kwargs = self._raycrew_received(args, kwargs)
            with told_to_the_caller():
                return self._raycrew_sent(bound(*args, **kwargs))

    return forward


def _generator(name: str, text: bytes) -> Callable[..., Any]:
    def forward(self: Shell, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with Running(text) as call:
            bound = self._raycrew_bound(name)
            args, kwargs = self._raycrew_received(args, kwargs)
            with told_to_the_caller():
                for item in bound(*args, **kwargs):  # Not "yield from": Ray sends into it.
                    call.tick()
                    sent = self._raycrew_sent(item)
                    call.wait()  # Ray lets a slow consumer's stream wait here
                    yield sent
                    call.go_on()

    return forward


def _async(name: str, text: bytes) -> Callable[..., Any]:
    async def forward(self: Shell, *args: Any, **kwargs: Any) -> Any:
        with Running(text):
            await _heard(self, name)
            bound = self._raycrew_bound(name)
            args, kwargs = await _received_async(self, args, kwargs)
            with told_to_the_caller():
                return self._raycrew_sent(await bound(*args, **kwargs))

    return forward


def _async_generator(name: str, text: bytes) -> Callable[..., Any]:
    async def forward(self: Shell, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with Running(text) as call:
            await _heard(self, name)
            bound = self._raycrew_bound(name)
            args, kwargs = await _received_async(self, args, kwargs)
            with told_to_the_caller():
                async for item in bound(*args, **kwargs):
                    call.tick()
                    sent = self._raycrew_sent(item)
                    call.wait()  # Ray lets a slow consumer's stream wait here
                    yield sent
                    call.go_on()

    return forward


def _hearing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def hear(self: Shell, *args: Any, **kwargs: Any) -> Any:
        with self._raycrew_hearing.under_way():
            return forward(self, *self._raycrew_placed(args), **kwargs)

    return hear


def _hearing_async(forward: Callable[..., Any]) -> Callable[..., Any]:
    async def hear(self: Shell, *args: Any, **kwargs: Any) -> Any:
        with self._raycrew_hearing.under_way():
            return await forward(self, *self._raycrew_placed(args), **kwargs)

    return hear


async def _heard(shell: Shell, name: str) -> None:
    if name != HOOK:
        await shell._raycrew_hearing.ended()  # noqa: SLF001


async def _received_async(
    shell: Shell, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # A free function: one async method on `Shell` would turn every worker into an async actor.
    if not has_to_receive(shell._raycrew_transport, args, kwargs):  # noqa: SLF001
        return args, kwargs
    return await asyncio.to_thread(shell._raycrew_received, args, kwargs)  # noqa: SLF001


_FORWARDERS: Mapping[str, Callable[[str, bytes], Callable[..., Any]]] = {
    "sync": _sync,
    "async": _async,
    "generator": _generator,
    "async_generator": _async_generator,
}

#: For `on_generation`, which is sent as one call with the place of its generation: none comes in between.
_HEARING: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "sync": _hearing,
    "async": _hearing_async,
}
