import asyncio
import threading

import pytest
from patience import eventually

from raycrew.cluster_core import BundlesOccupiedError, Session
from raycrew.worker_groups._group.life import bundles, leftovers
from raycrew.worker_groups._group.life.leftovers import keep, try_again

pytestmark = pytest.mark.hostile


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    mine = []
    monkeypatch.setattr(leftovers, "_kept", mine)
    return mine


class Occupied:
    """A cluster whose slots are taken."""

    def claim(self, indices, name):
        raise BundlesOccupiedError(name, 1, {})


def test_a_claim_waits_once_for_all_that_is_kept(kept, monkeypatch):
    monkeypatch.setattr(bundles, "ABANDONED_S", 0.05)
    gate, over = threading.Event(), []
    for _ in range(3):
        keep(lambda: over.append(gate.wait(60)))
    with pytest.raises(BundlesOccupiedError):
        bundles.claim_bundles(Occupied(), None, "policy")
    assert not over
    gate.set()
    eventually(lambda: len(kept) == len(over) == 3, "what was in vain is kept again")


def test_all_is_tried_at_once_and_what_is_given_back_is_forgotten(kept, caplog):
    together = threading.Barrier(3)

    def fail():
        together.wait(60)
        raise ValueError("no luck")

    keep(lambda: together.wait(60) >= 0)
    keep(lambda: together.wait(60) < 0)
    keep(fail)
    try_again(60)
    assert len(kept) == 2
    assert fail in kept
    assert "no luck" in caplog.text


def test_a_claim_that_waits_can_be_given_up(kept):
    gate, tried, nobody_wants_it = threading.Event(), threading.Event(), threading.Event()
    outcome = []

    def claim():
        try:
            with Session.until_set(nobody_wants_it):
                bundles.claim_bundles(Occupied(), None, "policy")
        except asyncio.CancelledError as error:
            outcome.append(error)

    keep(lambda: (tried.set(), gate.wait(60))[1])
    claiming = threading.Thread(target=claim, daemon=True)
    claiming.start()
    assert tried.wait(60)
    nobody_wants_it.set()
    claiming.join(60)
    assert len(outcome) == 1
    assert not gate.is_set()
    gate.set()
