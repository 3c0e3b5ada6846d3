"""Casts that would make other values of some are refused."""

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError

pytestmark = pytest.mark.hostile

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "old", "new"),
    [
        ([-1], torch.int8, torch.uint8),
        ([200], torch.uint8, torch.int8),
        ([-1], torch.int64, torch.uint64),
        ([-1], torch.int8, torch.uint16),
        ([2**63 - 1], torch.int64, torch.float64),
        ([2.0**63], torch.float64, torch.int64),
        ([INF], torch.float32, torch.float8_e4m3fn),
        ([-INF], torch.float32, torch.float8_e4m3fnuz),
        ([INF], torch.float8_e5m2, torch.float8_e4m3fn),
        ([-1.0], torch.float32, torch.float8_e8m0fnu),
        ([0.0], torch.float32, torch.float8_e8m0fnu),
        ([INF], torch.bfloat16, torch.float8_e8m0fnu),
    ],
)
def test_others_are_refused(values, old, new):
    tensor = torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else torch.int64).to(
        old
    )
    batch = BatchedDataDict(x=tensor)
    with pytest.raises(BatchSchemaError, match="is not held by"):
        batch.cast({"x": new})
    assert batch.cast({"x": new}, lossy=True)["x"].dtype == new


def test_arrays_as_well():
    with pytest.raises(BatchSchemaError, match="is not held by"):
        BatchedDataDict(x=np.array([-1], np.int8)).cast({"x": torch.uint8})


@pytest.mark.parametrize(
    ("values", "new"),
    [
        ([1.0, -2.0, 0.0, -0.0, 1e-30, -1e-30, NAN], torch.float8_e4m3fn),
        ([1.0, INF, -INF, NAN, 0.0], torch.float8_e5m2),
        ([1.0, -2.0, 0.0], torch.float8_e4m3fnuz),
        ([1.0, 2.0, NAN], torch.float8_e8m0fnu),
        ([INF, -INF, NAN, 1e-30, -0.0], torch.float16),
        ([INF, NAN, -1.0], torch.complex64),
    ],
)
def test_what_is_held_passes(values, new):
    found = BatchedDataDict(x=torch.tensor(values)).cast({"x": new})["x"]
    assert found.dtype == new
    assert found.to(torch.complex64).real.isnan().tolist() == torch.tensor(values).isnan().tolist()


@pytest.mark.parametrize("new", [torch.uint8, torch.uint64, torch.float32, torch.complex64, torch.int64])
def test_small_integers_are_held_by_all(new):
    assert BatchedDataDict(x=torch.tensor([0, 3, 127], dtype=torch.int8)).cast({"x": new})["x"].dtype == new
