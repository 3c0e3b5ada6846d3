"""What an engine is to a worker: something that is stepped by one thread."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar

import torch

from generation.errors import RefusedError
from generation.prompts import Limits
from generation.sampling import Sampling
from raycrew.tensor_transport import (
    ByteStore,
    WeightDirectory,
    WeightReceipt,
    WeightReceiver,
    WeightUpdate,
)
from raycrew.tensor_transport.transports import PullTransport

T = TypeVar("T")
Store = ByteStore | PullTransport
"""What has the bytes of versions."""
StoreMaker = Callable[[], Any]
"""Makes one in the process that is to have it, to be closed there: the class `RouteStore`, say."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to be made.

    Attributes:
        id: Unique in its worker's life.
        call: Name of the call that it belongs to.
        prompt_index: Number of its prompt.
        sample_index: Which of the prompt's samples it is.
        prompt: Ids.
        sampling: How tokens are chosen; its `n` and `seed` are done with.
        seed: Of this sample; None for the engine's own randomness.
        max_tokens: Most tokens; they fit the context beside the prompt.
        adapter: Name of a loaded adapter.
    """

    id: str
    call: str
    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int | None
    max_tokens: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a request.

    Attributes:
        request_id: The request.
        tokens: Ids, often one.
        logprobs: Log-probability of each at temperature 1.
        finish_reason: Why it ended with them; None while it goes on.
    """

    request_id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is at.

    Attributes:
        running: Requests that it generates for.
        waiting: Requests that wait for room.
        kv_cache_use: Used share of the memory for keys and values, 0 to 1.
    """

    running: int
    waiting: int
    kv_cache_use: float


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where an engine's weights come from.

    Attributes:
        directory: Where versions are found.
        store: Where their bytes are found; None for Ray's object store.
        name: What the directory calls the receiver; None for a name of its own each time.
        close: Gives up a store that was made for this engine.
    """

    directory: WeightDirectory
    store: Store | None = None
    name: str | None = None
    close: Callable[[], object] = lambda: None

    @classmethod
    def open(cls, directory: WeightDirectory, store: Store | StoreMaker | None, name: str | None) -> Self:
        """One for an engine that begins."""
        if not callable(store):
            return cls(directory, store, name)
        made = store()
        return cls(directory, made, name, made.close)


class Receiver(Protocol):
    """What brings versions into an engine, as `WeightReceiver` does; called by any thread, one at a time."""

    @property
    def version(self) -> int | None:
        """What is held."""
        ...

    @property
    def intact(self) -> bool:
        """Whether the weights are those of `version`."""
        ...

    def require(self) -> int:
        """The version, if the engine may generate."""
        ...

    def prepare(self, version: int) -> WeightReceipt:
        """Fetch a version, and touch no weights."""
        ...

    def apply(self, update: int | WeightUpdate) -> WeightReceipt:
        """Load a version, whole or not at all."""
        ...

    def pull(self, *, missing_ok: bool) -> WeightReceipt | None:
        """Load the latest version, where there is one."""
        ...

    def close(self) -> None:
        """Leave the directory."""
        ...


class Within(Protocol):
    """Calls a function in the engine's thread, between two steps, and gives its result."""

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """That."""
        ...


class Engine(ABC):
    """Generates tokens step by step; one thread calls it, and nobody else.

    Attributes:
        limits: What its model can take.
        weights: Names, shapes and dtypes of what it takes, as meta tensors; None where those of the
            first version count, as tied tensors may have one name or two.
        dozes: Whether it sleeps by `doze` and `rouse`, and not by being closed and made anew.
        adapters: Names of the LoRA adapters that are loaded; asked by any thread.
    """

    limits: Limits
    weights: Mapping[str, torch.Tensor] | None
    dozes = False
    adapters: Collection[str] = ()

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take a request; the next steps generate for it."""

    @abstractmethod
    def step(self) -> Sequence[Piece]:
        """Go one step further with what there is."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; those that have ended already are no error."""

    @abstractmethod
    def receiver(self, source: WeightSource, within: Within) -> Receiver:
        """What brings versions into it."""

    @abstractmethod
    def forget_computed(self) -> None:
        """Have keys and values of all requests computed anew, as other weights made those that there are."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prompts that have ended."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """What it is at."""

    @abstractmethod
    def close(self) -> None:
        """Give up the model and its memory, and end what was started."""

    def digest(self) -> str | None:
        """`digest_weights` of what was loaded last; None where it has the weights in another form."""
        return None

    def watch(self, lost: Callable[[str], object]) -> None:  # noqa: B027 - most have no processes to lose
        """Have it tell why once it is lost: a process of its has ended by itself, or does not answer in time.

        It tells from any thread, and before whoever waits for the engine hears of it.
        """

    def doze(self) -> None:
        """Give up its memory, weights included, and stay; there are no requests."""
        raise RefusedError(f"the {type(self).__name__} has no sleep of its own")

    def rouse(self) -> None:
        """Take its memory again; another receiver brings weights."""
        raise RefusedError(f"the {type(self).__name__} has no sleep of its own")

    @abstractmethod
    def explain(self) -> str:
        """What it is, and what its sleep is, in a line or two."""

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter.

        Raises:
            RefusedError: It can't.
        """
        raise RefusedError(f"the {type(self).__name__} has no LoRA adapters: {name!r} ({path}) is not loaded")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            RefusedError: There is none of that name.
        """
        raise RefusedError(f"no adapter {name!r} is loaded")

    def check_adapter(self, name: str) -> None:
        """Refuse an adapter that is not loaded.

        Raises:
            RefusedError: There is none of that name.
        """
        if name not in self.adapters:
            raise RefusedError(f"no adapter {name!r} is loaded")


class LoadingEngine(Engine):
    """One that is given its weights as tensors."""

    def receiver(self, source: WeightSource, within: Within) -> Receiver:
        """See `Engine`: each version goes through `load_weights`."""

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            try:
                self.load_weights(weights)
            finally:
                self.forget_computed()

        return WeightReceiver(
            lambda weights: within(load, weights),
            expected=self.weights,
            store=source.store,
            borrow=True,
            directory=source.directory,
            rollback="shadow",
            name=source.name,
        )

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, which are named as in the model's state dict.

        They lie in the store's own memory: nobody writes to them.
        """
