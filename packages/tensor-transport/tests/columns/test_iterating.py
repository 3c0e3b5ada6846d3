"""Passes over a batch: every row once, in the same order after a resume."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import (
    BatchedDataDict,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    SlicedDataDict,
    TransportTimeoutError,
    localize,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend


def batch_of(size):
    return BatchedDataDict(x=torch.arange(size), y=list(range(size)), metadata={"step": 1})


def rows_of(parts):
    return [part["y"] for part in parts]


def test_rows_in_their_order_are_views():
    batch = batch_of(5)
    parts = list(batch.make_iterator(2))
    assert rows_of(parts) == [[0, 1], [2, 3], [4]]
    assert rows_of(batch.make_iterator(2, drop_last=True, epochs=2)) == [[0, 1], [2, 3]] * 2
    assert parts[1]["x"].data_ptr() == batch["x"][2:].data_ptr()
    assert type(parts[0]) is SlicedDataDict and parts[0].metadata == {"step": 1}


def test_each_pass_has_an_order_of_its_own():
    parts = rows_of(batch_of(40).make_iterator(40, shuffle=True, seed=7, epochs=2))
    assert sorted(parts[0]) == sorted(parts[1]) == list(range(40))
    assert parts[0] != parts[1] != list(range(40))
    assert parts == rows_of(batch_of(40).make_iterator(40, shuffle=True, seed=7, epochs=2))
    assert parts != rows_of(batch_of(40).make_iterator(40, shuffle=True, seed=8, epochs=2))


def test_orders_stay_what_they_were():
    parts = rows_of(batch_of(8).make_iterator(8, shuffle=True, seed=3, epochs=2))
    assert parts == [[0, 4, 7, 1, 5, 6, 3, 2], [0, 6, 2, 1, 3, 7, 4, 5]]


@given(
    size=st.integers(0, 20),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epochs=st.integers(0, 3),
    drop_last=st.booleans(),
    stop=st.integers(0, 30),
)
def test_a_resumed_iterator_goes_on_in_the_same_order(
    size, batch_size, shuffle, seed, epochs, drop_last, stop
):
    arguments = {"shuffle": shuffle, "seed": seed, "epochs": epochs, "drop_last": drop_last}
    whole = rows_of(batch_of(size).make_iterator(batch_size, **arguments))
    first = batch_of(size).make_iterator(batch_size, **arguments)
    assert len(first) == len(whole)
    begun = [next(first)["y"] for _ in range(min(stop, len(whole)))]
    state = json.loads(json.dumps(first.state_dict()))
    rest = batch_of(size).make_iterator(batch_size, **arguments)
    rest.load_state_dict(state)
    assert len(rest) == len(first)
    assert begun + rows_of(rest) == whole or begun + rows_of(first) == whole
    for epoch in range(epochs):
        rows = [
            row for part in whole[epoch * first.steps_per_epoch :][: first.steps_per_epoch] for row in part
        ]
        assert len(set(rows)) == len(rows) == (size // batch_size * batch_size if drop_last else size)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterator_goes_back_to_a_pass_before(shuffle):
    iterator = batch_of(20).make_iterator(5, shuffle=shuffle, epochs=3)
    states, parts = [], []
    for part in iterator:
        parts.append(part["y"])
        states.append(iterator.state_dict())
    for done in (10, 8, 5, 3, 7, 4):
        iterator.load_state_dict(states[done - 1])
        assert rows_of(iterator) == parts[done:]


def test_position_between_and_after_passes():
    iterator = batch_of(4).make_iterator(2, epochs=2)
    next(iterator), next(iterator)
    assert (iterator.epoch, iterator.state_dict()["step"]) == (1, 0)
    next(iterator), next(iterator)
    done = iterator.state_dict()
    assert next(iterator, None) is None and len(iterator) == 0
    again = batch_of(4).make_iterator(2, epochs=2)
    again.load_state_dict(done)
    assert list(again) == []
    further = batch_of(4).make_iterator(2, epochs=3)
    further.load_state_dict(done)
    assert rows_of(further) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("size", [0, 2])
def test_a_pass_of_one_step_or_none_has_no_second_one(size):
    iterator = batch_of(size).make_iterator(2, epochs=2)
    state = iterator.state_dict()
    iterator.load_state_dict(state)
    with pytest.raises(ValueError, match="there is no step 1 of pass 0"):
        iterator.load_state_dict(state | {"step": 1})


def test_as_many_are_to_come_as_it_says():
    iterator = batch_of(7).make_iterator(2, epochs=3)
    lengths = [len(iterator), *(len(iterator) for _ in iterator)]
    assert lengths == list(range(12, -1, -1))


def test_without_end():
    iterator = batch_of(3).make_iterator(2, epochs=None)
    assert rows_of(next(iterator) for _ in range(4)) == [[0, 1], [2], [0, 1], [2]]
    with pytest.raises(TypeError, match="has no length"):
        len(iterator)
    with pytest.raises(ValueError, match="0 rows have no step of 2: it would never end"):
        batch_of(0).make_iterator(2, epochs=None)
    with pytest.raises(ValueError, match="1 rows have no step of 2"):
        batch_of(1).make_iterator(2, epochs=None, drop_last=True)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"size": 9},
        {"batch_size": 3},
        {"shuffle": False},
        {"drop_last": True},
        {"step": 4},
        {"step": 5},
        {"step": -1},
        {"epoch": -1},
        {"epoch": 3},
        {"epoch": 2, "step": 1},
        {"epoch": "1"},
        {"step": True},
        {"more": 1},
    ],
)
def test_positions_elsewhere_are_refused(change):
    iterator = batch_of(8).make_iterator(2, shuffle=True, epochs=2)
    next(iterator)
    before = iterator.state_dict()
    with pytest.raises(ValueError, match=r"position|no step"):
        iterator.load_state_dict(before | change)
    with pytest.raises(ValueError, match="a saved position has"):
        iterator.load_state_dict({})
    for wrong in (None, [1], "state"):
        with pytest.raises(TypeError, match=r"is what state_dict\(\) gave, not a"):
            iterator.load_state_dict(wrong)
    assert iterator.state_dict() == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"batch_size": True},
        {"batch_size": 2, "seed": -1},
        {"batch_size": 2, "seed": 1.0},
        {"batch_size": 2, "epochs": -1},
        {"batch_size": 2, "epochs": 1.5},
    ],
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match="not"):
        batch_of(4).make_iterator(**arguments)


def test_columns_added_later_do_not_disturb_and_handles_are_not_read():
    registry = ShardRegistry(InProcessBackend())
    batch = remotize(batch_of(6), registry)
    iterator = batch.make_iterator(4, shuffle=True)
    batch.pop("x")
    part = next(iterator)
    assert localize(part, registry)["x"].tolist() == part["y"]


def test_a_position_is_plain_whatever_integers_were_given():
    iterator = batch_of(4).make_iterator(np.int64(2), seed=np.uint8(3), epochs=np.int32(2), shuffle=np.True_)
    assert json.loads(json.dumps(iterator.state_dict())) == iterator.state_dict()


class TestOtherRows:
    @staticmethod
    def rows():
        objects = np.empty(40, dtype=object)
        objects[:] = [[i] for i in range(40)]
        return BatchedDataDict(
            ids=torch.arange(80).view(40, 2).bfloat16(),
            text=[{"role": f"user {i}", "ids": torch.tensor([i])} for i in range(40)],
            words=np.array([f"word {i}" for i in range(40)]),
            objects=objects,
            ragged=RaggedTensor(torch.arange(80), [1, 3] * 20),
            packed=PackedTensor([None if i % 3 else torch.full((2, 1), i) for i in range(40)]),
            locks=[object()] * 40,
        )

    def state(self, batch):
        return json.loads(json.dumps(batch.make_iterator(4, shuffle=True).state_dict()))

    def test_the_same_rows_are_told_anywhere(self, tmp_path):
        state = self.state(self.rows())
        assert list(state["columns"]) == ["ids", "text", "words", "objects", "ragged", "packed"]
        assert state["columns"]["words"] == 2023043063
        saved = self.rows()
        del saved["locks"]
        saved.save(tmp_path / "batch")
        registry = ShardRegistry(InProcessBackend())
        more = self.rows().union({"advantage": torch.ones(40)})
        for batch in (BatchedDataDict.load(tmp_path / "batch"), remotize(self.rows(), registry), more):
            batch.make_iterator(4, shuffle=True).load_state_dict(state)
        self.rows().select(["text"]).make_iterator(4, shuffle=True).load_state_dict(state)

    @pytest.mark.hostile
    @pytest.mark.parametrize("key", ["ids", "text", "words", "objects", "ragged", "packed"])
    def test_others_are_refused(self, key):
        state = self.state(self.rows())
        for other in (self.rows()[::-1], self.rows()[[*range(1, 40), 0]]):
            changed = self.rows()
            changed[key] = other[key]
            iterator = changed.make_iterator(4, shuffle=True)
            with pytest.raises(ValueError, match=f"one in other rows: columns {key} differ"):
                iterator.load_state_dict(state)
            assert iterator.state_dict()["step"] == 0

    @pytest.mark.hostile
    @pytest.mark.parametrize("size", [40, 400_000])
    def test_handles_count_by_their_values_wherever_these_lie(self, size):
        def stored(values):
            return remotize(BatchedDataDict(x=values), ShardRegistry(InProcessBackend()))

        values = torch.arange(size * 8).view(size, 8)
        state = self.state(stored(values))
        assert self.state(BatchedDataDict(x=values)) == state == self.state(stored(values.clone()))
        stored(values).make_iterator(4, shuffle=True).load_state_dict(state)
        for other in (values.flip(0), values.double()):
            with pytest.raises(ValueError, match="one in other rows: columns x differ"):
                stored(other).make_iterator(4, shuffle=True).load_state_dict(state)
        elsewhere = BatchedDataDict(x=stored(values)["x"].with_registry(None))
        assert self.state(elsewhere)["columns"] == {}

    @pytest.mark.hostile
    def test_a_loop_that_releases_its_rows_can_save_its_position(self):
        registry = ShardRegistry(InProcessBackend())

        def stored():
            return remotize(BatchedDataDict(x=torch.arange(40), y=list(range(40))), registry)

        batch, other = stored(), stored()
        first, second = batch.make_iterator(4), other.make_iterator(4)
        next(first), next(second)
        assert list(second.state_dict()["columns"]) == ["x", "y"]
        registry.release([*batch["x"].shards, *other["x"].shards])
        assert list(first.state_dict()["columns"]) == ["y"]
        assert list(second.state_dict()["columns"]) == ["x", "y"], "it counts once it was read"
        for state in (first.state_dict(), second.state_dict()):
            again = stored().make_iterator(4)
            again.load_state_dict(json.loads(json.dumps(state)))
            assert next(again)["y"] == [4, 5, 6, 7]

    @pytest.mark.hostile
    def test_rows_that_are_there_and_cannot_be_read_are_an_error(self, monkeypatch):
        backend = InProcessBackend()
        batch = remotize(BatchedDataDict(x=torch.ones(40)), ShardRegistry(backend))

        def fetch(reads, *, timeout_s=None):
            raise TransportTimeoutError("the network is slow")

        monkeypatch.setattr(backend, "fetch", fetch)
        with pytest.raises(TransportTimeoutError, match="the network is slow"):
            batch.make_iterator(4).state_dict()

    @pytest.mark.hostile
    def test_a_batch_without_any_of_the_columns_and_a_state_without_checksums(self):
        state = self.state(self.rows())
        iterator = BatchedDataDict(other=torch.ones(40)).make_iterator(4, shuffle=True)
        with pytest.raises(ValueError, match="no column of theirs"):
            iterator.load_state_dict(state)
        for columns in (None, [], 3):
            with pytest.raises(ValueError, match="has checksums of columns"):
                iterator.load_state_dict(state | {"columns": columns})

    def test_dtypes_count_and_values_that_are_not_there_do_not(self):
        state = self.state(BatchedDataDict(x=torch.arange(4)))
        with pytest.raises(ValueError, match="columns x differ"):
            BatchedDataDict(x=torch.arange(4).int()).make_iterator(4, shuffle=True).load_state_dict(state)
        assert self.state(BatchedDataDict(x=torch.ones(4, device="meta")))["columns"] == {}
        assert self.state(BatchedDataDict())["columns"] == {}
