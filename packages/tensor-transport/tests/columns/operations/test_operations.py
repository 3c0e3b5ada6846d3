"""Every operation of a batch on every kind of column: the right rows, and what else has to survive.

A column is compared as a list of rows with what a plain list would give.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from batches import read_only_copy, same

from raycrew.tensor_transport import (
    BatchedDataDict,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    localize,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend

ROWS, WIDTH = 6, 4
LENGTHS = [3, 1, 4, 2, 4, 1]
METADATA = {"step": 3, "policy": torch.ones(2, dtype=torch.bfloat16)}


def numbered(*shape, dtype=torch.bfloat16):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


COLUMNS = {
    "tensor": lambda: numbered(ROWS, WIDTH),
    "float8": lambda: numbered(ROWS, WIDTH, 2).to(torch.float8_e5m2),
    "not contiguous": lambda: numbered(WIDTH, ROWS).T,
    "one dimension": lambda: numbered(ROWS, dtype=torch.int32),
    "bool": lambda: numbered(ROWS, WIDTH, dtype=torch.int64) % 3 == 0,
    "ragged": lambda: RaggedTensor(numbered(sum(LENGTHS), 2), LENGTHS),
    "packed": lambda: PackedTensor(
        [None if i == 1 else numbered(2, n) + i for i, n in enumerate(LENGTHS)], dim_to_pack=1
    ),
    "segments": lambda: PackedTensor(
        [None if i == 1 else [numbered(n, 2) + i, numbered(1, 2)][: 1 + i % 2] for i, n in enumerate(LENGTHS)]
    ),
    "list": lambda: [{"id": i, "ids": torch.tensor([i], dtype=torch.int16)} for i in range(ROWS)],
    "array": lambda: np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2),
    "words": lambda: np.array([f"row {i}" for i in range(ROWS)]),
    "objects": lambda: np.array([None, "a", 2, 3.0, (4,), [5]], dtype=object),
}


def batch_with(kind):
    return BatchedDataDict(
        {
            "x": COLUMNS[kind](),
            "mask": torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool),
            "lengths": LENGTHS,
        },
        metadata=METADATA,
    )


def received(batch):
    """As a reader has it: over memory that others read too."""
    buffers = []
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[read_only_copy(buffer) for buffer in buffers])


REGISTRY = ShardRegistry(InProcessBackend())
PLACES = {
    "here": (lambda batch: batch, lambda batch: batch),
    "received": (received, lambda batch: batch),
    "handles": (
        lambda batch: remotize(batch, REGISTRY),
        lambda batch: localize(pickle.loads(pickle.dumps(batch)), REGISTRY),
    ),
}


def rows_of(column):
    return [column[i] for i in range(len(column))]


def joined(parts):
    return BatchedDataDict.concat(list(parts))


def planned(batch, **arguments):
    arguments = {
        key: value | {"input_key": "x", "input_lengths_key": "lengths"} for key, value in arguments.items()
    }
    parts, order = batch.shard_by_batch_size(2, **arguments)
    return joined(parts).reorder_data(order)


def microbatches(batch, iterate, count):
    """The one shard's microbatches, joined, in the order of the batch again."""
    budget = {"max_tokens_per_microbatch": 8, "input_key": "x", "input_lengths_key": "lengths"}
    packed = "packable" in iterate
    (part,), order = batch.shard_by_batch_size(
        1, **{"sequence_packing_args" if packed else "dynamic_batching_args": budget}
    )
    part = part.get_batch(0, batch.size)
    found = list(getattr(part, iterate)(*(() if packed else (1, []))))
    length = getattr(part, count)()
    assert len(found) == (length[0] if packed else length) > 1
    return joined(found).reorder_data(order)


EVERY = list(range(ROWS))
SAME = {
    "copy": lambda b: b.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "writable": lambda b: b.writable(),
    "to": lambda b: b.to("cpu"),
    "to_device": lambda b: b.to_device("cpu"),
    "encode": lambda b: type(b).decode(b.encode().header, b.encode().buffers, allow_pickle=True),
    "shard": lambda b: joined(b.shard(4)),
    "chunk": lambda b: joined(b.chunk(i, 3) for i in range(3)),
    "even": lambda b: joined(b.shard_by_batch_size(3).shards),
    "uneven": lambda b: joined(b.shard_by_batch_size(4, allow_uneven_shards=True).shards),
    "dynamic": lambda b: planned(b, dynamic_batching_args={"max_tokens_per_microbatch": 9}),
    "packing": lambda b: planned(b, sequence_packing_args={"max_tokens_per_microbatch": 5}),
    "microbatches": lambda b: joined(b.make_microbatch_iterator(2)),
    "dynamic microbatches": lambda b: microbatches(
        b, "make_microbatch_iterator_with_dynamic_shapes", "get_microbatch_iterator_dynamic_shapes_len"
    ),
    "packable microbatches": lambda b: microbatches(
        b,
        "make_microbatch_iterator_for_packable_sequences",
        "get_microbatch_iterator_for_packable_sequences_len",
    ),
    "reorder there and back": lambda b: b.select_indices([3, 1, 5, 0, 2, 4]).reorder_data([3, 1, 5, 0, 2, 4]),
    "truncate to more": lambda b: b.copy().truncate_tensors(1, WIDTH),
    "get_dict": lambda b: BatchedDataDict(b.get_dict(), metadata=b.metadata),
    "from_dict": lambda b: BatchedDataDict.from_dict(
        b.get_dict() | b.metadata, metadata_keys=[k for k in b.metadata if k not in ("step", "none")]
    ),
    "all rows": lambda b: b[:],
    "order there and back": lambda b: b.apply_order([3, 1, 5, 0, 2, 4]).undo_order([3, 1, 5, 0, 2, 4]),
    "order back and there": lambda b: b.undo_order([3, 1, 5, 0, 2, 4]).apply_order([3, 1, 5, 0, 2, 4]),
    "pad there and back": lambda b: b.pad_to_divisor(4)[0].unpad(),
    "pad twice and back": lambda b: b.pad_to_divisor(4)[0].pad_to_divisor(5)[0].unpad(),
    "pad and drop": lambda b: b.pad_to_divisor(4)[0].unpad(2),
    "rename there and back": lambda b: b.rename({"x": "mask", "mask": "x"}).rename(
        {"x": "mask", "mask": "x"}
    ),
    "pop and union": lambda b: (lambda whole: whole.pop(["x"]).union(whole))(b.copy()),
    "union with itself": lambda b: b.union(b.copy()),
    "select": lambda b: b.select(["x", "mask"]),
}
OTHERS = {
    "slice": (lambda b: b.slice(1, 4), [1, 2, 3]),
    "nothing": (lambda b: b.slice(2, 2), []),
    "numbers": (lambda b: b.select_indices([5, -6, 5]), [5, 0, 5]),
    "tensor of numbers": (lambda b: b.select_indices(torch.tensor([4, 0])), [4, 0]),
    "mask": (lambda b: b.select_indices([True, False, True, True, False, False]), [0, 2, 3]),
    "range": (lambda b: b.select_indices(range(5, 0, -2)), [5, 3, 1]),
    "reorder": (lambda b: b.copy().reorder_data([1, 2, 3, 4, 5, 0]), [5, 0, 1, 2, 3, 4]),
    "rows": (lambda b: b[[2, 0]], [2, 0]),
    "rows by mask": (lambda b: b[np.array([1, 0, 1, 0, 0, 1], dtype=bool)], [0, 2, 5]),
    "order": (lambda b: b.apply_order([1, 2, 3, 4, 5, 0]), [1, 2, 3, 4, 5, 0]),
    "undo": (lambda b: b.undo_order([1, 2, 3, 4, 5, 0]), [5, 0, 1, 2, 3, 4]),
    "pad": (lambda b: b.pad_to_divisor(4)[0], [*EVERY, 0, 1]),
    "pad to far more": (lambda b: b.slice(0, 2).pad_to_divisor(5)[0], [0, 1, 0, 1, 0]),
    "unpad": (lambda b: b.unpad(2), [0, 1, 2, 3]),
    "repeat": (lambda b: b.repeat_interleave(2), [i for i in EVERY for _ in range(2)]),
    "repeat sharing": (
        lambda b: b.repeat_interleave(2, share=["x"]),
        [i for i in EVERY for _ in range(2)],
    ),
    "get_batch": (lambda b: b.get_batch(1, 3), [3, 4, 5]),
    "global batches": (
        lambda b: BatchedDataDict.concat(b.shard_by_batch_size(2, batch_size=2)),
        [0, 2, 4, 1, 3, 5],
    ),
    "from_batches": (lambda b: BatchedDataDict.from_batches([b, b.slice(4, 6)]), [*EVERY, 4, 5]),
}
OPERATIONS = {name: (operation, EVERY) for name, operation in SAME.items()} | OTHERS


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", COLUMNS)
def test_every_operation_on_every_kind(kind, place):
    arrive, look = PLACES[place]
    rows, mask = rows_of(COLUMNS[kind]()), batch_with(kind)["mask"]
    for name, (operation, wanted) in OPERATIONS.items():
        if kind in ("one dimension", "words", "objects") and "dynamic" in name:
            continue  # There is no length to be padded to.
        found = look(operation(arrive(batch_with(kind))))
        told = f"{name} of {kind}, {place}"
        assert type(found["x"]) is type(COLUMNS[kind]()), told
        assert same(rows_of(found["x"]), [rows[i] for i in wanted]), told
        assert same(found["mask"], mask[wanted]), told
        assert found.size == len(wanted), told
        assert same(found.metadata, METADATA), told
        if isinstance(found["x"], torch.Tensor | np.ndarray | RaggedTensor):
            assert found["x"].dtype == COLUMNS[kind]().dtype, told


@pytest.mark.parametrize("kind", COLUMNS)
def test_another_number_of_rows_is_refused_for_every_kind(kind):
    batch = BatchedDataDict(y=[0] * (ROWS + 1))
    for insert in (batch.__setitem__, batch.setdefault, lambda key, column: batch.update({key: column})):
        with pytest.raises(ValueError, match=f"column 'x' has {ROWS} rows, the batch has {ROWS + 1}"):
            insert("x", COLUMNS[kind]())
    assert list(batch) == ["y"]


@pytest.mark.parametrize(
    ("kind", "length"), [("tensor", 2), ("bool", 2), ("float8", 2), ("ragged", 2), ("array", 1)]
)
def test_truncated_rows_keep_their_dtype(kind, length):
    for arrive, look in PLACES.values():
        found = look(arrive(batch_with(kind)).truncate_tensors(1, length))
        assert same(rows_of(found["x"]), [row[:length] for row in rows_of(COLUMNS[kind]())])
        assert same(found.metadata, METADATA)
        with pytest.raises(KeyError, match="there are no columns y; there are lengths, mask, x"):
            found.truncate_tensors(1, length, keys=["x", "y"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_dtypes_and_joins_what_needs_none(side):
    for kind in COLUMNS:
        if kind == "one dimension":
            continue
        batch, narrow = batch_with(kind), batch_with(kind)
        if isinstance(batch["x"], torch.Tensor):
            narrow["x"] = narrow["x"][:, :1]
        found = BatchedDataDict.from_batches([narrow, batch], {"x": 1}, pad_side={"x": side})
        assert type(found["x"]) is type(batch["x"]) and found.size == 2 * ROWS
        assert same(rows_of(found["x"])[ROWS:], rows_of(batch["x"]))
        if isinstance(batch["x"], torch.Tensor):
            own, padding = slice(0, 1), slice(1, WIDTH)
            if side == "left":
                own, padding = slice(WIDTH - 1, WIDTH), slice(0, WIDTH - 1)
            assert found["x"].dtype == batch["x"].dtype
            assert same(found["x"][:ROWS, own].clone(), narrow["x"].clone())
            assert found["x"][:ROWS, padding].float().eq(1).all()
        assert same(found.metadata, METADATA)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("place", ["here", "received"])
def test_every_operation_on_a_device(device, place):
    """On `meta` there are only shapes, dtypes and devices; what is on a device stays there."""
    for kind in ("tensor", "float8", "bool", "ragged", "packed"):
        for name in ("slice", "numbers", "tensor of numbers", "range", "reorder", "repeat", "shard", "even"):
            operation, wanted = OPERATIONS[name]
            here = operation(batch_with(kind))
            there = operation(PLACES[place][0](batch_with(kind)).to(device))
            told = f"{name} of {kind}"
            tensors = [t for t in there["x"] if t is not None] if kind == "packed" else [there["x"]]
            assert {tensor.device.type for tensor in tensors} == {device}, told
            assert there["mask"].device.type == device and same(there.metadata, METADATA), told
            assert there.size == here.size == len(wanted), told
            if device == "meta":
                assert (kind == "packed") or there["x"].dtype == here["x"].dtype, told
            else:
                assert same(there.to("cpu")["x"], here["x"]), told
