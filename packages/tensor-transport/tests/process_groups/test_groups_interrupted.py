"""Interrupts while a group is formed, and while it is closed: others hear of the end all the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raycrew.tensor_transport.errors import StaleGenerationError, TransportClosedError
from raycrew.tensor_transport.process_groups import GroupHost, form_group, join_group, member_names
from raycrew.tensor_transport.process_groups._membership.lifeline import is_gone
from raycrew.tensor_transport.testing import LocalPeers

pytestmark = pytest.mark.hostile


class Kept:
    """Keeps its invitation."""

    def join_group(self, invitation):
        self.invitation = invitation


class Interrupted:
    def join_group(self, invitation):
        raise KeyboardInterrupt


def test_who_was_invited_before_an_interrupt_waits_for_nobody():
    first = Kept()
    peers = {"trainer": LocalPeers([first, Interrupted()])}
    with GroupHost("weights", member_names(peers), backend="gloo", address="127.0.0.1") as host:
        with pytest.raises(KeyboardInterrupt):
            form_group(host, peers)
        with pytest.raises(StaleGenerationError, match="whoever formed it was interrupted"):
            join_group(first.invitation, timeout_s=60)


def test_a_close_that_was_interrupted_ends_what_says_that_the_member_is_there(monkeypatch):
    with GroupHost("weights", ["only"], backend="gloo", address="127.0.0.1") as host:
        group = join_group(host.open()[0])
        endpoint = group._lifeline.endpoint
        assert not is_gone(endpoint)

        def interrupted(cause):
            raise KeyboardInterrupt

        monkeypatch.setattr(group._party.board, "blame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.close()
        assert is_gone(endpoint) and group.available() == "it is closed"
        group.close()


def test_a_close_that_was_interrupted_ends_what_is_under_way(monkeypatch):
    with GroupHost("weights", ["first", "second"], backend="gloo", address="127.0.0.1") as host:
        with ThreadPoolExecutor() as pool:
            first, second = pool.map(join_group, host.open())
        transfer = first.send([torch.ones(3)])

        def interrupted(cause):
            raise KeyboardInterrupt

        monkeypatch.setattr(first._party.board, "blame", interrupted)
        ended, end = [], first._party.fabric.end

        def noted(works, held=()):
            ended.append(held)
            end(works, held)

        monkeypatch.setattr(first._party.fabric, "end", noted)
        with pytest.raises(KeyboardInterrupt):
            first.close()
        assert () in ended, "by whoever closes it, before the connections go"
        with pytest.raises(TransportClosedError):
            transfer.wait(60)
        second.close()
