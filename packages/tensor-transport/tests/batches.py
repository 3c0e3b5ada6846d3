"""What several test modules compare batches with."""

import numpy as np
import torch

from raycrew.tensor_transport import PackedTensor, RaggedTensor


def read_only_copy(buffer):
    """A buffer as it comes from shared memory: other bytes, not writable."""
    data = np.frombuffer(buffer, np.uint8).copy()
    data.flags.writeable = False
    return data.data


def same(a, b):
    """Whether two values are equal in type, dtype, shape and content, at any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return same(a.tolist(), b.tolist()) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, RaggedTensor | PackedTensor):
        return same(vars(a), vars(b))
    return a == b or (a != a and b != b)


def assert_same(actual, expected):
    """Columns and metadata are the same, whatever the class."""
    assert list(actual) == list(expected)
    for key in expected:
        assert same(actual[key], expected[key]), f"{key}: {actual[key]!r} is not {expected[key]!r}"
    assert same(actual.metadata, expected.metadata)


def _bits(tensor):
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
