"""Batches saved and loaded: whole or not at all, and nothing hostile gets in."""

import json
import math
import os
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from batches import assert_same, same

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    DecodeError,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    UnsupportedTensorError,
    remotize,
)
from raycrew.tensor_transport._columns.encoding.frame import decode_columns, encode_columns
from raycrew.tensor_transport._columns.kinds import bare
from raycrew.tensor_transport.testing import InProcessBackend


class Rollouts(BatchedDataDict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = True


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def everything():
    objects = np.empty((3,), dtype=object)
    objects[:] = [None, [1, (2, 3)], {"a": np.float32(0.5)}]
    image = torch.arange(4.0).view(2, 2)
    batch = Rollouts(
        {
            "ids": torch.arange(6).view(3, 2),
            "half": torch.linspace(-1, 1, 6).view(3, 2).bfloat16(),
            "fnuz": torch.ones(3).to(torch.float8_e4m3fnuz),
            "turned": torch.arange(6.0).view(2, 3).T,
            "ragged": RaggedTensor(torch.arange(4).int(), [2, 0, 2]),
            "ragged/lengths": torch.tensor([1, 2, 3]),
            "packed": PackedTensor([image, None, image[:1]]),
            "nothing": PackedTensor([None, None, None]),
            "words": np.array(["a", "bcd", "ö"]),
            "times": np.array([1, 2, 3], dtype="datetime64[s]"),
            "big": np.array([1.5, 2.5, -1.0], dtype=">f4"),
            "objects": objects,
            "chat": [
                [{"role": "user", "ids": torch.tensor([1, 2])}],
                [{"role": "user", "$": 1, 3: "x", "seen": (1, None)}],
                [math.nan, math.inf, 1j, b"\x00\xff", 2**70, True, "\ud800"],
            ],
            "__metadata__": [1, 2, 3],
            "raycrew/json": torch.ones(3),
            "": torch.zeros(3, 0),
        },
        metadata={"step": 3, "policy": torch.tensor(2.5), "np": np.arange(2), "n": np.int8(3), "e": {}},
    )
    batch.tokenizer = ("words", 1)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 3]]], [[2]]
    return batch


@pytest.mark.parametrize("columns", [{"t": torch.ones(2)}, {"t": torch.ones(2), "o": ["a", {"b": 1}]}])
@pytest.mark.parametrize("attributes", [{}, {"made": True}])
def test_objects_and_attributes_are_pickled_if_there_are_any(columns, attributes):
    header, buffers = encode_columns(columns, 2, attributes)
    assert bool(json.loads(header)["pickled"]) == ("o" in columns or bool(attributes))
    found, others = decode_columns(header, buffers, allow_pickle=True)
    assert found.keys() == columns.keys() and others == attributes
    assert all(same(bare(found[key]), column) for key, column in columns.items())


@pytest.mark.hostile
def test_a_column_does_not_take_the_bytes_of_another():
    header, buffers = encode_columns({"a": torch.ones(2), "b": torch.zeros(2)}, 2, {})
    for which, change, match in ((1, 1, "'b' names bytes that are not there"), (0, 2, "'a' names bytes")):
        fields = json.loads(header)
        fields["columns"][which][3] += change
        with pytest.raises(DecodeError, match=match):
            decode_columns(json.dumps(fields).encode(), buffers, allow_pickle=True)
    fields = json.loads(header)
    fields["columns"].pop()
    with pytest.raises(DecodeError, match="1 runs of bytes belong to no column"):
        decode_columns(json.dumps(fields).encode(), buffers, allow_pickle=True)


@pytest.mark.hostile
@pytest.mark.parametrize(("place", "told"), [(0, "other"), (1, "array"), (1, "none such")])
def test_a_column_of_objects_is_the_one_that_is_named(place, told):
    header, buffers = encode_columns({"o": ["a", "b"]}, 2, {})
    fields = json.loads(header)
    fields["columns"][0][place] = told
    with pytest.raises(DecodeError, match=r"among the pickled objects|of unknown kind 'none such'"):
        decode_columns(json.dumps(fields).encode(), buffers, allow_pickle=True)


class TestRoundTrip:
    def test_every_kind_of_column(self, tmp_path):
        batch = everything()
        batch.save(tmp_path / "batch")
        back = Rollouts.load(str(tmp_path / "batch"))
        assert type(back) is Rollouts
        assert_same(back, batch)
        assert {k: v for k, v in vars(back).items() if k not in ("_columns", "metadata")} == {
            "made": True,
            "tokenizer": ("words", 1),
            "micro_batch_indices": [[[0, 3]]],
            "micro_batch_lengths": [[2]],
        }
        assert names_in(tmp_path) == ["batch"]

    @pytest.mark.parametrize("rows", [slice(0, 0), slice(1, 2)])
    def test_of_no_row_and_of_one(self, tmp_path, rows):
        batch = everything()[rows]
        batch.save(tmp_path / "batch")
        assert_same(BatchedDataDict.load(tmp_path / "batch"), batch)

    def test_without_columns(self, tmp_path):
        BatchedDataDict(metadata={"a": 1}).save(tmp_path / "batch")
        assert BatchedDataDict.load(tmp_path / "batch").metadata == {"a": 1}

    def test_what_is_loaded_may_be_written_to(self, tmp_path):
        everything().save(tmp_path / "batch")
        back = BatchedDataDict.load(tmp_path / "batch")
        back["ids"] += 1
        back["packed"][0].zero_()
        back["words"][0] = "z"
        assert same(back["packed"][2], torch.tensor([[0.0, 1.0]]))
        assert BatchedDataDict.load(tmp_path / "batch")["ids"].sum() == 15

    def test_other_readers_of_the_format_find_the_tensors(self, tmp_path):
        batch = BatchedDataDict(
            ids=torch.arange(3).bfloat16(),
            r=RaggedTensor(torch.arange(2), [2, 0, 0]),
            a=np.ones(3),
            w=["a", "b", "c"],
        )
        batch.save(tmp_path / "batch")
        found = safetensors.torch.load_file(tmp_path / "batch")
        assert same(found["ids"], batch["ids"])
        assert found["r"].tolist() == [0, 1] and found["r/lengths"].tolist() == [2, 0, 0]
        assert found["a"].dtype == torch.float64
        text = found["raycrew/json"].numpy().tobytes()
        assert json.loads(text)["columns"][3] == ["w", "list", ["a", "b", "c"], None]

    def test_a_received_batch_and_a_slice(self, tmp_path):
        import pickle

        batch = pickle.loads(pickle.dumps(everything()))[1:]
        batch.save(tmp_path / "batch")
        assert_same(BatchedDataDict.load(tmp_path / "batch"), batch)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"x": [object()] * 3}, r"column 'x'\[0\] is a builtins.object, which can't be saved"),
            ({"x": [{"a": {1}}] * 3}, r"column 'x'\[0\]\['a'\] is a builtins.set"),
            ({"x": [[torch.ones(1).to_sparse()]] * 3}, "sparse|layout"),
            ({"x": np.array([1, 2, len], dtype=object)}, r"column 'x'\[2\] is a builtins.builtin"),
            (
                {"x": np.array(["a", "b", "c"], dtype=np.dtypes.StringDType())},
                r"column 'x' .* StringDType\(\)",
            ),
            (
                {"x": [np.array(["a"], dtype=np.dtypes.StringDType())] * 3},
                r"column 'x'\[0\] .* StringDType\(\)",
            ),
            ({"x": np.zeros(3, dtype=[("a", "i4"), ("b", "O")])}, r"column 'x' is an array of \[\('a'"),
            ({"x": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])}, r"column 'x' is an array of \[\('a'"),
        ],
    )
    def test_columns(self, tmp_path, change, match):
        batch = everything()
        batch.save(tmp_path / "batch")
        batch.update(change)
        with pytest.raises((BatchSchemaError, UnsupportedTensorError), match=match):
            batch.save(tmp_path / "batch")
        assert_same(BatchedDataDict.load(tmp_path / "batch"), everything())
        assert names_in(tmp_path) == ["batch"]

    def test_handles(self, tmp_path):
        registry = ShardRegistry(InProcessBackend())
        handles = remotize(everything().select(["ids", "ragged", "packed"]), registry)
        for key in handles:
            with pytest.raises(BatchSchemaError, match=rf"column '{key}' .*localize\(\)"):
                handles.select([key]).save(tmp_path / "batch")
        with pytest.raises(BatchSchemaError, match="localize"):
            BatchedDataDict(x=[handles["ids"]]).save(tmp_path / "batch")
        assert names_in(tmp_path) == []

    def test_metadata_and_what_contains_itself(self, tmp_path):
        with pytest.raises(BatchSchemaError, match=r"the batch\['metadata'\]\['f'\] is a builtins"):
            BatchedDataDict(metadata={"f": len}).save(tmp_path / "batch")
        loop = []
        loop.append(loop)
        with pytest.raises(BatchSchemaError, match="can't be saved as JSON"):
            BatchedDataDict(metadata={"f": loop}).save(tmp_path / "batch")

    def test_a_failed_write_leaves_what_was_there(self, tmp_path, monkeypatch):
        everything().save(tmp_path / "batch")

        def full(fd):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            BatchedDataDict(x=[1]).save(tmp_path / "batch")
        assert names_in(tmp_path) == ["batch"]
        assert_same(BatchedDataDict.load(tmp_path / "batch"), everything())

    def test_what_is_no_file_stays(self, tmp_path):
        os.mkfifo(pipe := tmp_path / "pipe")
        for special in (pipe, tmp_path, "/dev/full"):
            with pytest.raises(ValueError, match=f"'{special}' is no regular file: name a file"):
                BatchedDataDict(x=[1]).save(special)
        assert pipe.is_fifo() and names_in(tmp_path) == ["pipe"]

    def test_a_link_leads_to_what_is_written(self, tmp_path):
        (link := tmp_path / "link").symlink_to(tmp_path / "batch")
        BatchedDataDict(x=[1]).save(link)
        assert link.is_symlink() and BatchedDataDict.load(tmp_path / "batch")["x"] == [1]

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            BatchedDataDict(x=[1]).save(tmp_path / "none" / "batch")
        with pytest.raises(FileNotFoundError):
            BatchedDataDict.load(tmp_path / "none")


def rewritten(path, change):
    """The saved file with its JSON changed."""
    tensors = safetensors.torch.load_file(path)
    fields = json.loads(tensors["raycrew/json"].numpy().tobytes())
    text = change(fields)
    text = text if isinstance(text, bytes) else json.dumps(fields).encode()
    tensors["raycrew/json"] = torch.tensor(list(text), dtype=torch.uint8)
    safetensors.torch.save_file(tensors, path)


def put(*path_and_value):
    def change(fields):
        *path, last, value = path_and_value
        for step in path:
            fields = fields[step]
        fields[last] = value

    return change


TENSOR = {"$": "rows", "kind": "tensor", "of": ["int64", [1]], "runs": 1, "flat": False}
CHANGES = {
    "format": put("format", "raycrew.batch/9"),
    "no JSON": lambda fields: b"{",
    "no object": lambda fields: b"[]",
    "deep": lambda fields: b"[" * 100_000,
    "digits": lambda fields: b'{"rows": ' + b"9" * 5000 + b"}",
    "rows": put("rows", 4),
    "text for rows": put("rows", "3"),
    "shape": put("columns", 0, 2, ["int64", [2**62, 4]]),
    "negative shape": put("columns", 0, 2, ["int64", [-1, 2]]),
    "no rows of anything": put("columns", 0, 2, ["int64", [0, 2**62, 2**62]]),
    "dtype": put("columns", 0, 2, ["float128x", [3, 2]]),
    "objects as dtype": put("columns", 1, 2, ["|O", [3]]),
    "handle": put("columns", 0, 1, "handle"),
    "unknown kind": put("columns", 0, 1, "pickle"),
    "another kind": put("columns", 0, 1, "list"),
    "key": put("columns", 0, 0, 3),
    "twice": lambda fields: fields["columns"].append(fields["columns"][0]),
    "other bytes": put("columns", 0, 3, ["none"]),
    "bytes of another": put("columns", 0, 3, ["a"]),
    "unhashable": put("columns", 0, 3, [[]]),
    "too many": put("columns", 2, 3, 10**18),
    "less than none": put("columns", 2, 3, -1),
    "slot": put("slots", 0, [0, 0, 2**40]),
    "negative slot": put("slots", 0, [0, -64, 8]),
    "slots left": lambda fields: fields["slots"].append([0, 0, 1]),
    "column left": lambda fields: fields["columns"].pop(0),
    "unknown value": put("attributes", "metadata", {"$": "pickle", "of": "x"}),
    "no bytes": put("attributes", "metadata", {"a": {"$": "bytes", "of": "zz"}}),
    "no run": put("attributes", "metadata", {"a": TENSOR}),
    "no pair": put("attributes", "metadata", {"a": {"$": "dict", "of": [1]}}),
    "unhashable pair": put("attributes", "metadata", {"a": {"$": "dict", "of": [[[], 1]]}}),
    "no number": put("attributes", "metadata", {"a": {"$": "complex", "of": ["a", 1]}}),
    "no metadata": put("attributes", {}),
    "metadata of another kind": put("attributes", "metadata", []),
    "attributes of another kind": put("attributes", []),
    "a method's name": put("attributes", "select", 1),
    "a property's name": put("attributes", "size", 10**9),
    "a class": put("attributes", "__class__", "x"),
}


@pytest.mark.hostile
class TestHostile:
    @pytest.fixture
    def path(self, tmp_path):
        batch = BatchedDataDict(
            ids=torch.arange(6).view(3, 2), a=np.ones(3), p=PackedTensor([torch.ones(1), None, None])
        )
        batch.save(tmp_path / "batch")
        return tmp_path / "batch"

    @pytest.mark.parametrize("name", CHANGES)
    def test_json(self, path, name):
        rewritten(path, lambda fields: None)
        assert BatchedDataDict.load(path).size == 3
        rewritten(path, CHANGES[name])
        with pytest.raises(DecodeError, match="batch"):
            BatchedDataDict.load(path)

    def test_every_truncation(self, path):
        whole = path.read_bytes()
        for length in [*range(40), *range(40, len(whole), 37), len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(DecodeError):
                BatchedDataDict.load(path)
        path.write_bytes(whole + b"x")
        with pytest.raises(DecodeError, match="bytes, and its header names"):
            BatchedDataDict.load(path)

    @pytest.mark.parametrize(
        "start",
        [struct.pack("<Q", 2**63), struct.pack("<Q", 2**20), struct.pack("<Q", 2) + b"[]", b"PK\x03\x04"],
    )
    def test_headers(self, path, start):
        path.write_bytes(start + b" " * 100)
        with pytest.raises(DecodeError):
            BatchedDataDict.load(path)

    def test_what_is_no_file(self, path, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for name in ("pipe", "."):
            with pytest.raises(DecodeError, match="is no file"):
                BatchedDataDict.load(tmp_path / name)

    def test_a_file_of_another_program(self, path):
        safetensors.torch.save_file({"x": torch.ones(3)}, path)
        with pytest.raises(DecodeError, match="it is no saved batch"):
            BatchedDataDict.load(path)


def test_columns_alone_are_decoded_and_a_wrong_number_of_rows_is_told():
    header, buffers = encode_columns({"ids": torch.arange(3)}, 3, {})
    columns, attributes = decode_columns(header, buffers, allow_pickle=False)
    assert columns["ids"].tolist() == [0, 1, 2] and attributes == {}
    for rows in (2, 4):
        changed = json.dumps({**json.loads(header), "rows": rows}).encode()
        with pytest.raises(DecodeError, match=f"column 'ids' has 3 rows, the batch {rows}"):
            decode_columns(changed, buffers, allow_pickle=False)


@pytest.mark.hostile
@pytest.mark.parametrize(
    "change", [{"rows": -1}, {"pickled": -1}, {"pickled": 3}, {"columns": [["x", "tensor", None, -1]]}]
)
def test_numbers_that_make_no_sense_are_refused(change):
    header, buffers = encode_columns({}, 0, {})
    assert decode_columns(header, buffers, allow_pickle=False) == ({}, {})
    changed = json.dumps({**json.loads(header), **change}).encode()
    with pytest.raises(DecodeError, match=r"make sense|describe"):
        decode_columns(changed, buffers, allow_pickle=True)


@pytest.mark.hostile
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_what_is_replaced_is_for_those_it_was_for(tmp_path, mode, monkeypatch):
    path, link = tmp_path / "batch", tmp_path / "link"
    path.touch()
    path.chmod(mode)
    link.symlink_to(path)
    seen, fsync = [], os.fsync

    def look(fd):
        seen.extend(file.stat().st_mode & 0o777 for file in tmp_path.glob(".*.partial"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", look)
    BatchedDataDict(x=[1]).save(link)
    assert seen == [mode] and path.stat().st_mode & 0o777 == mode
    assert BatchedDataDict.load(path)["x"] == [1]


@pytest.mark.hostile
@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_is_for_those_whom_the_umask_lets(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        BatchedDataDict(x=[1]).save(tmp_path / "batch")
    finally:
        os.umask(before)
    assert (tmp_path / "batch").stat().st_mode & 0o777 == mode
