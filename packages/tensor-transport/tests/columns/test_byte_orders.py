"""Arrays of another byte order than this machine's: their values and dtypes stay, on every way."""

import pickle

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, RaggedTensor

pytestmark = pytest.mark.hostile
OTHER = ">" if np.dtype("=i4").newbyteorder("<") == np.dtype("i4") else "<"
ARRAYS = {
    "floats": np.array([[1.5, -2.0], [np.nan, 0.0], [3.0, 4.0]], dtype=f"{OTHER}f4"),
    "integers": np.array([1, 256, -3], dtype=f"{OTHER}i8"),
    "backwards": np.arange(6, dtype=f"{OTHER}u2").reshape(3, 2)[::-1, ::-1],
    "complex": np.array([1 + 2j, 0, -1j], dtype=f"{OTHER}c8"),
    "times": np.array(["2020-01-01", "NaT", "1969-12-31"], dtype=f"{OTHER}M8[s]"),
    "texts": np.array(["abc", "\u00e9", "\U0001f600x"], dtype=f"{OTHER}U3"),
}
WAYS = {
    "pickled": lambda b, _: pickle.loads(pickle.dumps(b)),
    "encoded": lambda b, _: BatchedDataDict.decode(b.encode().header, b.encode().buffers, allow_pickle=True),
    "saved": lambda b, file: (b.save(file), BatchedDataDict.load(file))[1],
    "joined": lambda b, _: BatchedDataDict.concat([b[:1], b[1:]]),
    "chosen": lambda b, _: b[[2, 1, 0]][[2, 1, 0]],
    "repeated": lambda b, _: b.repeat_interleave(2)[::2],
    "padded": lambda b, _: b.pad_to_divisor(4)[0].unpad(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ARRAYS)
def test_they_are_what_they_were(kind, way, tmp_path):
    batch = BatchedDataDict(x=ARRAYS[kind], metadata={"x": ARRAYS[kind]})
    found = WAYS[way](batch, tmp_path / "batch")
    assert found == batch and found["x"].dtype == ARRAYS[kind].dtype
    assert np.array_equal(found.metadata["x"], ARRAYS[kind], equal_nan=kind in ("floats", "times"))


def test_joined_texts_are_as_wide_as_the_widest_and_in_the_order_of_the_first():
    narrow, wide = np.array(["a"], dtype=f"{OTHER}U1"), np.array(["bcd"])
    for parts in ([narrow, wide], [wide, narrow]):
        joined = BatchedDataDict.concat([BatchedDataDict(x=part) for part in parts])["x"]
        assert joined.tolist() == [text for part in parts for text in part]
        assert joined.dtype == np.dtype("U3").newbyteorder(parts[0].dtype.byteorder)


@pytest.mark.parametrize("lengths", [np.array([2, 1], dtype=f"{OTHER}i4"), np.array([1, 2])[::-1]])
def test_lengths_of_any_memory(lengths):
    assert RaggedTensor(torch.arange(3), lengths).lengths.tolist() == [2, 1]
    assert RaggedTensor.from_padded(torch.ones(2, 4), lengths).lengths.tolist() == [2, 1]


def test_numbers_are_tensors_in_a_tensordict():
    pytest.importorskip("tensordict")
    batch = BatchedDataDict(x=ARRAYS["floats"], n=ARRAYS["integers"], b=ARRAYS["backwards"].astype("i4"))
    found = batch.to_tensordict()
    assert torch.equal(found["n"], torch.tensor([1, 256, -3]))
    assert found["x"].dtype == torch.float32 and found["x"][:, 1].tolist() == [-2, 0, 4]
    assert found["b"].tolist() == ARRAYS["backwards"].tolist()
