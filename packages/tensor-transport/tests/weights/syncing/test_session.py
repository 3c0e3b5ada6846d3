"""What is known of each rank during an update, and who is called when."""

import pytest

from raycrew.tensor_transport import UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.weights._syncing.session import Session, is_abortion, members_of


class Rank:
    """Answers as it is told to, and notes who asked."""

    def __init__(self, **answers):
        self.answers, self.heard = answers, []

    def __getattr__(self, method):
        def answer(*args):
            self.heard.append((method, *args))
            found = self.answers.get(method, f"{method} done")
            if isinstance(found, Exception):
                raise found
            return found

        return answer


def session_of(*ranks, **options):
    return Session(members_of([LocalPeers(ranks)], None), None, **options)


def notes_of(session):
    error = RuntimeError()
    session.explain(error)
    return getattr(error, "__notes__", [])


def test_each_rank_is_given_its_own_and_answers_in_order():
    ranks, steps = [Rank(), Rank(load=7)], []
    session = session_of(*ranks, progress=lambda step: steps.append((step.phase, step.done, step.total)))
    assert session.call("apply", "load", lambda number: f"for {number}") == {0: "load done", 1: 7}
    assert session.call("pause", "stop") == {0: "stop done", 1: "stop done"}
    assert [rank.heard for rank in ranks] == [[("load", "for 0"), ("stop",)], [("load", "for 1"), ("stop",)]]
    assert steps == [("apply", 1, 2), ("apply", 2, 2), ("pause", 1, 2), ("pause", 2, 2)]
    session.raise_first(1)


def test_only_what_changes_weights_can_leave_a_mixture():
    silent = Rank(prepare=RuntimeError("silent"), load=RuntimeError("silent"))
    session = session_of(Rank(), silent)
    session.call("prepare", "prepare")
    session.resume("go")
    assert silent.heard[-1] == ("go",)
    session.call("apply", "load", changes_weights=True)
    session.resume("go")
    assert silent.heard[-1] == ("load",)


def test_who_prepared_and_was_not_asked_to_apply_is_told_to_forget():
    ranks = [Rank(prepare=RuntimeError("no room")), Rank(), Rank(load=UpdateAbortedError("given up"))]
    ranks.append(Rank(load=RuntimeError("lost")))
    session = session_of(*ranks)
    session.call("prepare", "prepare")
    session.drop("load", lambda _: 5)
    assert [rank.heard[1:] for rank in ranks] == [[], [("load", 5)], [("load", 5)], [("load", 5)]]
    assert notes_of(session) == ["load() failed on rank 3: RuntimeError('lost')"], "others were given up"
    session.drop("load", lambda _: 5)
    assert len(ranks[1].heard) == 2, "once"


def test_who_was_asked_to_apply_is_not_told_to_forget():
    rank = Rank()
    session = session_of(rank)
    session.drop("load", lambda _: 5)
    session.call("prepare", "prepare")
    session.call("apply", "load")
    session.drop("load", lambda _: 5)
    assert rank.heard == [("prepare",), ("load",)]


def test_only_ranks_of_one_version_go_on_until_another_reaches_the_rest():
    broken = Rank(load=WeightUpdateError("torn", intact=False))
    ranks = [Rank(), broken, Rank(load=WeightUpdateError("refused", intact=True))]
    session = session_of(*ranks)
    session.call("apply", "load", changes_weights=True)
    session.resume("go")
    assert [rank.heard[-1] for rank in ranks] == [("go",), ("load",), ("go",)]
    assert notes_of(session) == [
        "rank 1 is not resumed: its weights are, or may be, a mixture of two versions"
    ]
    broken.answers.clear()
    session.call("apply", "load", changes_weights=True)
    session.resume("go")
    assert broken.heard[-1] == ("go",)


@pytest.mark.parametrize(
    ("failures", "cause", "raised"),
    [
        ({0: UpdateAbortedError("given up"), 1: RuntimeError("first")}, None, "first"),
        ({0: UpdateAbortedError("given up"), 1: RuntimeError("first")}, UpdateAbortedError("late"), "first"),
        ({0: RuntimeError("rank")}, RuntimeError("trainer"), "trainer"),
        ({0: UpdateAbortedError("given up")}, UpdateAbortedError("late"), "given up"),
        ({}, UpdateAbortedError("alone"), "alone"),
        ({1: RuntimeError("one"), 0: RuntimeError("zero")}, None, "zero"),
    ],
)
def test_the_failure_that_others_followed_is_raised_and_the_others_are_told(failures, cause, raised):
    session = session_of(Rank(), Rank())
    session.failures = failures
    with pytest.raises((RuntimeError, UpdateAbortedError)) as caught:
        session.raise_first(3, cause)
    assert str(caught.value) == raised
    notes = "\n".join(caught.value.__notes__) if hasattr(caught.value, "__notes__") else ""
    assert notes.count("failed, too") == len([f for f in failures.values() if f is not caught.value])
    assert ("did not reach every generator" in notes) == (caught.value is not cause)


def test_an_abortion_is_found_behind_what_wraps_it():
    wrapped = RuntimeError("the engine says")
    wrapped.__cause__ = UpdateAbortedError("given up")
    during = RuntimeError("meanwhile")
    during.__context__ = wrapped
    assert is_abortion(wrapped) and is_abortion(during) and not is_abortion(RuntimeError())


def test_ranks_are_numbered_through_all_groups_and_the_wrong_ones_are_refused():
    groups = [LocalPeers([Rank(), Rank()]), LocalPeers([Rank()])]
    labels = [(member.number, member.label, member.rank) for member in members_of(groups, None)]
    assert labels == [(0, "rank 0 of group 0", 0), (1, "rank 1 of group 0", 1), (2, "rank 0 of group 1", 0)]
    assert [member.number for member in members_of(groups, [2, 0])] == [0, 2]
    with pytest.raises(ValueError, match=r"no generators \[-1, 3\]; there are 3"):
        members_of(groups, [3, 1, -1])
    with pytest.raises(ValueError, match="no generator to update"):
        members_of(groups, [])
