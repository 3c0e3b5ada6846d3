"""One decision for a group, from the facts of all members; with reasons, and the same on each of them."""

import dataclasses
import importlib.util
import pickle
import random

import pytest
import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport.errors import NoTransportError
from raycrew.tensor_transport.transports import (
    MemberFacts,
    Owner,
    choose_transport,
    member_facts,
    start_of,
    this_process,
)
from raycrew.tensor_transport.transports._choosing import WHY_NOT

VERSIONS = {"raycrew-tensor-transport": "1", "torch": "2", "nccl": "2.29", "nixl": "1"}


def member(pid=1, machine="m0", **facts):
    owner = Owner(machine, "ns", pid, 10 * pid)
    facts = {"shm": f"{machine}-1", "shm_free_bytes": 1 << 30, "cluster": "c", "versions": VERSIONS} | facts
    return MemberFacts(owner, f"host-{machine}", 1000, **facts)


def reasons(choice):
    return {candidate.name: candidate.reason for candidate in choice.candidates}


def test_the_fastest_that_all_can_use():
    here = [member(1), member(2), member(3)]
    apart = [*here, member(4, "m1")]
    gpus = [dataclasses.replace(m, gpus=(f"gpu{i}", "gpu0", "gpu1", "gpu2")) for i, m in enumerate(here)]
    assert choose_transport(here).name == "shared_memory"
    assert choose_transport(here, "broadcast").name == "shared_memory"
    assert choose_transport(apart).name == "object_store"
    assert choose_transport(apart, "broadcast").name == "gloo"
    assert choose_transport(gpus, device="cuda").name == "cuda_ipc"
    assert choose_transport(gpus, "broadcast", device="cuda").name == "nccl"
    assert choose_transport(apart, preference="tcp").name == "tcp"
    assert choose_transport(here, preference=["tcp", "shared_memory"]).name == "tcp"
    assert choose_transport(here, preference="nixl").name == "nixl"


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"unavailable": {"shared_memory": "no room"}}, "shared_memory", "member 1 .*: no room"),
        ({"uid": 7}, "shared_memory", "differ in user: 1000 and 7"),
        ({"uid": 7}, "process_vm", "differ in user"),
        ({"shm": "m0-2"}, "shared_memory", "differ in shared memory"),
        ({"owner": Owner("m0", "other", 2, 20)}, "process_vm", "container"),
        ({"owner": Owner("m1", "ns", 2, 20)}, "cuda_ipc", "differ in machine: m0 and m1"),
        ({"owner": Owner("m0", "other", 2, 20)}, "cuda_ipc", "container"),
        ({"gpus": ("gpu1",)}, "cuda_ipc", "member 0 .* does not see the device gpu1 of member 1"),
        ({"cluster": ""}, "object_store", "differ in Ray cluster: c and none"),
        (
            {"versions": VERSIONS | {"raycrew-tensor-transport": "2"}},
            "tcp",
            "the version of raycrew.*: 1 and 2",
        ),
        ({"versions": VERSIONS | {"nccl": "3"}}, "nccl", "the version of nccl"),
        ({"gpus": ("gpu1", "gpu0")}, "cuda_ipc", "member 0 .* does not see the device gpu1 of member 1"),
        ({"gpus": ()}, "cuda_ipc", "member 1 .* does not see the device gpu0 of member 0"),
        ({"gpus": ("gpu0",)}, "nccl", "members 0 and 1 share the device gpu0"),
        ({"gpus": ()}, "nccl", "member 1 .* has no CUDA device"),
        (
            {"shm_free_bytes": 5},
            "shared_memory",
            "member 1 has 5 bytes of shared memory left, 4096 are needed",
        ),
    ],
)
def test_one_member_that_cannot_decides_for_all(change, name, reason):
    members = [member(1, gpus=("gpu0",)), dataclasses.replace(member(2, gpus=("gpu1",)), **change), member(3)]
    with pytest.raises(NoTransportError, match=reason) as caught:
        choose_transport(
            members[:2], "broadcast" if name == "nccl" else "pull", name, device="cuda", size_bytes=4096
        )
    assert list(caught.value.reasons) == [name]
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_each_candidate_is_told_with_its_reason():
    choice = choose_transport([member(1), member(2, "m1")])
    head, *lines = choice.explain().splitlines()
    assert head == "pull of cpu bytes, 2 members on 2 machines: object_store"
    assert [line.split()[0] for line in lines] == [c.name for c in choice.candidates]
    assert "members 0 and 1 differ in machine: m0 and m1" in lines[0]
    assert lines[2].endswith("chosen") and lines[3].endswith("could be used")


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 1)])
def test_what_differs_is_told_whoever_has_more_of_it(one, other):
    members = [
        MemberFacts(
            Owner("m0", "ns", i, i), "h", uid, shm="s", shm_free_bytes=9, cluster="c", versions=VERSIONS
        )
        for i, uid in enumerate((one, other))
    ]
    told = reasons(choose_transport(members))
    assert told["shared_memory"] == told["process_vm"] == f"members 0 and 1 differ in user: {one} and {other}"
    assert told["object_store"] is told["tcp"] is None
    clusters = [member(i, cluster="c" if i == one else "") for i in (1, 2)]
    wanted = {1: "members 0 and 1 differ in Ray cluster: c and none", 2: "member 0 is not connected to a Ray"}
    assert reasons(choose_transport(clusters))["object_store"].startswith(wanted[one])


def test_room_for_just_what_is_kept_is_room_enough():
    for free, needed, chosen in ((0, 0, "shared_memory"), (9, 9, "shared_memory"), (8, 9, "process_vm")):
        members = [member(1), member(2, shm_free_bytes=free)]
        choice = choose_transport(members, size_bytes=needed)
        assert choice.name == chosen
        told = reasons(choice)
        assert told["process_vm"] is told["object_store"] is told["tcp"] is None
    assert choose_transport([member(1), member(2, shm_free_bytes=0)]).name == "shared_memory"


def test_one_member_is_one():
    head, *lines = (
        choose_transport([member()], preference=["tcp", "object_store", "shared_memory"])
        .explain()
        .splitlines()
    )
    assert head == "pull of cpu bytes, 1 member on 1 machine: tcp"
    assert [line.split(maxsplit=1)[1] for line in lines] == ["chosen", "could be used", "could be used"]


def test_members_compare_digests():
    members = [member(i, random.choice("ab")) for i in range(6)]
    again = pickle.loads(pickle.dumps(members))
    assert choose_transport(members).digest == choose_transport(again).digest
    again[5] = dataclasses.replace(again[5], unavailable={"tcp": "none"})
    assert choose_transport(members).digest != choose_transport(again).digest
    assert choose_transport(members).digest != choose_transport(members, "broadcast").digest


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="no members"):
        choose_transport([])
    with pytest.raises(ValueError, match=r"\['carrier_pigeon'\].*there are shared_memory, process_vm"):
        choose_transport([member()], preference=["tcp", "carrier_pigeon"])
    with pytest.raises(ValueError, match="nothing to choose"):
        choose_transport([member()], preference=[])
    with pytest.raises(ValueError, match="gloo"):
        choose_transport([member()], preference="gloo")


def test_facts_of_this_process():
    facts = pickle.loads(pickle.dumps(member_facts()))
    now = dataclasses.replace(member_facts(), shm_free_bytes=facts.shm_free_bytes)  # Others take of it, too.
    assert facts == now and facts.owner == this_process()
    assert facts.owner.started == start_of(facts.owner.pid) > 0
    assert ("object_store" in facts.unavailable) == (not facts.cluster) and "tcp" not in facts.unavailable
    assert all("\n" not in reason for reason in facts.unavailable.values())
    assert choose_transport([facts, facts]).name in ("shared_memory", "process_vm", "object_store", "tcp")


@pytest.mark.parametrize(
    ("name", "lacks", "reason"),
    [
        ("object_store", "ray", "Ray is not installed"),
        ("nixl", "nixl", "NIXL is not installed"),
        ("nixl", "ray", "Ray is not installed"),
    ],
)
def test_a_missing_library_is_a_reason_and_no_crash(monkeypatch, name, lacks, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == lacks else module)
    assert reason in WHY_NOT[name]()
    assert reason in member_facts().unavailable[name]


@pytest.mark.parametrize(
    ("name", "ask", "reason"),
    [("gloo", "is_gloo_available", "without gloo"), ("nccl", "is_nccl_available", "without NCCL")],
)
def test_a_torch_without_a_collective_is_a_reason(monkeypatch, name, ask, reason):
    for lacking in (ask, "is_available"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, lacking, lambda: False)
            assert reason in WHY_NOT[name]() and reason in member_facts().unavailable[name]


def test_a_ray_that_moves_no_tensors_by_nixl_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    for connected, moves, reason in (
        (False, True, "not connected to a Ray cluster"),
        (True, False, "this version of Ray does not move tensors by NIXL"),
        (True, True, None),
    ):
        monkeypatch.setattr(_ray, "is_connected", lambda connected=connected: connected)
        monkeypatch.setattr(_ray, "moves_by_nixl", lambda moves=moves: moves)
        found = WHY_NOT["nixl"]()
        assert found is reason is None or reason in found
