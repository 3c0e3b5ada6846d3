"""Casts that would make other values of some are refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError
from raycrew.tensor_transport._columns.kinds.casting import cast_array, cast_tensor

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


def test_what_is_lost_has_to_be_asked_for():
    for cast, values in ((cast_tensor, torch.tensor([-1])), (cast_array, np.array([-1]))):
        with pytest.raises(BatchSchemaError, match="is not held by"):
            cast(values, torch.uint8, "x")
        assert cast(values, torch.uint8, "x", lossy=True).tolist() == [255]
        assert cast(values, torch.int8, "x").tolist() == [-1]


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


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *SMALL_FLOATS]
EDGES = [
    sign * 2**power + step
    for power in (0, 7, 8, 11, 24, 31, 53, 62)
    for sign in (1, -1)
    for step in (-1, 0, 1)
]
VALUES = st.sampled_from(
    [0, *EDGES, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 300.0, 70000.0, 0.5, -0.0, 1e-30, -1e-30]
)
SPECIAL = st.sampled_from([INF, -INF, NAN, 1e300, -1e300, 448.0, 449.0, 57344.0])


@pytest.mark.parametrize("new", [torch.float32, torch.int64])
def test_complex_numbers_stay_complex(new):
    batch = BatchedDataDict(x=torch.tensor([1 + 2j, 3.0]))
    assert batch.cast({"x": torch.complex128})["x"].tolist() == [1 + 2j, 3 + 0j]
    with pytest.raises(BatchSchemaError, match="no complex numbers in it"):
        batch.cast({"x": new})


@pytest.mark.parametrize("new", FLOATS[:-1])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_is_held_and_no_larger_one(new, sign):
    most = torch.tensor([sign * torch.finfo(new).max], dtype=torch.float64)
    assert BatchedDataDict(x=most).cast({"x": new})["x"].double().tolist() == most.tolist()
    if new != torch.float64:
        with pytest.raises(BatchSchemaError, match="larger than any in it"):
            BatchedDataDict(x=most * 1.01).cast({"x": new})


def held(value, dtype):
    """A value as a dtype has it, exactly as Python has it; None where that is no number of one kind."""
    if dtype in INTEGERS and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
        return None
    tensor = torch.tensor(value, dtype=torch.float64 if dtype in FLOATS else dtype).to(dtype)
    return tensor.item() if dtype not in SMALL_FLOATS else tensor.float().item()


def passes(value, old, new):
    """What is promised of one value: fractions are rounded, everything else stays or is refused."""
    if new in INTEGERS:
        limits = torch.iinfo(new)
        return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
    rounded = held(float(value), new)
    if new == torch.bool:
        return value in (0, 1)
    if old not in FLOATS:
        return rounded == value
    if math.isfinite(value) and abs(value) > torch.finfo(new).max:
        return False
    if new not in SMALL_FLOATS:
        return True
    sorts = [(math.isnan(n), math.isinf(n)) for n in (value, rounded)]
    return sorts[0] == sorts[1] and (
        rounded == 0 or math.isnan(value) or (rounded > 0) - (rounded < 0) == (value > 0) - (value < 0)
    )


@given(
    VALUES | SPECIAL,
    st.sampled_from([*INTEGERS, *FLOATS, torch.bool]),
    st.sampled_from([*INTEGERS, *FLOATS, torch.bool]),
)
def test_a_value_is_held_or_refused_whatever_the_two_dtypes_are(value, old, new):
    assume(old in FLOATS or (isinstance(value, int) and (old != torch.bool or value in (0, 1))))
    value = held(value, old)
    assume(value is not None)
    tensor = torch.tensor([value], dtype=torch.float64 if old in FLOATS else old).to(old)
    batch = BatchedDataDict(x=tensor)
    if old == new or passes(value, old, new):
        assert batch.cast({"x": new})["x"].dtype == new
    else:
        with pytest.raises(BatchSchemaError, match="is not held by"):
            batch.cast({"x": new})
