"""Whose process is whose, from made-up tables."""

from raycrew.worker_groups._on_nodes.family import Family, Kin
from raycrew.worker_groups._on_nodes.process_table import Entry, Process, ancestors


def table(*rows):
    """Of (pid, parent, group, session[, start])."""
    entries = [Entry(Process(pid, rest[0] if rest else pid), *ids) for pid, *ids, rest in map(_split, rows)]
    return {entry.process.pid: entry for entry in entries}


def _split(row):
    return (*row[:4], row[4:])


def seen(*rows):
    return Kin(table(*rows))


def pids(family):
    return sorted(member.pid for member in family.members)


RAYLET = (2, 1, 2, 2)
WORKER = (10, 2, 2, 2)


def family():
    return Family(Process(10, 10), "aa")


def test_children_of_children_belong_to_it_and_neighbours_do_not():
    mine = family()
    mine.update(seen(RAYLET, WORKER, (11, 10, 2, 2), (12, 11, 12, 2), (13, 2, 2, 2)), {})
    assert pids(mine) == [10, 11, 12]


def test_orphans_are_remembered_until_they_end():
    mine = family()
    mine.update(seen(RAYLET, WORKER, (11, 10, 2, 2)), {})
    mine.update(seen(RAYLET, (11, 1, 2, 2)), {})
    assert pids(mine) == [11]
    mine.update(seen(RAYLET, (11, 1, 2, 2), (14, 11, 2, 2)), {})
    assert pids(mine) == [11, 14]
    mine.update(seen(RAYLET), {})
    assert pids(mine) == []


def test_a_number_that_came_round_again_is_another_process():
    mine = family()
    mine.update(seen(RAYLET, WORKER, (11, 10, 11, 11)), {})
    mine.update(seen(RAYLET, (10, 1, 2, 2, 500), (11, 1, 11, 11, 501), (12, 11, 11, 11)), {})
    assert pids(mine) == []


def test_a_session_is_the_workers_after_its_leader_has_ended():
    mine = family()
    mine.update(seen(RAYLET, WORKER, (11, 10, 11, 11)), {})
    mine.update(seen(RAYLET, WORKER, (12, 1, 11, 11)), {})
    assert pids(mine) == [10, 12]
    mine.update(seen(RAYLET, WORKER), {})
    mine.update(seen(RAYLET, WORKER, (11, 1, 11, 11, 900), (19, 1, 11, 11)), {})
    assert pids(mine) == [10]


def test_marks_find_what_was_never_seen_with_its_parents():
    mine, daemon = family(), Process(30, 30)
    others = {Process(31, 31): frozenset({"bb"}), Process(32, 32): frozenset[str]()}
    mine.update(
        seen(RAYLET, WORKER, (30, 1, 30, 30), (31, 1, 31, 31), (32, 1, 32, 32), (33, 30, 30, 30)),
        {daemon: frozenset({"bb", "aa"}), **others},
    )
    assert pids(mine) == [10, 30, 33]


def test_ancestors():
    assert ancestors(11, table((1, 0, 1, 1), RAYLET, WORKER, (11, 10, 2, 2))) == {10, 2, 1, 0}
