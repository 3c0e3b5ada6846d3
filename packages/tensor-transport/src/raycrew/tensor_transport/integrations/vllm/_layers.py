"""Plain layers on a CPU, loaded by way of memory that is there already.

vLLM makes room for the weights of a layer, copies them there, packs them, and gives the room up, one layer
after another: through memory that no cache has. Not in several threads: what packs them is one for a process.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@contextlib.contextmanager
def loading_plain_layers(model: torch.nn.Module) -> Iterator[None]:
    """Have plain layers only note what they are given, and load it when the context ends without an error.

    Within it vLLM's loaders take a model's weights; each layer loads with its own loaders, as it would have.

    Raises:
        Exception: What a layer's loader raises; then others may not have been loaded.
    """
    layers = [_Layer(module) for module in model.modules() if _is_plain(module)]
    try:
        yield
    finally:
        for layer in layers:
            layer.end_noting()
    layers = [layer for layer in layers if layer.calls]
    room = torch.empty(max((layer.room_size for layer in layers), default=0), dtype=torch.uint8)
    with torch.no_grad():
        for layer in layers:
            layer.load(room)


def _is_plain(module: torch.nn.Module) -> bool:
    if type(getattr(module, "quant_method", None)) not in _PLAIN:
        return False
    info = get_layerwise_info(module)
    return bool(info.can_load()) and info.restore_device.type == "cpu"


class _Layer:
    """A layer that notes what it is given.

    Attributes:
        calls: Of its loaders.
        room_size: Bytes of its parameters that it has no memory for, as it computes with others that it
            makes of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.calls: list[Callable[[], object]] = []
        self._module = module
        self._loaders: list[tuple[Any, Any]] = []
        self._kept = get_layerwise_info(module).kernel_tensors[0]
        fresh = [one for name, one in self._without_memory() if not self._is_kept(name, one)]
        self.room_size = sum(one.nbytes for one in fresh)
        tensors: list[Any] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
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
                data = self._kept[name].data
            else:
                flat, room = room[: parameter.nbytes], room[parameter.nbytes :]
                data = flat.view(parameter.dtype).view(parameter.shape)
            setattr(self._module, name, _like(parameter, data))
        for call in self.calls:
            call()

    def _note(self, loader: Callable[..., object], *args: Any, **options: Any) -> None:
        self.calls.append(partial(loader, *args, **options))

    def _without_memory(self) -> list[tuple[str, torch.Tensor]]:
        named = self._module.named_parameters(recurse=False)
        return [(name, one) for name, one in named if one.is_meta and one.is_contiguous()]

    def _is_kept(self, name: str, parameter: torch.Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and _form(kept) == _form(parameter)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A parameter with other memory, as vLLM makes one of what it knows of it."""
    data.__class__ = type(parameter)
    data.__dict__ = vars(parameter).copy()
    return data
