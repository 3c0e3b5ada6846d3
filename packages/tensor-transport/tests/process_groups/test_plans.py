"""What members agree on, and how their bytes are cut into pieces; no process is started."""

import os
import pickle
import random
import socket
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from raycrew.tensor_transport.errors import (
    GroupError,
    GroupMismatchError,
    GroupTimeoutError,
    NoTransportError,
    PeerLostError,
    ShardLostError,
    StaleGenerationError,
    TransportTimeoutError,
    UnsupportedTensorError,
)
from raycrew.tensor_transport.process_groups import GroupHost, member_names
from raycrew.tensor_transport.process_groups._broadcasting.fabric import _port
from raycrew.tensor_transport.process_groups._broadcasting.pieces import plan_pieces
from raycrew.tensor_transport.process_groups._broadcasting.session import Wish, agreed_root
from raycrew.tensor_transport.process_groups._broadcasting.views import as_source, as_target
from raycrew.tensor_transport.process_groups._membership.cause import Cause
from raycrew.tensor_transport.process_groups._membership.invitation import Invitation, check_members
from raycrew.tensor_transport.process_groups._membership.lifeline import Lifeline, is_gone
from raycrew.tensor_transport.process_groups._membership.seat import Seat, choose_backend
from raycrew.tensor_transport.process_groups._process.sockets import address_towards
from raycrew.tensor_transport.transports import member_facts

CPU = torch.device("cpu")
INVITATION = Invitation("weights", 3, 1, ("a", "b"), "127.0.0.1", 1, "gloo", "token")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_byte_once_and_in_order(seed):
    rng = random.Random(seed)
    sizes = [
        rng.choice([0, 1, 7, 100, 399, 400, 401, 999, 1000, 1001, 5000]) for _ in range(rng.randrange(40))
    ]
    pieces = list(plan_pieces(sizes, piece_bytes=1000, small_bytes=400))
    runs = [run for piece in pieces for run in piece.runs]
    found = [(run.index, byte) for run in runs for byte in range(run.start, run.stop)]
    assert found == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    assert all(0 < piece.size_bytes <= 1000 for piece in pieces)
    assert all(piece.in_place or all(run.size_bytes < 400 for run in piece.runs) for piece in pieces)
    for piece, after in pairwise(pieces):
        first = after.runs[0]
        small = piece.runs[-1].size_bytes < 400 and first.size_bytes == sizes[first.index] < 400
        if small and sizes[piece.runs[-1].index] < 400:
            assert piece.size_bytes + first.size_bytes > 1000, "it would have fitted"


def test_small_buffers_fill_a_piece_to_its_last_byte():
    assert [len(piece.runs) for piece in plan_pieces([300, 300, 0, 300, 100, 1], 1000, 400)] == [4, 1]


def test_a_large_buffer_is_cut_into_parts_of_one_size():
    assert [piece.size_bytes for piece in plan_pieces([4001], 1000, 400)] == [800, 800, 800, 800, 801]


def test_pieces_are_of_at_most_32_mib_unless_told_otherwise():
    mib = 1 << 20
    assert [piece.size_bytes for piece in plan_pieces([100 * mib])] == [25 * mib] * 4
    assert [len(piece.runs) for piece in plan_pieces([mib] * 40)] == [32, 8]
    assert [len(piece.runs) for piece in plan_pieces([15 * mib] * 2 + [16 * mib] * 2)] == [2, 1, 1]
    assert list(plan_pieces([0, 0])) == []


def wishes(**changes):
    same = {"sizes": [3, 4], "manifest": "v1"}
    found = {
        name: Wish.of(role, **same) for name, role in (("a", "send"), ("b", "receive"), ("c", "receive"))
    }
    return found | {name: Wish.of(**same | change) for name, change in changes.items()}


def test_members_that_want_the_same_agree_on_who_sends():
    assert agreed_root(wishes()) == 0
    assert agreed_root(wishes(a={"role": "receive"}, c={"role": "send"})) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"b": {"role": "send"}}, "one member has to send, not a, b"),
        ({"a": {"role": "receive"}}, "one member has to send, not none"),
        ({"b": {"role": "receive", "sizes": [4, 3]}}, "differ in number or size"),
        ({"b": {"role": "receive", "sizes": [7]}}, "differ in number or size"),
        ({"c": {"role": "receive", "manifest": "v2"}}, "manifests of members differ"),
    ],
)
def test_members_that_want_different_things_hear_what_is_wrong(change, complaint):
    assert complaint in agreed_root(wishes(**change))


def test_one_member_that_gives_up_is_named():
    assert agreed_root(wishes() | {"b": Wish("cancel")}) == "b cancelled it"


@pytest.mark.parametrize(
    "kind",
    [StaleGenerationError, PeerLostError, GroupTimeoutError, GroupError],
    ids=lambda kind: kind.__name__,
)
def test_a_cause_becomes_the_same_error_in_every_member(kind):
    error = kind("what happened", group="weights", generation=3, members=["a"])
    seen = Cause.decode(Cause.of(error, "a").encode()).error(INVITATION)
    assert type(seen) is kind
    assert (str(seen), seen.members, seen.group, seen.generation) == ("what happened", ("a",), "weights", 3)
    assert pickle.loads(pickle.dumps(seen)).members == ("a",)


def test_foreign_errors_are_told_with_their_class():
    seen = Cause.of(KeyError("x"), "b").error(INVITATION)
    assert type(seen) is GroupError
    assert str(seen) == "b could not go on: KeyError: 'x'"


def test_errors_are_those_of_their_phase():
    assert issubclass(GroupTimeoutError, TransportTimeoutError)
    assert issubclass(GroupMismatchError, ValueError)
    assert issubclass(PeerLostError, ShardLostError)


def test_a_lifeline_ends_with_its_process_alone():
    line = Lifeline("127.0.0.1")
    assert not is_gone(line.endpoint)
    line.drain()
    line.close()
    line.close()
    assert is_gone(line.endpoint)


def test_the_address_on_the_way_to_this_machine_is_the_loopback():
    assert address_towards(("127.0.0.1", 9)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "packed"),
    [
        ("10.0.0.7", b"\x02\x00\x12\x34\x0a\x00\x00\x07"),
        ("fe80::1", b"\x0a\x00\x12\x34" + bytes(4) + b"\xfe\x80" + bytes(13) + b"\x01"),
    ],
)
def test_the_port_of_gloo_is_found_beside_the_known_address_or_not_at_all(address, packed):
    assert _port(b"\x02\x00host\x0a\x00" + packed + b"\xff\x02\x00", address) == 0x1234
    assert _port(b"another layout", address) == 0
    assert _port(packed[4:], address) == 0


def test_a_backend_is_chosen_from_what_all_say():
    seats = [Seat(name, ("127.0.0.1", 1), member_facts()) for name in "ab"]
    again = [Seat.decode(seat.encode()) for seat in seats]
    assert again == seats
    assert choose_backend("gloo", seats).name == "gloo"
    if not torch.cuda.is_available():
        choice = choose_backend("auto", seats)
        assert choice.name == "gloo"
        assert "NCCL" in next(each.reason for each in choice.candidates if each.name == "nccl")


@pytest.mark.parametrize(
    ("wanted", "has_gpus", "chosen"),
    [("auto", True, "nccl"), ("auto", False, "gloo"), ("nccl", True, "nccl"), ("gloo", True, "gloo")],
)
def test_auto_is_nccl_where_each_member_has_a_gpu_of_its_own(wanted, has_gpus, chosen):
    assert choose_backend(wanted, seated(has_gpus)).name == chosen


def seated(has_gpus):
    facts = replace(member_facts(), unavailable={})
    gpus = [(f"gpu{i}",) if has_gpus else () for i in range(2)]
    return [Seat(f"m{i}", ("127.0.0.1", 1), replace(facts, gpus=own)) for i, own in enumerate(gpus)]


@pytest.mark.hostile
def test_a_backend_that_is_asked_for_is_not_replaced_by_another():
    with pytest.raises(NoTransportError, match="no CUDA device"):
        choose_backend("nccl", seated(has_gpus=False))


def test_a_seat_says_whose_it_is():
    seat, _ = seated(has_gpus=False)
    assert str(seat) == f"m0 (process {os.getpid()} on {socket.gethostname()})"


def test_buffers_are_checked_before_anything_is_sent():
    square = torch.arange(16.0).reshape(4, 4)
    assert (
        as_source(square.t(), 0, CPU).tolist()
        == square.t().contiguous().reshape(-1).view(torch.uint8).tolist()
    )
    with pytest.raises(ValueError, match="buffer 2 is not contiguous"):
        as_target(square.t(), 2, CPU)
    with pytest.raises(UnsupportedTensorError, match="buffer 1"):
        as_target(torch.empty(3, device="meta"), 1, CPU)
    with pytest.raises(ValueError, match="buffer 3 is on cpu, and this group moves bytes of cuda"):
        as_target(square, 3, torch.device("cuda"))
    with pytest.raises(UnsupportedTensorError):
        as_source(torch.eye(3).to_sparse(), 0, CPU)
    with pytest.raises(ValueError, match="1-D, of uint8"):
        as_source(square.numpy(), 0, CPU)
    fixed = square.view(torch.uint8).reshape(-1).numpy()
    fixed.flags.writeable = False
    assert as_source(fixed, 0, CPU).numel() == 64
    with pytest.raises(ValueError, match="read-only"):
        as_target(fixed, 0, CPU)


@pytest.mark.parametrize(
    ("members", "options", "error", "complaint"),
    [
        ([], {}, ValueError, "at least one"),
        (["a", "a"], {}, ValueError, "twice: a"),
        ("ab", {}, TypeError, "sequence of names"),
        (["a"], {"backend": "mpi"}, ValueError, "not 'mpi'"),
    ],
)
def test_a_host_refuses_what_is_no_group(members, options, error, complaint):
    with pytest.raises(error, match=complaint):
        GroupHost("weights", members, **options)


def test_members_keep_their_order():
    assert check_members(["b", "a", "c"]) == ("b", "a", "c")


def test_members_are_named_by_their_part_and_rank():
    class Peers:
        def __init__(self, n):
            self.ranks = list(range(n))

    assert member_names({"trainer": Peers(2), "generator": Peers(1)}) == (
        "trainer/0",
        "trainer/1",
        "generator/0",
    )


def test_an_invitation_names_its_member_and_its_generation_and_hides_what_admits():
    invited = Invitation("weights", 2, 1, ("trainer-0", "generator-0"), "10.0.0.1", 4711, "gloo", "hush")
    assert (invited.member, invited.label) == ("generator-0", "generation 2 of group 'weights'")
    assert "hush" not in repr(invited)
