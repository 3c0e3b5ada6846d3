"""The safetensors format, framed and parsed without copying tensors."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raycrew.tensor_transport._bytes.memory import tensor_bytes
from raycrew.tensor_transport.errors import DecodeError, TransportError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import Bytes

MAX_HEADER_BYTES = 16 << 20
_MAX_RANK = 64
_MAX_EXTENT = 2**63 - 1
_LENGTH = struct.Struct("<Q")
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
SAFETENSORS_DTYPES = frozenset(_NAMES)
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, and what its bytes mean."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    size_bytes: int

    def empty(self) -> torch.Tensor:
        """Memory for it.

        Raises:
            TransportError: There is none.
        """
        try:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"no memory for the {self.size_bytes} bytes of a tensor: {error}") from error


def frame(
    tensors: Mapping[str, torch.Tensor], note: Mapping[str, str] | None = None
) -> tuple[bytes, list[Bytes]]:
    """The start of a file, and the tensors' bytes that follow it.

    Args:
        tensors: By name.
        note: Texts for the header, which readers may ignore.

    Raises:
        UnsupportedTensorError: A dtype has no name in the format.
    """
    header: dict[str, object] = {"__metadata__": dict(note)} if note else {}
    runs = []
    end = 0
    # Wide elements first keeps every tensor aligned, as the format's own writer does.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if tensor.dtype not in _NAMES:
            raise UnsupportedTensorError(f"{name}: safetensors has no name for {tensor.dtype}", name=name)
        run = tensor_bytes(tensor, name)
        offsets = [end, end + run.size]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        runs.append(run)
        end += run.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text, runs


def header_length(start: bytes) -> int:
    """Length of the header that follows the first eight bytes.

    Raises:
        DecodeError: It cannot be.
    """
    if len(start) != _LENGTH.size:
        raise DecodeError(f"a safetensors file starts with 8 bytes, got {len(start)}")
    length: int = _LENGTH.unpack(start)[0]
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise DecodeError(f"a header of {length} bytes is not within 2 and {MAX_HEADER_BYTES}")
    return length


def parse_header(text: bytes) -> list[Entry]:
    """The tensors in the order of their bytes, which follow each other without a gap.

    Raises:
        DecodeError: The header is no such thing.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the safetensors header is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DecodeError("the safetensors header is no JSON object")
    places = [_entry(name, value) for name, value in found.items() if name != "__metadata__"]
    places.sort(key=lambda place: (place[0], place[1]))
    end = 0
    for start, stop, entry in places:
        if start != end:
            raise DecodeError(f"tensor {entry.name!r} starts at byte {start}, expected {end}")
        end = stop
    return [entry for _, _, entry in places]


def _entry(name: str, value: object) -> tuple[int, int, Entry]:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise DecodeError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    if dtype not in _DTYPES:
        raise DecodeError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    size = extent = _DTYPES[dtype].itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise DecodeError(f"tensor {name!r} has the shape {shape!r:.100}")
        size, extent = size * length, extent * max(1, length)
    if len(shape) > _MAX_RANK or extent > _MAX_EXTENT:
        raise DecodeError(f"tensor {name!r} has the shape {shape!r:.100}: no tensor can")
    if type(start) is not int or type(stop) is not int or start < 0 or stop - start != size:
        raise DecodeError(f"tensor {name!r} of {dtype}{shape} needs {size} bytes, has {stop - start}")
    return start, stop, Entry(name, _DTYPES[dtype], tuple(shape), size)
