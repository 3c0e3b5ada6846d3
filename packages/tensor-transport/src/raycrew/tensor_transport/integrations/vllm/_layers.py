"""Plain layers on a CPU, loaded by way of memory that is there already; what loads them is noted.

vLLM makes room for the weights of a layer, copies them there, packs them, and gives the room up, one layer
after another: through memory that no cache has. Not in several threads: what packs them is one for a process.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_NORMS = (RMSNorm, GemmaRMSNorm)
_ALIGNMENT = 64


@contextlib.contextmanager
def loading_plain_layers(model: torch.nn.Module) -> Iterator[list["PlainLayer"]]:
    """Have plain layers only note what they are given, and load it when the context ends without an error.

    Within it vLLM's loaders take a model's weights; each layer loads with its own loaders, as it would have.

    Raises:
        Exception: What a layer's loader raises; then others may not have been loaded.
    """
    layers = [PlainLayer(module) for module in model.modules() if _is_plain(module)]
    try:
        yield layers
    finally:
        for layer in layers:
            layer.end_noting()
    layers = [layer for layer in layers if layer.calls]
    room = torch.empty(max((layer.room_size for layer in layers), default=0), dtype=torch.uint8)
    with torch.no_grad():
        for layer in layers:
            layer.load(room)


def _is_plain(module: torch.nn.Module) -> bool:
    if type(module) not in _NORMS and type(getattr(module, "quant_method", None)) not in _PLAIN:
        return False
    if current_platform.is_zen_cpu():  # There a layer may compute with the very memory that it was loaded by.
        return False
    info = get_layerwise_info(module)
    return bool(info.can_load()) and info.restore_device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of a layer's loaders."""

    loader: Callable[..., object]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        """Load."""
        self.loader(*self.args, **self.options)


class PlainLayer:
    """A layer that notes what it is given.

    Attributes:
        module: vLLM's.
        parameters: As they are loaded: those that have no memory yet, and those that it computes with.
        kept: All that it computes with.
        calls: Of its loaders.
        room_size: Bytes of its parameters that it has no memory for, as it computes with others that it
            makes of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters(recurse=False))
        self.calls: list[Call] = []
        self._loaders: list[tuple[Any, Any]] = []
        self.kept = get_layerwise_info(module).kernel_tensors[0]
        fresh = [one for name, one in self._without_memory() if not self._is_kept(name, one)]
        self.room_size = room_for(fresh)
        tensors: list[Any] = [*self.parameters.values(), *module.buffers(recurse=False)]
        for tensor in tensors:
            if (loader := getattr(tensor, "weight_loader", None)) is not None:
                self._loaders.append((tensor, loader))
                tensor.weight_loader = partial(self._note, loader)

    def end_noting(self) -> None:
        """From here on its loaders load."""
        for tensor, loader in self._loaders:
            tensor.weight_loader = loader

    def load(self, room: torch.Tensor) -> None:
        """Load what was noted: into what it computes with if that has the same form, or by way of a room."""
        for name, parameter in self._without_memory():
            if self._is_kept(name, parameter):
                data = self.kept[name].data
            else:
                data, room = carved(room, parameter)
            setattr(self.module, name, like(parameter, data))
        for call in self.calls:
            call()

    def _note(self, loader: Callable[..., object], *args: Any, **options: Any) -> None:
        self.calls.append(Call(loader, args, options))

    def _without_memory(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, one) for name, one in self.parameters.items() if one.is_meta and one.is_contiguous()]

    def _is_kept(self, name: str, parameter: torch.Tensor) -> bool:
        kept = self.kept.get(name)
        return kept is not None and form_of(kept) == form_of(parameter)


def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Tensors of one form can have each other's elements in place of their own."""
    return tensor.dtype, tensor.shape, tensor.stride()


def room_for(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of a room from which these parameters are carved."""
    return sum(_aligned(one.nbytes) for one in parameters)


def carved(room: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a contiguous parameter at the start of a room (uint8), and what is left of that."""
    data, left = room[: parameter.nbytes], room[_aligned(parameter.nbytes) :]
    return data.view(parameter.dtype).view(parameter.shape), left


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A parameter with other memory, as vLLM makes one of what it knows of it."""
    data.__class__ = type(parameter)
    data.__dict__ = vars(parameter).copy()
    return data
