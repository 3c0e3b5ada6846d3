"""Which groups are found, from records that others have left, within one deadline."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_group_records import RECORD, STARTING, WATCH, WORKERS

from raycrew.worker_groups._health.roster import looking

DEAD = replace(RECORD, name="dead", namespace="gone", owner="them")
OTHER_VERSION = '{"version": 99, "name": "later"}'


class Session:
    def while_connected(self):
        return contextlib.nullcontext()


@pytest.fixture
def board(monkeypatch):
    """What has been left to read, who lives, the time, and what each question may take of it."""
    made = SimpleNamespace(texts={}, living=set(), now=0.0, given=[], change=lambda: None)

    def asked(what, answer):
        def answered(*arguments):
            made.given.append((what, arguments[-1]))
            made.now += 1.0
            return answer(*arguments[:-1])

        return answered

    def dropped(keys):
        for key in keys:
            del made.texts[key]

    def named():
        found = set(made.living)
        made.change()
        return found

    monkeypatch.setattr(looking, "records", asked("records", lambda _: dict(made.texts)))
    monkeypatch.setattr(looking, "named_actors", asked("names", named))
    monkeypatch.setattr(looking, "find_actors", asked("actors", lambda _: {}))
    monkeypatch.setattr(looking, "drop_records", asked("drop", dropped))
    monkeypatch.setattr(looking, "current_session", Session)
    monkeypatch.setattr(looking.time, "monotonic", lambda: made.now)
    return made


def test_all_questions_share_one_deadline(board):
    board.texts["group/a"] = RECORD.as_text()
    board.living |= {(RECORD.namespace, worker.actor) for worker in WORKERS}
    for take in (looking.look, looking.take_stacks):
        board.given.clear()
        assert take(5.0)
        assert board.given == [("records", 5.0), ("names", 4.0), ("actors", 3.0)]


class Asked:
    """A watch as it is found by its name, which answers with what it was asked."""

    def __init__(self):
        self.examine_known = SimpleNamespace(remote=lambda *asked: len(asked))


class OfBefore:
    """One of a version that did not have that."""


def test_each_watch_is_asked_for_its_own_ranks_and_the_dead_are_dead(board, monkeypatch):
    workers = (*WORKERS, replace(WORKERS[1], rank=2, pid=13, actor="gone"))
    watches = [(RECORD.namespace, f"raycrew-{WATCH}node{i}-1") for i in (0, 1)]
    board.texts["group/a"] = replace(RECORD, workers=workers).as_text()
    board.living |= {*watches, *((RECORD.namespace, worker.actor) for worker in WORKERS)}
    found = dict(zip(watches, [Asked(), OfBefore()], strict=True))
    monkeypatch.setattr(looking, "find_actors", lambda *_: found)
    monkeypatch.setattr(Session, "wait", lambda _, refs, **__: (refs, []), raising=False)
    answer = [{"seen": {"is_alive": True}}]
    monkeypatch.setattr(Session, "get", lambda _, n_asked: answer if n_asked == 3 else None, raising=False)
    wanted = []
    ((record, told),) = looking.examine_groups(
        5.0, ["policy"], lambda worker, n: wanted.append((worker.pid, n)) or {}
    )
    assert record.name == "policy" and wanted == [(11, 3)]
    other = "its node's watch is of another version of raycrew"
    assert told == [answer[0], other, {"seen": {"is_alive": False}}]


@pytest.mark.hostile
def test_what_the_dead_have_left_is_dropped_and_what_cannot_be_read_is_counted(board):
    board.texts |= {"group/a": RECORD.as_text(), "group/b": DEAD.as_text(), "group/c": OTHER_VERSION}
    board.living.add((RECORD.namespace, f"raycrew-{WATCH}node0-1"))
    found = looking.look(9.0)
    assert ([group.record.name for group in found], found.n_unread) == (["policy"], 1)
    assert set(board.texts) == {"group/a", "group/c"}


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("now", "jobs", "is_there"), [(110.0, {"0100"}, True), (110.0, set(), False), (999.0, {"0100"}, False)]
)
def test_a_group_that_starts_has_no_actors_yet(board, monkeypatch, now, jobs, is_there):
    board.texts["group/a"] = STARTING.as_text()
    monkeypatch.setattr(looking, "living_jobs", lambda _: jobs)
    monkeypatch.setattr(looking.time, "time", lambda: now)
    found = looking.look(9.0)
    assert [group.note[:17] for group in found] == ["starting for 10 s"] * is_there
    assert set(board.texts) == {"group/a"} & ({"group/a"} if is_there else set())


@pytest.mark.hostile
def test_who_comes_back_meanwhile_keeps_its_record(board):
    board.texts |= {"group/a": DEAD.as_text(), "group/b": replace(DEAD, generation=2).as_text()}

    def come_back():
        board.texts["group/a"] = replace(DEAD, generation=3).as_text()

    board.change = come_back
    assert looking.look(9.0) == []
    assert set(board.texts) == {"group/a"}


def test_an_unknown_name_is_told_with_those_that_are_there(board):
    board.texts["group/a"] = RECORD.as_text()
    board.living.add((RECORD.namespace, WORKERS[0].actor))
    with pytest.raises(looking.UnknownGroupError, match=r"'police'; there are: policy"):
        looking.look(5.0, ["police"])


def test_a_rank_that_no_group_has_is_told_with_the_groups_that_were_looked_at(board):
    board.texts["group/a"] = RECORD.as_text()
    board.living |= {(RECORD.namespace, worker.actor) for worker in WORKERS}
    assert [one.worker.rank for one in looking.take_stacks(5.0, ranks=[1])] == [1]
    for ranks, named in (([7], "7"), ([7, 0, 2], "2, 7")):
        with pytest.raises(ValueError, match=rf"\(policy\) has a rank {named}$"):
            looking.take_stacks(5.0, ranks=ranks)
    board.texts.clear()
    assert looking.take_stacks(5.0, ranks=[7]) == []


def test_groups_of_one_name_are_told_apart_by_their_drivers(board):
    for pid in (7, 8):
        board.texts[f"group/{pid}"] = replace(RECORD, driver=f"login-1:{pid}").as_text()
    board.living.add((RECORD.namespace, WORKERS[0].actor))
    both = looking.look(5.0, ["policy"])
    assert [group.as_dict()["driver"] for group in both] == ["login-1:7", "login-1:8"]
    one = looking.take_stacks(5.0, ["policy@login-1:8"])
    assert {(rank.as_dict()["group"], rank.as_dict()["driver"]) for rank in one} == {("policy", "login-1:8")}
