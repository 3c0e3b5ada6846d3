"""Buffers of callers: what is lent, what is filled in place, and what is refused before a byte moves."""

import numpy as np
import pytest
import torch

from raycrew.tensor_transport.errors import UnsupportedTensorError
from raycrew.tensor_transport.transports import SharedMemoryTransport, bytes_of, memory_of

BITS = torch.arange(4096).to(torch.uint8)


class Marked(torch.Tensor):
    """A tensor with a meaning of its own."""


def test_what_is_contiguous_is_taken_in_place():
    for buffer in (BITS, BITS.numpy(), torch.nn.Parameter(BITS[:8].view(torch.float32))):
        start = torch.as_tensor(buffer).data_ptr()
        assert bytes_of(buffer, "it").data_ptr() == memory_of(buffer, "it").data_ptr() == start


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "bool"])
def test_strided_tensors_of_every_size_are_sent_in_order(dtype):
    bits = BITS if dtype != "bool" else BITS % 2
    tensor = bits.view(getattr(torch, dtype)).reshape(64, -1)
    for taken in (tensor[::2, 1::3], tensor.T, tensor[:1, 2:3], tensor[:0], tensor[3].expand(2, -1)):
        size = tensor.itemsize
        apart = bits.reshape(64, -1, size)
        index = torch.arange(tensor.numel()).reshape(tensor.shape).as_strided(taken.shape, taken.stride())
        wanted = apart.reshape(-1, size)[index.reshape(-1) + taken.storage_offset()].reshape(-1)
        assert torch.equal(bytes_of(taken, "it"), wanted)


@pytest.mark.hostile
def test_a_lazy_conjugate_is_sent_as_it_is_seen_and_never_filled():
    seen = torch.randn(5, dtype=torch.complex64).conj()
    assert torch.equal(bytes_of(seen, "it").view(torch.complex64), seen.resolve_conj())
    with SharedMemoryTransport() as transport:
        offer = transport.offer(torch.randn(5, dtype=torch.complex64))
        with pytest.raises(ValueError, match="buffer 0 is not contiguous, or a lazy conjugate"):
            transport.pull([offer.whole], [torch.zeros(5, dtype=torch.complex64).conj()])
    with pytest.raises(ValueError, match="lazy conjugate or negative"):
        memory_of(torch._neg_view(torch.zeros(5)), "it")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (torch.ones(3).as_subclass(Marked), UnsupportedTensorError),
        (torch.eye(3).to_sparse(), UnsupportedTensorError),
        (torch.empty(3, device="meta"), UnsupportedTensorError),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), UnsupportedTensorError),
        (np.ma.masked_array(np.zeros(3, np.uint8), [1, 0, 0]), ValueError),
        (np.zeros(3), ValueError),
        (np.zeros((3, 3), np.uint8), ValueError),
        (b"abc", TypeError),
        ([1, 2, 3], TypeError),
        (None, TypeError),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_no_buffer_is_refused_by_name(wrong, error):
    for take in (bytes_of, memory_of):
        with pytest.raises(error, match="buffer 7"):
            take(wrong, "buffer 7")


@pytest.mark.hostile
def test_only_what_can_be_written_to_is_filled():
    fixed = np.zeros(6, np.uint8)
    fixed.flags.writeable = False
    for wrong in (fixed, np.zeros(6, np.uint8)[::2], torch.zeros(1).expand(4), torch.zeros(4, 4).T):
        with pytest.raises(ValueError, match="it can't be filled"):
            memory_of(wrong, "buffer 7")
