"""A group's record, left for others and taken away again, however late Ray answers."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from patience import eventually
from test_group_records import RECORD, STARTING

from raycrew.cluster_core import Session
from raycrew.worker_groups._health.roster import Publication, publishing
from raycrew.worker_groups._health.roster.records import record_of
from raycrew.worker_groups._ray import bulletin


@pytest.fixture
def board(monkeypatch):
    """What is left there; a text that is put waits for its gate, where it has one."""
    kept, gates = {}, {}

    def put(key, text, **_):
        if (gate := gates.pop(text, None)) is not None:
            gate.wait(60)
        kept[key] = text

    fake = SimpleNamespace(_internal_kv_put=put, _internal_kv_del=lambda key, **_: kept.pop(key, None))
    monkeypatch.setattr(bulletin, "internal_kv", fake)
    monkeypatch.setattr(Session, "current", lambda: Session("one"))
    monkeypatch.setattr(publishing, "_ANSWER_S", 0.2)
    return SimpleNamespace(kept=kept, gates=gates)


@pytest.mark.hostile
def test_what_is_told_of_a_start_never_comes_over_the_group(board):
    publication, late = Publication(), replace(STARTING, generation=9)
    publication.announce(STARTING)
    assert list(board.kept.values()) == [STARTING.as_text().encode()]
    board.gates[late.as_text().encode()] = gate = threading.Event()
    publication.announce(late)
    publication.publish(RECORD)
    board.kept.clear()
    gate.set()
    eventually(lambda: list(board.kept.values()) == [RECORD.as_text().encode()], "it is put right")
    publication.announce(STARTING)
    assert list(board.kept.values()) == [RECORD.as_text().encode()]
    publication.end()
    publication.announce(STARTING)
    assert board.kept == {}


def test_what_is_done_to_a_group_that_stands_is_told_meanwhile(board):
    publication, start = Publication(), replace(STARTING.start, doing="restarting")
    later = replace(RECORD, generation=3)

    def seen():
        return [record_of(text.decode()) for text in board.kept.values()]

    with publication.renewing(start):
        assert seen() == [], "it does not stand"
    publication.publish(RECORD)
    with publication.renewing(start):
        assert seen() == [replace(RECORD, start=start)]
        publication.publish(later)
        assert seen() == [replace(later, start=start)]
    assert seen() == [later]
    with pytest.raises(ZeroDivisionError), publication.renewing(start):
        raise ZeroDivisionError
    assert seen() == [later]
    with publication.renewing(start):
        publication.end()
    assert seen() == []


@pytest.mark.hostile
def test_a_record_that_comes_after_the_end_is_taken_away(monkeypatch):
    kept, may_come, has_come = {}, threading.Event(), threading.Event()

    def put(key, text, **_):
        may_come.wait(60)
        kept[key] = text
        has_come.set()

    fake = SimpleNamespace(_internal_kv_put=put, _internal_kv_del=lambda key, **_: kept.pop(key, None))
    monkeypatch.setattr(bulletin, "internal_kv", fake)
    monkeypatch.setattr(Session, "current", lambda: Session("one"))
    monkeypatch.setattr(publishing, "_ANSWER_S", 0.2)
    publication = Publication()
    publication.publish(RECORD)
    publication.end()
    may_come.set()
    assert has_come.wait(60)
    eventually(lambda: kept == {}, "it is taken away")
