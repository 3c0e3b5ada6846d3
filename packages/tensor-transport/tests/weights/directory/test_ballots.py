"""Who decides about a version."""

import copy
import pickle

import pytest

from raycrew.tensor_transport import UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.weights._directory.ballots import Ballots, RecipientVersion


@pytest.mark.parametrize("again", [lambda version: pickle.loads(pickle.dumps(version)), copy.copy])
def test_a_version_arrives_with_its_ballot(again):
    version = again(RecipientVersion(3, "x"))
    assert version == 3 and type(version) is RecipientVersion and version.ballot == "x"


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_a_ballot_is_of_who_showed_it_last_and_who_did_before_is_told(first, second):
    ballots = Ballots(["x", "y"], "")
    assert ballots.admit(3, first, "x") == "" and ballots.admit(3, first, "x") == ""
    assert ballots.admit(3, second, "x") == first
    assert ballots.receivers == [second, ""]
    with pytest.raises(UpdateAbortedError, match=f"version 3: another receiver took the place of {first}"):
        ballots.admit(3, first, "x")
    with pytest.raises(WeightUpdateError, match=f"version 3: two receivers are called {second}"):
        ballots.admit(3, second, "y")
    with pytest.raises(WeightUpdateError, match="receiver c is not one that decides"):
        ballots.admit(3, "c", "z")


def test_only_who_asked_confirms():
    ballots = Ballots(["x"], "key")
    for key in ("", "kex", "kez", "a", "z"):
        with pytest.raises(WeightUpdateError, match="version 3 was asked for by somebody else"):
            ballots.confirm(3, key)
        assert not ballots.is_confirmed
    ballots.confirm(3, "key")
    assert ballots.is_confirmed and Ballots([], "").is_confirmed
