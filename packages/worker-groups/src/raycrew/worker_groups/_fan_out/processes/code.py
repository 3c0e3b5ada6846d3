"""A function and the initializer it needs: as bytes in the driver, as objects in the processes."""

import functools
import hashlib
import io
import pickle
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from ray import cloudpickle

KEPT = 8
"""Functions, and initializers, that a process holds at a time."""
V = TypeVar("V")


class Code(NamedTuple):
    """A pickled callable, or None where it is held already, and its key."""

    key: str
    data: bytes | None


class Kept(OrderedDict[str, V], Generic[V]):
    """The last few values that were used. The two ends of a connection keep the same ones."""

    def use(self, key: str, value: V) -> None:
        """Hold a value as the latest used, and let go of the oldest beyond `KEPT`."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > KEPT:
            self.popitem(last=False)


class UnloadableError(Exception):
    """A function or initializer could not be loaded, or the initializer failed; the message says it all."""


def dumps(value: Any) -> bytes:
    """Pickle by value what can't be imported elsewhere."""
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return data


def name_of(function: Callable[..., Any]) -> str:
    """Module and name of a callable."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


class Function:
    """What runs on every item, and what runs before it once in each process.

    What both refer to (a global of the main script, a variable of an enclosing function) is pickled with the
    initializer, and is one object in the processes too.

    Args:
        function: Called with each item.
        initializer: Called without arguments, or None.
    """

    def __init__(
        self, function: Callable[[Any], Any], initializer: Callable[[], object] | None = None
    ) -> None:
        self.name = name_of(function)
        self.initializer_name = "" if initializer is None else name_of(initializer)
        stream = io.BytesIO()
        pickler: Any = _Pickler(stream)  # type: ignore[no-untyped-call]
        if initializer is not None:
            pickler.dump(initializer)
            pickler.refer_to_what_is_dumped()
        cut = stream.tell()
        pickler.dump(function)
        data = stream.getvalue()
        self.code = Code(hashlib.sha256(data).hexdigest(), data[cut:])
        self.initializer = (
            None if initializer is None else Code(hashlib.sha256(data[:cut]).hexdigest(), data[:cut])
        )

    @property
    def keys(self) -> tuple[str, str | None]:
        """Of the function and of the initializer."""
        return self.code.key, None if self.initializer is None else self.initializer.key


class _Pickler(cloudpickle.CloudPickler):
    """Names the objects of an earlier pickle by their place in its memory."""

    _dumped: Mapping[int, tuple[int, object]] = MappingProxyType({})

    def refer_to_what_is_dumped(self) -> None:
        """Pickle each object that was dumped so far as a reference from now on."""
        self._dumped = self.memo.copy()
        self.clear_memo()

    def persistent_id(self, value: object) -> int | None:
        """Place of an object in the earlier pickle's memory."""
        found = self._dumped.get(id(value))
        return None if found is None else found[0]


class _Unpickler(pickle.Unpickler):
    """Finds the objects of an earlier pickle."""

    def __init__(self, data: bytes, memory: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._memory = memory

    def persistent_load(self, place: int) -> Any:
        """The object at a place of the earlier pickle's memory."""
        return self._memory[place]


@dataclass
class _Initialized:
    """What an initializer leaves behind: its pickle's memory, and the globals it has set."""

    memory: dict[int, Any]
    namespace: dict[str, Any]
    names: set[str]


class Library:
    """What a process has loaded."""

    def __init__(self) -> None:
        self._functions: Kept[Callable[[Any], Any]] = Kept()
        self._initializers: Kept[_Initialized] = Kept()

    def initialize(self, code: Code) -> None:
        """Run an initializer, unless this process has already.

        Raises:
            UnloadableError: It can't be loaded, or failed.
        """
        if code.data is None:
            self._initializers.use(code.key, self._initializers[code.key])
            return
        unpickler = pickle.Unpickler(io.BytesIO(code.data))
        try:
            initializer = unpickler.load()
            namespace = _namespace(initializer)
            before = dict(namespace)
            initializer()
        except BaseException:  # noqa: BLE001 - user's code may raise anything, SystemExit too
            raise UnloadableError(traceback.format_exc()) from None
        names = {name for name, value in namespace.items() if name not in before or before[name] is not value}
        memory = unpickler.memo.copy()
        self._initializers.use(code.key, _Initialized(memory, namespace, names))

    def load(self, code: Code, initializer: Code | None) -> Callable[[Any], Any]:
        """The function, which finds what its initializer has left.

        Raises:
            UnloadableError: It can't be loaded.
        """
        if code.data is None:
            function = self._functions[code.key]
        else:
            try:
                done = None if initializer is None else self._initializers[initializer.key]
                function = _unpickled(code.data, done)
            except BaseException:  # noqa: BLE001 - an import may raise anything, SystemExit too
                raise UnloadableError(traceback.format_exc()) from None
        self._functions.use(code.key, function)
        return function


def _unpickled(data: bytes, done: _Initialized | None) -> Callable[[Any], Any]:
    if done is None:
        function: Callable[[Any], Any] = pickle.loads(data)
        return function
    set_by_initializer = {name: done.namespace[name] for name in done.names if name in done.namespace}
    function = _Unpickler(data, done.memory).load()  # brings the driver's values of the globals that it names
    done.namespace.update(set_by_initializer)
    return function


def _namespace(function: Any) -> dict[str, Any]:
    """The globals of a callable's module, as it sees them."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    found = getattr(function, "__globals__", None) or getattr(type(function).__call__, "__globals__", {})
    namespace: dict[str, Any] = found
    return namespace
