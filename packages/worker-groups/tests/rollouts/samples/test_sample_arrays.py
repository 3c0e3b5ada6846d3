"""Arrays as rows of a queue: as they were, and the receiver's own."""

import pytest

from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._asking.arrays import decode_array, encode_array

np = pytest.importorskip("numpy")


@pytest.fixture
def queue():
    with SampleQueue(["tokens"]) as made:
        yield made


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([1.5, np.nan, -np.inf], dtype=np.float16),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(7, dtype=np.uint8),
        np.zeros((0, 4), dtype=np.float32),
        np.arange(6).reshape(2, 3).T,
        np.arange(10)[::3],
        np.arange(3, dtype=">i4"),
        np.array(["a", "bc"]),
        np.array([{"an": "object"}], dtype=object),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.frombuffer(b"abcd", dtype=np.uint8),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype} {array.shape}",
)
def test_arrays_come_back_as_they_were_and_can_be_written_to(queue, array):
    queue.put({"tokens": [array]}, version=0)
    (found,) = queue.get(1)["tokens"]
    assert type(found) is type(array) and found.dtype == array.dtype and found.shape == array.shape
    assert repr(found) == repr(array) and found.flags.writeable and found is not array


def test_an_array_that_is_changed_after_it_was_put_comes_as_it_was(queue):
    row = np.zeros(3)
    queue.put({"tokens": [row]}, version=0)
    row[:] = 1
    assert queue.get(1)["tokens"][0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("array", "written"),
    [
        (np.arange(2, dtype="<i2"), b"\x01\x05\x00<i2 2\x00\x00\x01\x00"),
        (np.zeros((1, 2), dtype="u1"), b"\x01\x07\x00|u1 1 2\x00\x00"),
    ],
)
def test_arrays_are_written_as_earlier_versions_did(array, written):
    """A queue in a folder may be opened by a later one."""
    assert encode_array(array) == written
    assert decode_array(written).tolist() == array.tolist()
