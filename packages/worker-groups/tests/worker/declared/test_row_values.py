import pickle
from typing import NamedTuple

import pytest
from declared_workers import Array, Batch

from raycrew.worker_groups._worker.declared.rows import count_rows, cut_rows, join_rows, pad_rows
from raycrew.worker_groups._worker.declared.splitting import split_rows

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


class Pair(NamedTuple):
    ids: list
    mask: Array


@pytest.mark.parametrize(
    "value",
    [
        [0, 1, 2, 3, 4],
        Array([5, 6, 7, 8, 9]),
        Batch("abcde", note="kept"),
        (list("abcde"), Array([0, 1, 2, 3, 4])),
        Pair([1, 2, 3, 4, 5], Array([1] * 5)),
        {"ids": Array([0, 1, 2, 3, 4]), "more": {"text": list("abcde")}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_are_counted_cut_padded_and_joined(value):
    assert count_rows(value, "it") == 5
    parts = [cut_rows(value, 0, 2), cut_rows(value, 2, 2), cut_rows(value, 2, 5)]
    assert [count_rows(part, "it") for part in parts] == [2, 0, 3]
    joined = join_rows(parts)
    assert type(joined) is type(value)
    assert joined == value
    padded = pad_rows(value, 4)
    assert count_rows(padded, "it") == 8
    again = join_rows([value, cut_rows(value, 0, 3)])
    assert padded == again
    assert cut_rows(padded, 0, 5) == value
    assert count_rows(pad_rows(cut_rows(value, 0, 1), 7), "it") == 7


@pytest.mark.hostile
@pytest.mark.parametrize(
    "value",
    [3, None, "abcd", b"abcd", Array(1), {1, 2}, range(4), [1].__iter__()],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_rows_says_so(value):
    with pytest.raises(TypeError, match=r"batch has no rows.*it is "):
        count_rows(value, "batch")
    with pytest.raises(TypeError, match=r"batch\['lr'\] has no rows"):
        count_rows({"ids": [1], "lr": value}, "batch")


@pytest.mark.hostile
def test_places_of_one_argument_have_as_many_rows():
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'x\[0\]': 1, 'x\[1\]': 2\}"):
        count_rows(([1], [1, 2]), "x")
    with pytest.raises(ValueError, match="x has no places"):
        count_rows({}, "x")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[1], Array([1])], "different kinds: list and Array"),
        ([Batch("a"), [1]], "different kinds: Batch and list"),
        ([{"a": [1]}, {"b": [1]}], "different places: dict of 'a' and dict of 'b'"),
        ([([1], [2]), ([1],)], "different places: tuple of 2 and tuple of 1"),
        ([{"loss": 1.0}, {"loss": 2.0}], r"\['loss'\] has no rows"),
        ([Array(1)] * 2, "Array without dimensions"),
    ],
)
def test_what_does_not_belong_together_is_not_joined(parts, message):
    with pytest.raises(TypeError, match=message):
        join_rows(parts)


def test_places_without_a_value_are_joined_as_such():
    assert join_rows([(None, [1]), (None, [2])]) == (None, [1, 2])


@pytest.mark.hostile
def test_masks_are_joined_and_padded_with_their_arrays():
    masked = np.ma.masked_array([1, 2, 3], mask=[True, False, True])
    assert join_rows([masked[:1], masked[1:]]).tolist() == [None, 2, None]
    assert pad_rows(masked, 4).tolist() == [None, 2, None, None]
    with pytest.raises(TypeError, match="different kinds"):
        join_rows([masked, np.array([1])])


@pytest.mark.hostile
def test_tuples_with_names_stay_what_they_are():
    found = torch.tensor([[1, 2], [4, 3]]).max(dim=1)
    joined = join_rows([found, found])
    assert type(joined) is type(found)
    assert joined.values.tolist() == [2, 4, 2, 4]
    assert cut_rows(found, 1, 2).indices.tolist() == [0]

    class Pairs(tuple):
        pass

    with pytest.raises(TypeError, match="Pairs is a kind of tuple that can't be made of other values"):
        count_rows(Pairs(([1], [2])), "it")


@pytest.mark.hostile
def test_a_share_of_a_tensor_is_pickled_without_the_others():
    values = torch.arange(80_000, dtype=torch.float64)
    split = split_rows({"x": (values, {"y": values[:]})}, 8, pad=False, called="Policy.train", axis="dp")
    assert [len(pickle.dumps(part)) < 170_000 for part in split.parts] == [True] * 8
    assert torch.cat([part["x"][1]["y"] for part in split.parts]).equal(values)
    whole = split_rows({"x": values}, 1, pad=False, called="Policy.train", axis="dp").parts[0]["x"]
    assert whole.data_ptr() == values.data_ptr()


@pytest.mark.hostile
def test_tensors_that_are_less_than_they_look_stay_so():
    wide = torch.zeros(1).expand(80_000)
    split = split_rows({"x": wide}, 2, pad=False, called="Policy.train", axis="dp")
    assert [len(pickle.dumps(part["x"])) < 10_000 for part in split.parts] == [True] * 2


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([2**60 + 1]), np.array([0.5])),
        (np.array([2**60 + 1]), np.array([1], np.uint64)),
        (np.array([1]), np.array(["a"])),
        (np.array([1]), np.array([None])),
        (torch.tensor([2**60 + 1]), torch.tensor([0.5])),
        (torch.tensor([True]), torch.tensor([2])),
        (np.array([True]), np.array([2])),
    ],
)
def test_arrays_are_not_joined_where_elements_would_become_others(one, other):
    for parts in ([one, other], [other, one]):
        with pytest.raises(TypeError, match="they are of different element types"):
            join_rows(parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1], np.int32), np.array([2**40])),
        (np.array(["a"]), np.array(["long"])),
        (torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0.1])),
        (np.array([0.5]), np.array([0.1], ">f8")),
        (np.array([2**60 + 1]), np.array([255], np.uint8)),
        (np.array([255], np.uint8), np.array([-1], np.int8)),
        (torch.tensor([2**60 + 1]), torch.tensor([255], dtype=torch.uint8)),
    ],
)
def test_elements_of_another_size_are_joined(one, other):
    joined = join_rows([one, other])
    assert list(joined) == [*one, *other]


@pytest.mark.parametrize("none", [np.array([]), np.array([], bool), np.array([], object)])
def test_parts_without_rows_change_no_elements(none):
    some = np.array([2**60 + 1])
    for parts in ([none, some], [some, none], [none, some, none]):
        joined = join_rows(parts)
        assert (joined.dtype, joined.tolist()) == (some.dtype, [2**60 + 1])
    assert len(join_rows([none, some[:0]])) == 0


class Labelled(np.ndarray):
    """As what is cut by labels, and both ends of these."""

    def __getitem__(self, key):
        found = np.asarray(self)[key]
        return found if not isinstance(key, slice) else np.asarray(self)[key.start : key.stop + 1]


@pytest.mark.hostile
def test_what_is_not_cut_by_positions_is_refused():
    values = {"values": np.arange(6).view(Labelled)}
    with pytest.raises(ValueError, match="step: values: rows 0 to 3 of this Labelled are 4"):
        split_rows(values, 2, pad=False, called="step", axis="dp")
