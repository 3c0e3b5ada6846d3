"""What an engine is made of: checked in the driver, before an actor starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from generation.errors import RefusedError
from raycrew.tensor_transport import RouteStore
from raycrew.tensor_transport.transports import PullTransport

Executor = Literal["uni", "mp", "ray"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An engine to be made.

    Attributes:
        model: Folder of a model, or its configuration (with a `model_type`) for random weights.
        seed: Of random weights, and, with the worker's rank and the number of the engine there, of what is
            sampled without a seed.
        context_length: Most tokens of prompt and sample; None for what the model can.
        dtype: Of weights and computation.
        max_running: Most requests that are generated for at a time.
        tensor_parallel: Over how many workers of a tied group the model is spread.
        executor: How the engine's processes are run: "uni" in the worker itself, "mp" as its children, "ray"
            as actors on the tied group's bundles, on several nodes too; None for "uni" without tensor
            parallelism and "mp" with it. Over several accelerators a group's engines need "ray": a worker
            has but the devices of its own bundle.
        answer_timeout_s: How long processes that an engine has of its own may take to answer, be it with a
            step or with all weights loaded; then they count as dead.
        kv_cache_bytes: Memory for keys and values.
        prefix_caching: Whether keys and values of prompts are kept for later ones that begin alike.
        packs_ahead: Whether vLLM on a CPU packs weights that are fetched beside those that it computes with,
            so that an update pauses it only for their exchange; it takes the memory of one more model. Else
            all is loaded in the pause, as on accelerators.
        sleep_level: vLLM's own level of sleep, on accelerators: 1 keeps the weights in the host's memory, 2
            does not; both need a directory of weights. None: to sleep is to end the engine.
        max_adapters: How many LoRA adapters may be loaded.
        max_adapter_rank: Largest rank of an adapter.
        more: Further options of the engine's own, as vLLM's `LLM` takes them.

    Raises:
        ValueError: A value is out of its range.
    """

    model: str | Mapping[str, Any]
    seed: int = 0
    context_length: int | None = None
    dtype: str = "float32"
    max_running: int = 256
    tensor_parallel: int = 1
    executor: Executor | None = None
    answer_timeout_s: float = 300.0
    kv_cache_bytes: int = 64 << 20
    prefix_caching: bool = False
    packs_ahead: bool = True
    sleep_level: Literal[1, 2] | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 16
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping) and "model_type" not in self.model:
            raise ValueError("the model's configuration has no model_type, such as 'llama'")
        if self.executor not in ("uni", "mp", "ray", None):
            raise ValueError(f"there is no executor {self.executor!r}; there are 'uni', 'mp' and 'ray'")
        if self.sleep_level not in (1, 2, None):
            raise ValueError(f"there is no sleep level {self.sleep_level!r}; there are 1, 2 and None")
        if self.sleep_level == 2 and self.max_adapters:
            raise ValueError("at sleep level 2 adapters are forgotten: take level 1, or None")
        for name in ("max_running", "tensor_parallel", "kv_cache_bytes", "max_adapter_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.context_length is not None and self.context_length < 2:
            raise ValueError(f"a context of {self.context_length} has no room for a prompt and a token")
        if not self.answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s must be above 0, not {self.answer_timeout_s!r}")
        if self.executor == "uni" and self.tensor_parallel > 1:
            raise ValueError("the executor 'uni' is one process: tensor parallelism needs 'mp' or 'ray'")

    @property
    def chosen_executor(self) -> Executor:
        """The executor, where none was named too."""
        return self.executor or ("uni" if self.tensor_parallel == 1 else "mp")


def check_device(options: EngineOptions, device_kind: str) -> None:
    """Refuse what this kind of device can't do.

    Raises:
        RefusedError: vLLM has no executor `ray` and no sleep mode on CPUs.
    """
    if options.sleep_level is not None and device_kind == "cpu":
        raise RefusedError("vLLM has no sleep mode on CPUs: with sleep_level=None the engine ends")
    if options.executor == "ray" and device_kind == "cpu":
        raise RefusedError("vLLM has no executor 'ray' on CPUs: use 'mp', whose processes are on one node")


def check_store(store: Any) -> None:
    """Refuse, for workers, what finds or has bytes in this process alone.

    Raises:
        ValueError: That is an object, and not what makes one.
    """
    if isinstance(store, RouteStore | PullTransport) and not isinstance(store, type):
        name = type(store).__name__
        raise ValueError(
            f"store: a {name} is of one process: give what makes one there, as store={name} does"
        )
