"""Tensors and arrays as plain bytes, and back, without a copy where the memory allows it."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport.errors import DecodeError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

_DTYPE_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex32 "
    "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
)
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}
_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(name) for name, dtype in TORCH_DTYPES.items() if hasattr(np, name) and name != "bool"
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_LARGE_COPY = 1 << 20  # from here on numpy copies faster into fresh pages than torch does
_COPY_PART = 4 << 20
_NUMPY_KINDS = "biufcmMSU"
FREED = "its memory was freed; sharded models do that: gather it first"
_recorded: ContextVar[list[torch.Tensor] | None] = ContextVar("_recorded", default=None)


@contextmanager
def record_tensors() -> Iterator[list[torch.Tensor]]:
    """Collect every tensor whose bytes are asked for meanwhile, in this thread."""
    tensors: list[torch.Tensor] = []
    token = _recorded.set(tensors)
    try:
        yield tensors
    finally:
        _recorded.reset(token)


def check_tensor(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Refuse what has no plain bytes.

    Raises:
        UnsupportedTensorError: Quantised, sparse, nested or meta tensors, and subclasses such as DTensor.
    """
    reason = _why_unsupported(tensor)
    if reason:
        raise UnsupportedTensorError(f"{name}: {reason}", name=name)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has plain bytes."""
    return _why_unsupported(tensor) is None


def tensor_bytes(tensor: torch.Tensor, name: str = "tensor") -> Bytes:
    """The elements of a tensor as bytes, in place if it is contiguous and on the CPU, else a copy of them."""
    check_tensor(tensor, name)
    if (recorded := _recorded.get()) is not None:
        recorded.append(tensor)
    return flat_bytes(tensor.detach().cpu()).numpy()


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that belongs to a tensor with elements, and the one after the last."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (int(reach) + 1) * tensor.itemsize


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage has not all of its elements: torch would read, and write, what is not its.

    Sharded models make storages of gathered parameters empty in place of letting go of them.
    """
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < extent_of(tensor)[1]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as uint8 of one dimension, on its device: in place if contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 1:  # as in `copy_elements`
        tensor = tensor.view(torch.uint8)
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    if flat.stride(0) != 1:  # a single element may have any stride and still be contiguous
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements can be assigned by mask or number, which some dtypes' own can't."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of its shape, whatever strides and devices they have."""
    if target.dtype == source.dtype and target.itemsize == 1:  # torch can't copy all that are as small
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def flat_memory(tensor: torch.Tensor, name: str = "tensor") -> torch.Tensor:
    """The memory of a tensor as uint8 of one dimension, on its device and in place: to be written to.

    Raises:
        UnsupportedTensorError: It has no plain bytes.
        ValueError: It is not contiguous, or its elements are the conjugates or negatives of what lies there.
    """
    check_tensor(tensor, name)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is not contiguous, or a lazy conjugate or negative: it can't be filled")
    return flat_bytes(tensor)


def count_write(tensors: Iterable[torch.Tensor]) -> None:
    """Have torch know of a write to tensors that went past it.

    What it had saved of them, as autograd and `Encoded.check_unchanged` do, is then known to be gone, and not
    taken for what lies there now.
    """
    increment_version(list(tensors))


def array_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The elements of an array as bytes, in place if it is C-contiguous, else a copy of them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def has_plain_bytes(array: npt.NDArray[Any]) -> bool:
    """Whether an array's elements are their own bytes: no Python objects, no records."""
    return array.dtype.kind in _NUMPY_KINDS and array.dtype.itemsize > 0


def tensor_over(data: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over these very bytes, even read-only ones: the caller answers for nobody writing to it.

    Bytes that are not aligned to the element size are copied.
    """
    if not data.nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if data.__array_interface__["data"][0] % dtype.itemsize:
        data = data.copy()
    return _shaped(unlocked(data), dtype, shape)


def tensor_from(data: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in memory of its own, filled from bytes."""
    if not data.nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    own = np.empty(data.nbytes, np.uint8)
    copy_bytes(own, data)
    return _shaped(own, dtype, shape)


def copy_bytes(target: Bytes, source: Bytes) -> None:
    """Copy bytes; many of them in several threads, as one alone does not use all of the memory's speed."""
    in_sections(
        source.nbytes, _COPY_PART, lambda start, stop: copy_part(target[start:stop], source[start:stop])
    )


def copy_part(target: Bytes, source: Bytes) -> None:
    """Copy bytes in this thread alone; less than a megabyte are in the processor's cache afterwards.

    So few the C library copies by an instruction (`rep movsb`) that takes twice the time out of small pages,
    as those of shared memory are, where numpy's loops don't.
    """
    if source.nbytes < _LARGE_COPY:
        np.bitwise_or(source, source, out=target)
    else:
        np.copyto(target, source)


def fresh_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, for a large one in huge pages, which numpy asks for and torch does not."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _LARGE_COPY:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return tensor_over(np.empty(size_bytes, np.uint8), dtype, shape)


def unlocked(data: Bytes) -> Bytes:
    """The same bytes as an array that looks writable: for reading only, by whoever can't read otherwise.

    `torch.from_numpy` warns about read-only arrays, and making each of many small runs look writable costs
    more than doing so for the buffer that they lie in.
    """
    return data if data.flags.writeable or not data.nbytes else np.asarray(_Writable(data))


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in memory of its own."""
    if tensor.nbytes < _LARGE_COPY or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor_from(tensor_bytes(tensor), tensor.dtype, tensor.shape)


def array_over(data: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """An array over these very bytes; read-only if they are."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return data.view(dtype).reshape(shape)


def parse_torch_dtype(name: str) -> torch.dtype:
    """The dtype that `str(dtype)` names, with or without `torch.`.

    Raises:
        DecodeError: There is none.
    """
    try:
        return TORCH_DTYPES[name.removeprefix("torch.")]
    except KeyError:
        raise DecodeError(f"unknown torch dtype {name!r}") from None


def parse_numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype that `dtype.str` names.

    Raises:
        DecodeError: There is none, or its elements are not plain bytes.
    """
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        raise DecodeError(f"unknown numpy dtype {name!r}") from None
    if dtype.kind not in _NUMPY_KINDS or dtype.itemsize == 0 or not isinstance(name, str):
        raise DecodeError(f"numpy dtype {name!r} has no plain bytes")
    return dtype


def _shaped(data: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if known := _NUMPY_DTYPES.get(dtype):  # views cost numpy a fraction of what they cost torch
        return torch.from_numpy(data.view(known).reshape(shape))
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


class _Writable:
    """Presents read-only memory as writable to numpy, and keeps its owner alive."""

    def __init__(self, data: Bytes) -> None:
        self._owner = data
        interface = dict(data.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _why_unsupported(tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is no torch.Tensor"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__} is not moved as it is; pass its local or full torch.Tensor"
    if tensor.is_nested:
        return "nested tensors are not supported; use RaggedTensor.from_rows(tensor.unbind())"
    if tensor.layout != torch.strided:
        return f"tensors of layout {tensor.layout} are not supported; call to_dense() first"
    if tensor.is_quantized:
        return f"quantised tensors ({tensor.dtype}) are not supported; pass int_repr() and the scale apart"
    if tensor.is_meta:
        return "a meta tensor has no data to move"
    if str(tensor.dtype).removeprefix("torch.") not in TORCH_DTYPES:
        return f"dtype {tensor.dtype} is not supported; pass a view of it as uint8"
    if is_freed(tensor):
        return FREED
    return None


if sys.byteorder != "little":  # pragma: no cover - torch bytes carry no byte order
    raise ImportError("raycrew.tensor_transport moves raw little-endian bytes; this machine is big-endian")
