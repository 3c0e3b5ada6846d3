"""Batches as TensorDicts and back; without the package, an error that names it."""

import sys

import numpy as np
import pytest
import torch
from batches import assert_same

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    TransportError,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    for use in (BatchedDataDict(x=[1]).to_tensordict, lambda: BatchedDataDict.from_tensordict({})):
        with pytest.raises(TransportError, match=r"install raycrew-tensor-transport\[tensordict\]"):
            use()


class Rollouts(BatchedDataDict):
    pass


class TestInstalled:
    @pytest.fixture(autouse=True)
    def tensordict(self):
        return pytest.importorskip("tensordict", reason="tensordict is not installed")

    @pytest.fixture
    def batch(self):
        return Rollouts(
            {
                "ids": torch.arange(6).view(3, 2),
                "half": torch.ones(3).bfloat16(),
                "rows": RaggedTensor(torch.arange(8).view(4, 2), [1, 0, 3]),
                "text": ["a", "a", "a"],
                "chat": [{"role": "user"}, None, [torch.ones(2)]],
                "tensors": [torch.ones(2), torch.zeros(2), torch.ones(2)],
            },
            metadata={"step": 3, "policy": {"a": (1, 2)}, "words": ["x"]},
        )

    @pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 3), slice(0, 0)])
    def test_there_and_back(self, batch, rows):
        batch = batch[rows]
        made = batch.to_tensordict()
        assert made.batch_size == torch.Size([batch.size])
        back = Rollouts.from_tensordict(made)
        assert type(back) is Rollouts
        assert_same(back.select(list(batch)), batch)
        assert list(back) == list(batch)

    def test_tensors_are_not_copied(self, batch):
        made = batch.to_tensordict()
        assert made["ids"].data_ptr() == batch["ids"].data_ptr()
        assert BatchedDataDict.from_tensordict(made)["ids"].data_ptr() == batch["ids"].data_ptr()

    def test_arrays(self):
        made = BatchedDataDict(
            n=np.ones(2, np.float32), w=np.array(["a", "b"]), b=np.ones(2, ">f4")
        ).to_tensordict()
        assert made["n"].dtype == torch.float32
        back = BatchedDataDict.from_tensordict(made)
        assert back["n"].tolist() == back["b"].tolist() == [1, 1] and back["w"] == ["a", "b"]

    @pytest.mark.hostile
    def test_arrays_that_torch_does_not_take_as_they_are(self):
        values = np.arange(4)
        values.flags.writeable = False
        batch = BatchedDataDict(
            turned=np.arange(4)[::-1],
            other=np.arange(8).reshape(4, 2)[:, ::-1],
            fixed=values,
            long=np.arange(4, dtype=np.longdouble),
            none=np.zeros((4, 0))[:, ::-1],
        )
        back = BatchedDataDict.from_tensordict(batch.to_tensordict())
        assert back["turned"].tolist() == [3, 2, 1, 0] and back["other"][0].tolist() == [1, 0]
        assert back["fixed"].tolist() == back["long"] == [0, 1, 2, 3] and back["none"].shape == (4, 0)
        back["fixed"][0] = 7
        assert values[0] == 0

    @pytest.mark.hostile
    def test_lazy_stacks_lose_nothing(self, tensordict):
        def stack(*entries):
            return tensordict.LazyStackedTensorDict(*(tensordict.TensorDict(e, []) for e in entries))

        one, other = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
        assert BatchedDataDict.from_tensordict(stack(one, other))["a"].tolist() == [[1, 1], [0, 0]]
        ragged = BatchedDataDict.from_tensordict(stack(one, {"a": torch.zeros(3)}))["a"]
        assert ragged.lengths.tolist() == [2, 3] and ragged[1].tolist() == [0, 0, 0]
        for wrong, match in (
            (stack(one | {"b": torch.ones(1)}, other), "entry 'b' is not in all of the stacked"),
            (stack(one, other | {"b": torch.ones(1)}), "entry 'b' is not in all of the stacked"),
            (stack({"a": torch.ones(2, 1)}, {"a": torch.ones(2, 2)}), "entry 'a' is no column"),
            (stack({"a": torch.ones(())}, {"a": torch.ones(2)}), "entry 'a' is no column"),
        ):
            with pytest.raises(BatchSchemaError, match=match):
                BatchedDataDict.from_tensordict(wrong)

    def test_one_object_for_all_rows_is_metadata_unless_told(self, tensordict):
        made = tensordict.TensorDict({"x": torch.ones(2)}, batch_size=[2])
        made.set_non_tensor("step", 1)
        made.set_non_tensor("text", "a")
        assert BatchedDataDict.from_tensordict(made).metadata == {"step": 1, "text": "a"}
        told = BatchedDataDict.from_tensordict(made, metadata_keys=["step"])
        assert told.metadata == {"step": 1} and told["text"] == ["a", "a"]
        with pytest.raises(KeyError, match="did you mean 'step'"):
            BatchedDataDict.from_tensordict(made, metadata_keys=["stepp"])
        with pytest.raises(BatchSchemaError, match="'x' has one value per row"):
            BatchedDataDict.from_tensordict(made, metadata_keys=["x"])

    def test_what_a_tensordict_does_not_hold_is_named(self, batch):
        handles = remotize(batch, ShardRegistry(InProcessBackend()))
        for key in ("ids", "rows"):
            with pytest.raises(BatchSchemaError, match=rf"column '{key}' .*localize\(\)"):
                handles.select([key]).to_tensordict()
        with pytest.raises(BatchSchemaError, match=r"column 'p' is a packed.*to_padded\(\)"):
            BatchedDataDict(p=PackedTensor([None])).to_tensordict()
        with pytest.raises(BatchSchemaError, match="metadata 'x' has the name of a column"):
            BatchedDataDict(x=[1], metadata={"x": 1}).to_tensordict()

    def test_what_a_batch_does_not_hold_is_named(self, tensordict):
        inner = tensordict.TensorDict({"b": torch.ones(2)}, batch_size=[2])
        with pytest.raises(BatchSchemaError, match=r"entry 'a' is a TensorDict in another: flatten_keys"):
            BatchedDataDict.from_tensordict(tensordict.TensorDict({"a": inner}, batch_size=[2]))
        with pytest.raises(BatchSchemaError, match="without a batch dimension"):
            BatchedDataDict.from_tensordict(tensordict.TensorDict({"a": torch.ones(2)}, batch_size=[]))
        with pytest.raises(TypeError, match="a TensorDict is needed, not a dict"):
            BatchedDataDict.from_tensordict({"a": 1})
