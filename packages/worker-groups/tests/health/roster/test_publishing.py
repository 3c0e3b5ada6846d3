"""A group's record, left for others and taken away again, however late Ray answers."""

import threading
from types import SimpleNamespace

import pytest
from patience import eventually
from test_group_records import RECORD

from raycrew.cluster_core import Session
from raycrew.worker_groups._health.roster import Publication, publishing
from raycrew.worker_groups._ray import bulletin


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
