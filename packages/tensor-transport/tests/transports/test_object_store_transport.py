"""Bytes in Ray's object store, from actors on two nodes; and the adapters over transports."""

import math

import numpy as np
import pytest
import torch
from actors import ActorPeer, Remade

from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import ObjectStoreTransport, choose_transport, member_facts


def pulled(_, offer):
    into = np.zeros(offer.size_bytes, np.uint8)
    ObjectStoreTransport().pull([offer.whole], [into]).wait(60)
    return into.tobytes()


def test_bytes_that_are_offered_here_are_pulled_on_another_node(peers):
    source = torch.arange(1000)
    offer = ObjectStoreTransport().offer(source)
    assert peers[1].call(pulled, offer) == source.numpy().tobytes()


@pytest.mark.hostile
def test_an_infinite_time_is_no_limit(ray_cluster):
    transport, source = ObjectStoreTransport(), torch.arange(5)
    found = transport.map(transport.offer(source), timeout_s=math.inf)
    assert found.tobytes() == source.numpy().tobytes()


@pytest.mark.long
@pytest.mark.hostile
@pytest.mark.slow
def test_conformance(ray_cluster):
    ObjectStoreTransport().offer(torch.arange(5))
    check_transport(PullCase(ObjectStoreTransport, lambda: ActorPeer(Remade(ObjectStoreTransport))))


def facts_of(_):
    return member_facts()


def test_members_on_two_nodes_choose_alike(peers):
    members = [peer.call(facts_of) for peer in peers]
    choice = choose_transport(members)
    assert choice.name == "shared_memory", "two simulated nodes are one machine"
    assert {member.owner.node_id for member in members} == {m.owner.node_id for m in members} != {""}
    assert choose_transport(members, preference="object_store").name == "object_store"
    assert choose_transport(members).digest == choice.digest
