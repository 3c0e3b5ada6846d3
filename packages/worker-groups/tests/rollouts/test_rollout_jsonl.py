"""A file in which each prompt has one line, whoever was killed while it was written."""

import json
import os
import signal

import pytest

from raycrew.worker_groups.rollouts import RolloutFailure, RolloutFileError
from raycrew.worker_groups.rollouts._delivery.jsonl import JsonLines, line_of


def add(lines, *prompts):
    for prompt in prompts:
        lines.add(prompt, line_of(prompt, [f'"of {prompt}"'], {}))


def ids_in(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def opened(path, *, is_synced=False):
    return JsonLines(path, is_synced=is_synced)


def test_a_line_has_samples_in_order_and_says_which_failed():
    line = line_of('a "b"\n', ["1", "", "[2]"], {1: RolloutFailure("late", "too\nlate", 2)})
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    failures = {"1": {"kind": "late", "message": "too\nlate", "attempts": 2}}
    assert json.loads(line) == {"id": 'a "b"\n', "samples": [1, None, [2]], "failures": failures}
    assert json.loads(line_of("c", [], {})) == {"id": "c", "samples": []}


@pytest.mark.parametrize("is_synced", [False, True])
def test_each_prompt_has_one_line_whoever_adds_it_again(tmp_path, is_synced):
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        lines = opened(path, is_synced=is_synced)
        add(lines, "a", "b", "a")
        lines.close()
        lines.close()
    assert ids_in(path) == ["a", "b"]


def test_a_last_line_that_is_cut_anywhere_is_written_again_and_no_other(tmp_path):
    whole = tmp_path / "whole.jsonl"
    lines = opened(whole)
    add(lines, "a", "bb", "ccc")
    lines.close()
    data = whole.read_bytes()
    for size in range(len(data) + 1):
        path = tmp_path / f"{size}.jsonl"
        path.write_bytes(data[:size])
        lines = opened(path)
        n = data[: size + 1].count(b"\n")  # a line that only lacks its end is there
        assert lines.ids == set(["a", "bb", "ccc"][:n])
        add(lines, "a", "bb", "ccc")
        lines.close()
        assert path.read_bytes() == data


def test_a_long_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of("a", [], {}) + b'{"id":"b' + b"x" * 200_000)
    lines = opened(path)
    assert lines.ids == {"a"} and path.stat().st_size == len(line_of("a", [], {}))
    lines.close()


def test_a_file_is_one_collections_at_a_time(tmp_path):
    lines = opened(tmp_path / "out.jsonl")
    with pytest.raises(RolloutFileError, match="in use"):
        opened(tmp_path / "out.jsonl")
    lines.close()
    opened(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize("line", [b"no JSON\n", b"[1]\n", b'{"x": 1}\n', b'{"id": 7}\n', b"\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of("a", [], {}) + line)
    with pytest.raises(RolloutFileError, match="line 2"):
        opened(path)
    assert path.read_bytes() == line_of("a", [], {}) + line
    path.write_bytes(b"")
    opened(path).close()  # it is not locked any more


@pytest.mark.parametrize("content", [b'{"config": 1}', b"a text", b"[1]", b'{"id": 7}', b"\x80\x05K"])
def test_a_file_of_something_else_without_an_end_of_line_is_left_alone_too(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(RolloutFileError, match="line 1"):
        opened(path)
    assert path.read_bytes() == content


def test_what_a_failing_disk_left_in_place_of_a_line_goes(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of("a", [], {}) + bytes(100))
    lines = opened(path)
    add(lines, "b")
    lines.close()
    assert ids_in(path) == ["a", "b"]


def test_a_forked_child_does_not_keep_the_file(tmp_path):
    lines = opened(tmp_path / "out.jsonl")
    alive, told = os.pipe()
    if not (child := os.fork()):
        os.write(told, b".")
        signal.pause()
    try:
        assert os.read(alive, 1)
        lines.close()
        opened(tmp_path / "out.jsonl").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(alive)
        os.close(told)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_ends_early_leaves_nothing_and_may_be_made_again(tmp_path, monkeypatch, error):
    write = os.pwrite

    def broken_off(descriptor, data, offset):
        write(descriptor, bytes(data[:3]), offset)
        raise error

    lines = opened(tmp_path / "out.jsonl")
    add(lines, "a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", broken_off)
        with pytest.raises(RolloutFileError if isinstance(error, OSError) else KeyboardInterrupt):
            add(lines, "b")
    assert ids_in(tmp_path / "out.jsonl") == ["a"]
    add(lines, "b")
    lines.close()
    assert ids_in(tmp_path / "out.jsonl") == ["a", "b"]


@pytest.mark.hostile
def test_nothing_is_written_to_another_file_that_has_the_number_of_the_files(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"o" * 1000)
    lines = JsonLines(tmp_path / "lines", is_synced=False)
    lines.add("a", line_of("a", ["1"], {}))
    os.close(number := lines._file.descriptor)
    assert os.open(other, os.O_RDWR) == number
    with pytest.raises(RolloutFileError, match="something else has closed it"):
        lines.add("b", line_of("b", ["1"], {}))
    lines.close()
    os.close(number)  # It is not the collection's.
    assert other.read_bytes() == b"o" * 1000
