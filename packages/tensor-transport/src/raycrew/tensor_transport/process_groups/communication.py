"""How gradients of data-parallel training travel: backend, compression, overlap; for use in the worker.

settings = CommunicationSettings.of(current_worker().communication, compression=PowerSGD(rank=4))
torch.distributed.init_process_group(settings.resolve_backend(), …)
model = apply_communication(DistributedDataParallel(model), settings)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from raycrew.tensor_transport.errors import GroupMismatchError, NoTransportError, TransportError
from raycrew.tensor_transport.process_groups._membership import Backend, choose_for
from raycrew.tensor_transport.transports import MemberFacts, member_facts


class CommunicationWishes(Protocol):
    """What a worker group passes to its workers, as `current_worker().communication`."""

    @property
    def gradient_compression(self) -> bool:
        """The group's `enable_gradient_compression`."""
        ...

    @property
    def asynchronous(self) -> bool:
        """The group's `async_communication`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Gradients of matrices as products of two thin ones (Vogels et al., 2019, arXiv:1905.13727).

    Attributes:
        rank: Columns of the thin matrices: more keep more of a gradient, and cost more bytes.
        start_step: Steps before the first compressed one, in which gradients travel whole; at least 2 where
            errors are fed back or matrices reused. Early steps bear compression badly.
        min_rate: A gradient that would not get smaller by this factor travels whole.
        error_feedback: Add what a step lost to the gradient of the next one. Needs memory of one gradient.
        warm_start: Begin with the matrices of the step before.
        seed: Of the first matrices.
    """

    rank: int = 1
    start_step: int = 1000
    min_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        least = 2 if self.error_feedback or self.warm_start else 0
        for name, value, low in (("rank", self.rank, 1), ("start_step", self.start_step, least)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is a whole number, not {value!r}")
            if value < low:
                raise ValueError(f"{name} is at least {low}, not {value}")
        if not 0 < self.min_rate < math.inf:
            raise ValueError(f"min_rate is a positive factor, not {self.min_rate!r}")


Compression: TypeAlias = Literal["fp16", "bf16"] | PowerSGD
_HALVES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSettings:
    """How the gradients of one model travel; checked where it is made.

    Attributes:
        backend: What `resolve_backend` gives: "nccl", "gloo", or "auto" for NCCL where a process can use it.
        gradient_compression: None for gradients as they are; "fp16" or "bf16" for half the bytes ("fp16" has
            more digits, and overflows beyond 65504); or `PowerSGD`.
        asynchronous: Whether the gradients of some layers travel while those of others are computed, as DDP
            does by itself. Otherwise each bucket of gradients has travelled before the computation goes on.

    Raises:
        ValueError: No such backend or compression.
    """

    backend: Backend = "auto"
    gradient_compression: Compression | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "nccl", "gloo"):
            raise ValueError(f"backend is one of auto, nccl, gloo, not {self.backend!r}")
        compression = self.gradient_compression
        if not (compression is None or compression in _HALVES or isinstance(compression, PowerSGD)):
            raise ValueError(f"gradient_compression is fp16, bf16, a PowerSGD or None, not {compression!r}")
        if not isinstance(self.asynchronous, bool):
            raise TypeError(f"asynchronous is True or False, not {self.asynchronous!r}")

    @classmethod
    def of(
        cls, wishes: CommunicationWishes, *, backend: Backend = "auto", compression: Compression = "bf16"
    ) -> Self:
        """What a worker group's keywords ask for.

        Args:
            wishes: `current_worker().communication`.
            backend: As above.
            compression: How gradients are compressed if the group has `enable_gradient_compression`.
        """
        wanted = compression if wishes.gradient_compression else None
        return cls(backend=backend, gradient_compression=wanted, asynchronous=wishes.asynchronous)

    def resolve_backend(self, members: Sequence[MemberFacts] | None = None) -> Literal["nccl", "gloo"]:
        """The backend for `torch.distributed.init_process_group`.

        Every rank has to come to the same one. With the facts of all ranks it does; without them this process
        looks at itself alone: name the backend, then, where some ranks have GPUs and others none.

        Args:
            members: `member_facts()` of each rank, in rank order, taken once it has chosen its device.

        Raises:
            NoTransportError: It can't be used by all ranks, or in this process; the error says why.
        """
        if members is not None:
            return choose_for(self.backend, members).name  # type: ignore[return-value]
        reasons = member_facts().unavailable
        if self.backend != "gloo" and "nccl" not in reasons:
            return "nccl"
        if self.backend != "nccl" and "gloo" not in reasons:
            return "gloo"
        names = ("nccl", "gloo") if self.backend == "auto" else (self.backend,)
        told = {name: reasons[name] for name in names}
        raise NoTransportError("; ".join(f"{name}: {why}" for name, why in told.items()), reasons=told)


def apply_communication(
    model: DistributedDataParallel,
    settings: CommunicationSettings,
    *,
    process_group: Any = None,
) -> DistributedDataParallel:
    """Have a model's gradients travel as the settings say; once, before the first step, on every rank.

    The ranks compare how they compress: one that does not call this is waited for, as by DDP itself.

    Args:
        model: As it was wrapped.
        settings: The same on every rank.
        process_group: The one that gradients are averaged in; the model's own unless given.

    Returns:
        The model.

    Raises:
        TypeError: It is not a `DistributedDataParallel`.
        GroupMismatchError: Ranks compress differently; nothing was set.
        TransportError: It has a communication hook already; or PowerSGD was asked for a model on the CPU of a
            process that sees a GPU, which torch's own can't.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"communication is set for a DistributedDataParallel, not a {type(model).__name__}")
    group = model.process_group if process_group is None else process_group
    if isinstance(settings.gradient_compression, PowerSGD):
        _check_device(model)
    _check_alike(settings.gradient_compression, group)
    state, hook = _hook(settings.gradient_compression, group)
    is_default = (
        settings.asynchronous and settings.gradient_compression is None and group == model.process_group
    )
    if is_default and not getattr(model, "_comm_hooks", ()):  # one that is there would stay
        return model
    try:
        model.register_comm_hook(state, hook if settings.asynchronous else _in_turn(hook))
    except RuntimeError as error:
        message = f"the model's communication can't be set: {error}; set it once, before the first step"
        raise TransportError(message) from error
    return model


def _check_device(model: DistributedDataParallel) -> None:
    """Wherever there is a GPU, torch's PowerSGD waits for the model's device as for one, and fails."""
    if model.device_type == "cpu" and torch.cuda.is_available():
        raise TransportError(
            "torch's PowerSGD can't compress gradients on the CPU in a process that sees a GPU: start it "
            "with CUDA_VISIBLE_DEVICES='', or take another gradient_compression"
        )


def _check_alike(compression: Compression | None, group: Any) -> None:
    """Gradients of one kind would be taken for those of another: the bytes alone don't tell."""
    from torch import distributed

    told = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(told, repr(compression), group=group)
    if len(set(told)) > 1:
        wanted = {f"rank {rank}": each for rank, each in enumerate(told)}
        what = "; ".join(f"{rank}: {each}" for rank, each in wanted.items())
        error = GroupMismatchError(f"ranks compress gradients differently ({what}); nothing was set")
        error.wanted = wanted
        raise error


Hook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


def _hook(compression: Compression | None, process_group: Any) -> tuple[Any, Hook]:
    """The state and the function that DDP calls with each bucket of gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if isinstance(compression, PowerSGD):
        state = powerSGD_hook.PowerSGDState(
            process_group=process_group,
            matrix_approximation_rank=compression.rank,
            start_powerSGD_iter=compression.start_step,
            min_compression_rate=compression.min_rate,
            use_error_feedback=compression.error_feedback,
            warm_start=compression.warm_start,
            random_seed=compression.seed,
        )
        return state, _one_by_one(powerSGD_hook.powerSGD_hook)
    if compression is None:
        return process_group, default_hooks.allreduce_hook
    halved = default_hooks.fp16_compress_hook if compression == "fp16" else default_hooks.bf16_compress_hook

    def compress(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        # DDP refuses torch's own hook for bfloat16 by its name where there is no NCCL; gloo can do it.
        return halved(state, bucket)

    return process_group, compress


def _one_by_one(hook: Hook) -> Hook:
    """The same, and a bucket sets out once the one before has arrived.

    What follows the first exchange of a bucket by PowerSGD exchanges again, in whatever thread that one
    ended. With two buckets under way each rank would take its own order, and mix them up; or all threads of
    gloo would wait for exchanges that none of them is left to do.
    """
    before: list[torch.futures.Future[torch.Tensor]] = []

    def begin(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        while before:
            before.pop().wait()
        before.append(hook(state, bucket))
        return before[-1]

    return begin


def _in_turn(hook: Hook) -> Hook:
    """The same, and the computation of gradients waits meanwhile."""

    def wait(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        future = hook(state, bucket)
        future.wait()
        return future

    return wait
