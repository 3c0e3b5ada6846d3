import os

import pytest

from raycrew.worker_groups._worker.recalls import Inbox, recall, recall_all

CALL, OTHER = b"c" * 24, b"o" * 24


def test_a_call_is_taken_back_and_no_other():
    inbox = Inbox()
    assert not inbox.has(lambda: CALL)
    assert recall_all([(inbox.address, CALL), (inbox.address, b"x" * 24)]) == [True, True]
    assert inbox.has(lambda: CALL)
    assert not inbox.has(lambda: OTHER)
    assert recall(inbox.address, OTHER)
    assert inbox.has(lambda: OTHER)


def test_what_a_call_is_is_not_asked_while_nothing_was_taken_back():
    def never():
        raise AssertionError

    assert not Inbox().has(never)


def test_nothing_is_written_but_to_the_inbox_itself():
    """Its process may have ended, and another may have its number and descriptors."""
    other = os.memfd_create("other")
    name = Inbox().address.partition(" ")[2]
    assert not recall(f"/proc/{os.getpid()}/fd/{other} {name}", CALL)
    assert not recall(f"/proc/{os.getpid()}/fd/100000 {name}", CALL)
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_calls_run_where_there_are_no_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    inbox = Inbox()
    assert not recall(inbox.address, CALL)
    assert not inbox.has(lambda: CALL)


@pytest.mark.hostile
@pytest.mark.parametrize("other", ["nothing", "a file", "a pipe"])
def test_an_inbox_that_a_call_has_closed_takes_back_no_more_and_stops_no_call(tmp_path, other):
    """Another file that has its number is not read, and left where it is."""
    inbox = Inbox()
    assert recall(inbox.address, b"a" * 24)
    assert inbox.has(lambda: b"a" * 24)
    os.close(fd := inbox._fd)
    if other == "a file":
        (tmp_path / "other").write_bytes(b"b" * 240)
        assert os.open(tmp_path / "other", os.O_RDONLY) == fd
    elif other == "a pipe":
        reading, writing = os.pipe()
        os.dup2(reading, fd)
    assert inbox.has(lambda: b"a" * 24), "what it knows"
    assert not inbox.has(lambda: b"b" * 24)
    if other != "nothing":
        os.close(fd)
    if other == "a pipe":
        os.close(writing)
        if reading != fd:
            os.close(reading)
