from collections import Counter

import pytest
from declared_workers import Array

from raycrew.worker_groups import sharded
from raycrew.worker_groups._worker.declared.totals import add_up, average

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def test_sums_and_means_go_place_by_place():
    parts = [
        {"loss": 1.0, "norms": (Array([1, 2]), 3)},
        {"norms": (Array([3, 4]), 5), "loss": 2.0},
    ]
    assert add_up(parts) == {"loss": 3.0, "norms": (Array([4, 6]), 8)}
    assert average(parts) == {"loss": 1.5, "norms": (Array([2.0, 3.0]), 4.0)}
    assert add_up([None, None]) is None
    assert (add_up([1, 2.5]), average([True, False]), add_up([True])) == (3.5, 0.5, 1)
    assert average([np.float64(1), 2.0]) == 1.5


@pytest.mark.hostile
@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_element_types_that_are_too_narrow_are_widened(make):
    library = torch if make is torch.tensor else np
    true, mixed = make(True), make([True, False])
    assert add_up([mixed] * 2).tolist() == [2, 0]
    assert average([mixed] * 2).tolist() == [1.0, 0.0]
    assert average([{"ok": true}] * 2) == {"ok": 1.0}
    small = [make([200], dtype=library.uint8)] * 2
    assert (add_up(small).tolist(), average(small).tolist()) == ([400], [200.0])
    assert add_up([make([2**62])] * 2).dtype == library.int64
    half = average([make([40000.0], dtype=library.float16)] * 2)
    assert (half.tolist(), half.dtype) == ([40000.0], library.float16)
    single = [make([1.5], dtype=library.float32)] * 2
    assert (add_up(single).dtype, average(single).dtype) == (library.float32, library.float32)
    exact = [make([2**24 + 1])] * 2
    assert average(exact).tolist() == [2**24 + 1]


@pytest.mark.hostile
def test_half_precision_comes_back_as_it_went():
    mean = average([torch.tensor([3e38], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)])
    assert mean.dtype == torch.bfloat16
    assert average([np.float16(40000)] * 2) == 40000
    assert add_up([np.uint8(200)] * 2) == 400
    assert add_up([torch.ones(1, dtype=torch.float16)] * 2).dtype == torch.float16
    assert add_up([torch.tensor([1 + 2j])] * 2).tolist() == [2 + 4j]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([torch.ones(3), torch.ones(1)], ValueError, r"different shapes: \[3\] and \[1\]"),
        ([np.ones((2, 2)), np.ones(2)], ValueError, "different shapes"),
        ([torch.ones(3), 1.0], TypeError, "different types: torch.Tensor of torch.float32 and number"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int64)], TypeError, "different types"),
        ([np.ones(1), torch.ones(1)], TypeError, "different types"),
        ([[1], [2]], TypeError, r"they are of type builtins.list, and only numbers and arrays"),
        ([{"a": "x"}, {"a": "y"}], TypeError, r"they\['a'\] are of type builtins.str"),
        ([b"x", b"y"], TypeError, "builtins.bytes"),
        ([Counter(a=1), Counter(a=-1)], TypeError, "Counter"),
        ([np.array(["a"])] * 2, TypeError, "only numbers and arrays"),
        ([1.0, None], TypeError, "different types: number and builtins.NoneType"),
    ],
)
def test_what_has_no_sum_is_refused(parts, error, message):
    for join in (add_up, average):
        with pytest.raises(error, match=message):
            join(parts)


@pytest.mark.hostile
@pytest.mark.parametrize("collect", ["sum", "mean"])
def test_sums_and_means_of_padded_rows_are_refused_at_their_definition(collect):
    with pytest.raises(ValueError, match=f"pad=True with collect='{collect}' would count added rows"):
        sharded("dp", pad=True, collect=collect)


class Bare:
    """An array that can do nothing but be added up and divided."""

    dtype, shape = "float16", [1]

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return Bare(self.value + other.value)

    def __truediv__(self, number):
        return Bare(self.value / number)


def test_arrays_that_can_not_be_cast_are_added_up_as_they_are():
    assert add_up([Bare(1), Bare(2)]).value == 3
    assert average([Bare(1), Bare(2)]).value == 1.5
