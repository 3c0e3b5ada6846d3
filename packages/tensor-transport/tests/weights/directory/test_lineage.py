"""What partial updates can be added to: told exactly, and remembered in little."""

import pickle

from authors import PLAN, Author
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport.weights._directory.lineage import Lineage
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import Begin

CHANGES = st.one_of(st.none(), st.frozensets(st.sampled_from("abcd"), min_size=1))
VERSIONS = st.lists(st.dictionaries(st.integers(0, 1), CHANGES, min_size=1), max_size=30)


def covers(names, changed):
    return names.keys() == changed.keys() and all(
        names[part] is None or (found is not None and found <= names[part]) for part, found in changed.items()
    )


def is_full(names):
    return set(names.values()) == {None}


def true_bases(history, names):
    """Each version from which on all changes are among these names, and the last one."""
    begin = max((i for i, one in enumerate(history) if is_full(one)), default=0)
    return {
        number
        for number in range(begin, len(history))
        if all(covers(names, one) for one in history[number + 1 :])
    }


@given(VERSIONS, VERSIONS)
def test_the_bases_are_all_versions_since_which_only_its_names_were_changed(history, asked):
    lineage = Lineage()
    for number, names in enumerate(history):
        lineage.note(number, names)
    for names in asked:
        expected = None if is_full(names) else true_bases(history, names)
        assert lineage.bases(names) == expected


def test_the_same_changes_are_remembered_once():
    lineage, sizes = Lineage(), []
    lineage.note(1, {0: None})
    for number in range(2, 1002):
        lineage.note(number, {0: frozenset(f"adapter.{i}" for i in range(100))})
        sizes.append(len(pickle.dumps(lineage)))
    assert lineage.bases({0: frozenset(f"adapter.{i}" for i in range(100))}) == set(range(1, 1002))
    assert sizes[-1] - sizes[0] < 5 * 1000


def test_changes_in_turns_are_remembered_once():
    lineage, sizes, turns = Lineage(), [], ["a", "b", "ab"]
    lineage.note(1, {0: None})
    for number in range(2, 302):
        lineage.note(number, {0: frozenset(turns[number % 3])})
        sizes.append(len(pickle.dumps(lineage)))
    assert sizes[-1] - sizes[0] < 5 * 300


def test_of_a_version_that_is_over_no_bases_are_remembered():
    record, sizes = Record(), []
    author = Author(record)
    author.publish()
    for _ in range(400):
        begin = Begin(0, 1, author.name, author.scope, None, PLAN.digest, PLAN, frozenset("x"))
        author.number = record.begin(0, begin)
        author.put()
        author.finish()
        sizes.append(len(pickle.dumps(record.versions)))
    assert len(record.update(0, author.number).bases) == 400
    assert record.chain(0, None, None) == [1, 401] and record.chain(0, None, 250) == [401]
    assert sizes[-1] - sizes[199] < 25 * 200
