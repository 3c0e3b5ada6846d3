"""Tensors and objects as plain bytes in few buffers, and back, without needless copies."""

from raycrew.tensor_transport._bytes.arenas import Slot, arrange, locate
from raycrew.tensor_transport._bytes.codec import Encoded, check_size, dump, finish, load, reduce_through
from raycrew.tensor_transport._bytes.folding import (
    FOLD_BYTES,
    SECTION_BYTES,
    Fold,
    SectionFolds,
    fold,
    fold_in_sections,
)
from raycrew.tensor_transport._bytes.memory import (
    TORCH_DTYPES,
    array_bytes,
    array_over,
    check_tensor,
    copy_bytes,
    fresh_tensor,
    has_plain_bytes,
    is_plain,
    parse_numpy_dtype,
    parse_torch_dtype,
    private_copy,
    tensor_bytes,
    tensor_from,
    tensor_over,
    unlocked,
)
from raycrew.tensor_transport._bytes.safetensors import (
    SAFETENSORS_DTYPES,
    Entry,
    frame,
    header_length,
    parse_header,
)
from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport._bytes.whole_files import write_whole

__all__ = [
    "FOLD_BYTES",
    "SAFETENSORS_DTYPES",
    "SECTION_BYTES",
    "TORCH_DTYPES",
    "Encoded",
    "Entry",
    "Fold",
    "SectionFolds",
    "Slot",
    "arrange",
    "array_bytes",
    "array_over",
    "check_size",
    "check_tensor",
    "copy_bytes",
    "dump",
    "finish",
    "fold",
    "fold_in_sections",
    "frame",
    "fresh_tensor",
    "has_plain_bytes",
    "header_length",
    "in_sections",
    "is_plain",
    "load",
    "locate",
    "parse_header",
    "parse_numpy_dtype",
    "parse_torch_dtype",
    "private_copy",
    "reduce_through",
    "tensor_bytes",
    "tensor_from",
    "tensor_over",
    "unlocked",
    "write_whole",
]
