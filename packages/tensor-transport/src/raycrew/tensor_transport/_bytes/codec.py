"""Any Python object as one pickle and a few large buffers.

Tensors and arrays anywhere inside the object travel as pickle-5 out-of-band buffers: never through torch's
own pickling (which copies twice) nor through Ray's tensor serialiser. Nothing is copied but what is small or
not contiguous; whoever stores the buffers takes the one copy that is needed.
"""

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._bytes.arenas import Slot, arrange, locate
from raycrew.tensor_transport._bytes.memory import (
    check_tensor,
    parse_torch_dtype,
    record_tensors,
    tensor_bytes,
    tensor_from,
    tensor_over,
)
from raycrew.tensor_transport.errors import DecodeError, SourceChangedError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

_MAGIC = b"rct1"
_PREFIX = struct.Struct("<4sQ")
_SLOT = np.dtype("<i8")


@dataclass(frozen=True)
class Encoded:
    """An object as bytes: a header and buffers, which may lie in the object's own memory.

    Attributes:
        header: What `decode` needs besides the buffers; small.
    """

    header: bytes
    _buffers: list[Bytes]
    _lent: list[tuple[torch.Tensor, int]] = field(default_factory=list, repr=False, compare=False)

    @property
    def buffers(self) -> list[Bytes]:
        """Runs of bytes, in order, as they were when the object was encoded.

        Raises:
            SourceChangedError: A tensor whose memory is lent here was written to since.
        """
        self.check_unchanged()
        return self._buffers

    @property
    def size_bytes(self) -> int:
        """Bytes of the header and all buffers."""
        return len(self.header) + sum(buffer.nbytes for buffer in self._buffers)

    def check_unchanged(self) -> None:
        """Raise if a tensor whose memory is lent here was written to since `encode`.

        `buffers` does so, too; call this once the bytes were sent.

        Raises:
            SourceChangedError: It was; the bytes are no longer those that were encoded.
        """
        for tensor, version in self._lent:
            if tensor._version != version:  # noqa: SLF001 - torch documents no other way to see a write
                raise SourceChangedError(
                    f"a lent tensor of shape {tuple(tensor.shape)} was written to after it was put with "
                    "borrow=True; keep it unchanged until it is released, or put it without borrow"
                )


def encode(value: object, *, borrow: bool = False) -> Encoded:
    """Take an object apart into a header and buffers.

    Args:
        value: Anything that can be pickled, with tensors and arrays at any depth.
        borrow: Leave large contiguous tensors where they are, to be read later: taking the buffers, or
            `check_unchanged`, raises if somebody wrote to them meanwhile. By default every byte is copied.

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes, or can't be watched for writes (`borrow`).
    """
    return finish(lambda: _lay_out(value), borrow=borrow)


def finish(lay_out: Callable[[], tuple[bytes, list[Bytes]]], *, borrow: bool) -> Encoded:
    """A laid-out object as a snapshot, or with its tensors lent and watched for writes.

    Only memory of tensors is lent: torch counts the writes to them, and nobody counts those to numpy arrays.
    """
    with record_tensors() as tensors:
        header, buffers = lay_out()
    lent = {buffer.ctypes.data for buffer in buffers if buffer.base is not None} if borrow else set()
    sources = [(tensor, _version(tensor)) for tensor in tensors if tensor.data_ptr() in lent]
    kept = {tensor.data_ptr() for tensor, _ in sources}
    settled = [b if b.base is None or b.ctypes.data in kept else b.copy() for b in buffers]
    return Encoded(header, settled, sources)


def decode(header: bytes | memoryview, buffers: Sequence[Bytes]) -> Any:
    """Put an object together again. It unpickles: only for bytes from a trusted source.

    Tensors over writable buffers lie in them (in place); tensors over read-only ones are copied, so that a
    write never reaches another reader. Arrays lie in place, read-only if the buffer is.

    Raises:
        DecodeError: The header or a buffer is damaged.
    """
    header = memoryview(header)
    if len(header) < _PREFIX.size or bytes(header[:4]) != _MAGIC:
        raise DecodeError("not the header of an encoded object")
    count = _PREFIX.unpack_from(header)[1]
    end = _PREFIX.size + 3 * _SLOT.itemsize * count
    if end > len(header):
        raise DecodeError(f"the header names {count} runs of bytes but ends after {len(header)} bytes")
    table = np.frombuffer(header[_PREFIX.size : end], _SLOT).reshape(-1, 3)
    return load(header[end:], locate([Slot(*row) for row in table.tolist()], buffers))


def dump(value: object) -> tuple[bytes, list[Bytes]]:
    """Pickle an object, its tensors and arrays beside it as runs of bytes in the memory they already have."""
    stream = io.BytesIO()
    found: list[pickle.PickleBuffer] = []
    pickler = _pickler_class()(stream, protocol=5, buffer_callback=found.append)
    pickler.dump(value)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in found]


def load(pickled: bytes | memoryview, runs: Iterable[Bytes]) -> Any:
    """The counterpart of `dump`.

    Raises:
        DecodeError: The pickle is damaged.
    """
    try:
        return pickle.loads(pickled, buffers=[pickle.PickleBuffer(run.data) for run in runs])
    except DecodeError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DecodeError(f"damaged pickle: {error}") from error


def reduce_through(rebuild: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What `__reduce_ex__` returns to travel as few out-of-band buffers and be rebuilt from `arguments`."""
    header, buffers = _lay_out(arguments)
    return _rebuild, (rebuild, header, *buffers)


def rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor from an out-of-band buffer: in place where the buffer is writable, else a copy of it."""
    data = np.frombuffer(buffer, np.uint8)
    parsed = parse_torch_dtype(dtype)
    check_size(data, parsed.itemsize, shape)
    return (tensor_over if data.flags.writeable else tensor_from)(data, parsed, shape)


def check_size(data: Bytes, itemsize: int, shape: Sequence[int]) -> None:
    """Raise DecodeError unless `data` holds exactly `shape` elements of `itemsize` bytes."""
    expected = itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise DecodeError(f"{shape!r} is not a shape")
        expected *= length
    if data.nbytes != expected:
        raise DecodeError(
            f"shape {tuple(shape)} of {itemsize}-byte elements needs {expected} bytes, got {data.nbytes}"
        )


def _lay_out(value: object) -> tuple[bytes, list[Bytes]]:
    pickled, runs = dump(value)
    slots, buffers = arrange(runs)
    return _PREFIX.pack(_MAGIC, len(slots)) + np.array(slots, _SLOT).tobytes() + pickled, buffers


def _rebuild(rebuild: Callable[..., Any], header: bytes, *buffers: Bytes) -> Any:
    return rebuild(*decode(header, buffers))


class _TensorReducer:
    """Mixed into a pickler: plain tensors become out-of-band buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            data = pickle.PickleBuffer(tensor_bytes(obj).data)
            return rebuild_tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        if isinstance(obj, torch.Tensor) and not isinstance(obj, torch.nn.Parameter):
            check_tensor(obj)
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(obj)


class _PlainPickler(_TensorReducer, pickle.Pickler):
    pass


def _pickler_class() -> Any:
    """Ray's pickler in a process that uses Ray (it knows handles and interactive classes), else Python's."""
    base = getattr(sys.modules.get("ray.cloudpickle"), "CloudPickler", None)
    return _PlainPickler if base is None else type("_RayPickler", (_TensorReducer, base), {})


def _version(tensor: torch.Tensor) -> int:
    if tensor.is_inference():
        raise UnsupportedTensorError(
            "an inference-mode tensor can't be lent: torch records no writes to it; put it without borrow"
        )
    return tensor._version  # noqa: SLF001
