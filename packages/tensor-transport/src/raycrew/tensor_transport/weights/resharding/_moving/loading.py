"""What updates bring, written into the parts of it that one rank holds."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from raycrew.tensor_transport._bytes import copy_elements, count_write, parse_torch_dtype
from raycrew.tensor_transport.errors import ReshardError
from raycrew.tensor_transport.weights._update import order_of, overlaps_of
from raycrew.tensor_transport.weights.resharding._layouts import Block, Layout, local_tensor
from raycrew.tensor_transport.weights.resharding._moving.memories import fold_region, memories_of, view
from raycrew.tensor_transport.weights.resharding._planning import check_targets


class ShardLoader:
    """Loads what an update brings into one rank's parameters, whatever the layout of who published it.

    `WeightReceiver(loader, expected=loader.expected)`: of each tensor the boxes that this rank holds are
    copied to where its layout says, in place. Each element of each parameter is that of one tensor, or
    declared as unused; that is checked here, before anything is fetched. Parameters that have some memory in
    common, as `w` and `w[:4]` have, are compared when they were written.

    Args:
        state: This rank's tensors and DTensors by name of the parameter.
        layout: What all ranks of its group hold, or this one alone.
        rank: Which rank this is.

    Raises:
        ReshardError: The parameters are not those of the layout, or some element of them gets no value, or
            several.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> None:
        check_targets(layout)
        self._layout, self._rank = layout, rank
        self._memories = memories_of(state, layout, rank)
        self._state = {name: state[name] for name in self._memories}
        self._blocks = {name: list(_blocks(layout, name, rank)) for name in layout.tensors}
        parts = {name: local_tensor(name, tensor) for name, tensor in self._state.items()}
        self._overlaps = {name: overlap for overlap in overlaps_of(parts) for name in overlap}

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """The whole tensors by name, without memory: what updates have to bring.

        Names whose parts are one memory of this rank have one tensor: they have to get the same elements.
        """
        found: dict[str, torch.Tensor] = {}
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, tensor in self._layout.tensors.items():
            parts = tuple((_memory(self._memories[each]), block) for each, block in self._blocks[name])
            whole = torch.empty(tensor.shape, dtype=parse_torch_dtype(tensor.dtype), device="meta")
            key: tuple[Any, ...] = (parts or name, whole.shape)
            if len(parts) == 1 and parts[0][1].region.size == whole.numel():
                start, region = parts[0][0], parts[0][1].region
                key = (start, region.offset, order_of(region.shape, region.strides))
            found[name] = made.setdefault((*key, whole.dtype), whole).view(whole.shape)
        return found

    def __call__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's boxes of each tensor to their places.

        Raises:
            ReshardError: A tensor is not one of the layout, or has another shape or dtype there. Afterwards:
                parameters that have memory in common here differ in what came, or from one that did not come.
        """
        written: set[str] = set()
        shared = [place for places in self._blocks.values() for place in places if place[0] in self._overlaps]
        folds = {place: self._fold(*place) for place in shared}
        try:
            for name, tensor in tensors:
                self._check(name, tensor)
                for parameter, block in self._blocks[name]:
                    written.add(parameter)
                    box = tuple(slice(a, a + n) for a, n in zip(block.start, block.region.shape, strict=True))
                    copy_elements(view(self._memories[parameter], block.region), tensor[box])
                    if parameter in self._overlaps:
                        folds[parameter, block] = self._fold(parameter, block)
        finally:
            count_write(self._state[each] for each in written)  # A DTensor does not count with its memory.

        for parameter, block in folds:
            if self._fold(parameter, block) != folds[parameter, block]:
                names = ", ".join(map(repr, sorted(self._overlaps[parameter])[:5]))
                raise ReshardError(
                    f"{names} have memory in common on rank {self._rank}, and differ in what came: publish "
                    "them tied, or untie them here",
                    tensor=parameter,
                )

    def _fold(self, parameter: str, block: Block) -> int:
        return fold_region(self._memories[parameter], block.region)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        wanted = self._layout.tensors.get(name)
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if wanted is None or found != (wanted.dtype, wanted.shape):
            told = "none" if wanted is None else f"{wanted.dtype}{list(wanted.shape)}"
            raise ReshardError(
                f"rank {self._rank} is given {name!r} as {found[0]}{list(found[1])}; its layout has {told}",
                tensor=name,
            )


def _memory(memory: torch.Tensor) -> tuple[Any, ...]:
    """What tells where a memory begins, and how it is read."""
    return memory.device, memory.data_ptr(), memory.is_conj(), memory.is_neg()


def _blocks(layout: Layout, name: str, rank: int) -> Iterable[tuple[str, Block]]:
    tensor = layout.tensors[name]
    names = tensor.parameters or (name,)
    for share in tensor.shares:
        if share.rank == rank:
            for block in share.blocks:
                yield names[share.parameter], block
