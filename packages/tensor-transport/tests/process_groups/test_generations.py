"""Arriving, being late, being stale, dying, forking: over real processes and gloo."""

import logging
import os
import signal
import socket
import threading

import pytest
import torch
from group_members import Crew

from raycrew.tensor_transport.errors import (
    GroupError,
    GroupTimeoutError,
    PeerLostError,
    StaleGenerationError,
    TransportClosedError,
    TransportError,
)
from raycrew.tensor_transport.process_groups import GroupHost, join_group

NAMES = ("trainer/0", "generator/0")


@pytest.fixture(scope="module")
def crew():
    crew = Crew(NAMES)
    yield crew
    crew.close()


def send(group, value, manifest="", timeout_s=60):
    group.send([torch.full((9,), value)], manifest=manifest, timeout_s=timeout_s).wait()


def receive(group, manifest="", timeout_s=60):
    data = torch.zeros(9)
    group.receive([data], manifest=manifest, timeout_s=timeout_s).wait()
    return data.tolist()


def failure(member):
    with pytest.raises(TransportError) as caught:
        member.result()
    return caught.value


def exchange(first, second, value=3.0):
    first.begin(send, value)
    assert second.call(receive) == [value] * 9
    first.result()


def test_every_generation_has_a_port_that_nobody_else_gets(crew):
    places = [(i[0].port, i[0].generation) for i in (crew.host.open() for _ in range(3))]
    assert places[0][0] != places[1][0] != places[2][0]
    assert [generation for _, generation in places] == list(range(places[0][1], places[0][1] + 3))
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", places[2][0]))


def test_a_deadline_names_who_did_not_arrive(crew):
    invitations = crew.host.open()
    member = crew.replace_dead()[1]
    member.begin("join", invitations[1], 1.0)
    error = failure(member)
    assert type(error) is GroupTimeoutError
    assert error.members == ("trainer/0",)
    assert "trainer/0 did not arrive in generation" in str(error)
    # Who comes later hears the same, at once, instead of waiting for those who have gone.
    with pytest.raises(GroupTimeoutError, match="trainer/0 did not arrive"):
        join_group(invitations[0], timeout_s=60)


@pytest.mark.hostile
def test_an_invitation_serves_one_process(crew):
    invitations = crew.host.open()
    trainer, generator = crew.join(invitations)
    with pytest.raises(GroupError, match=r"trainer/0 .* has joined .* already"):
        join_group(invitations[0], timeout_s=60)
    exchange(trainer, generator)


@pytest.mark.hostile
def test_a_stale_member_is_fenced_off_and_the_next_generation_works(crew):
    trainer, generator = crew.join()
    stale = crew.host.open()
    trainer.begin(send, 1.0)
    error = failure(trainer)
    assert type(error) is StaleGenerationError
    assert "is over" in str(error)
    crew.join()
    for invitation in stale:  # even if nobody had used it
        with pytest.raises(StaleGenerationError):
            join_group(invitation, timeout_s=30)
    crew.host.open()
    with pytest.raises(StaleGenerationError, match=r"nothing listens there|another store"):
        join_group(stale[0], timeout_s=30)
    crew.join()
    exchange(trainer, generator)


@pytest.mark.hostile
def test_a_port_that_now_serves_another_generation_is_recognised(crew):
    import dataclasses

    old, new = crew.host.open()[0], crew.host.open()[0]
    with pytest.raises(StaleGenerationError, match="another store listens there"):
        join_group(dataclasses.replace(old, port=new.port), timeout_s=30)


@pytest.mark.hostile
def test_a_restarted_member_joins_the_next_generation(crew):
    trainer, generator = crew.join()
    os.kill(generator.pid, signal.SIGKILL)
    trainer.begin(send, 1.0)
    error = failure(trainer)
    assert type(error) is PeerLostError
    assert error.members == ("generator/0",)
    trainer.begin(send, 1.0)
    assert type(failure(trainer)) is PeerLostError  # for good
    trainer, generator = crew.join()
    exchange(trainer, generator)


@pytest.mark.hostile
def test_a_member_that_leaves_while_another_waits_is_named(crew):
    trainer, generator = crew.join()
    generator.begin(receive)
    trainer.call(_close)
    error = failure(generator)
    assert type(error) is PeerLostError
    assert "trainer/0 left" in str(error)


@pytest.mark.hostile
def test_a_generation_that_ends_while_a_member_waits_ends_the_wait(crew):
    _, generator = crew.join()
    generator.begin(receive)
    crew.host.open()
    assert type(failure(generator)) is StaleGenerationError


@pytest.mark.hostile
def test_a_cancelled_operation_is_told_to_the_others_and_another_version_is_never_mixed_in(crew):
    trainer, generator = crew.join()
    trainer.begin(send, 7.0, "version 7")
    generator.begin(receive, "version 8")
    for member in (trainer, generator):
        assert "version 7" in str(failure(member))
    exchange(trainer, generator)
    trainer.call(_send_two_and_cancel_the_second)  # Before anybody takes the first.
    assert generator.call(_receive_two) == "GroupMismatchError"
    assert trainer.call(_outcome_of_the_second) == "TransferCancelledError"
    exchange(trainer, generator, 5.0)


@pytest.mark.hostile
def test_a_forked_child_can_neither_use_nor_end_its_parents_group(crew):
    trainer, generator = crew.join()
    assert "was forked from it" in trainer.call(_use_in_child)
    exchange(trainer, generator)


def test_a_default_group_of_the_process_goes_on_beside_it(crew):
    trainer, generator = crew.join()
    with socket.socket() as lease:
        lease.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{lease.getsockname()[1]}"
    trainer.begin(_with_default_group, address, 0)
    assert generator.call(_with_default_group, address, 1) == [3.0, [4.0] * 9, 3.0]
    assert trainer.result() == [3.0, None, 3.0]


def test_a_closed_group_says_so(crew):
    trainer, _ = crew.join()
    assert trainer.call(_use_after_close) == ["TransportClosedError", "it is closed"]


def test_a_closed_host_opens_nothing_and_tells_its_members():
    host = GroupHost("g", ["only"], backend="gloo")
    with join_group(host.open()[0]) as group:
        host.close()
        host.close()
        with pytest.raises(StaleGenerationError, match="closed"):
            group.send([torch.ones(3)], timeout_s=30).wait()
    with pytest.raises(TransportClosedError):
        host.open()


def test_a_group_of_one_sends_to_nobody():
    with GroupHost("g", ["only"], backend="gloo") as host, join_group(host.open()[0]) as group:
        group.send([torch.ones(3)], timeout_s=30).wait()
        assert (group.rank, group.world_size, group.generation, group.name) == (0, 1, 1, "gloo")
        assert "every member can use it" in group.explain()


@pytest.mark.hostile
def test_invitations_are_those_of_the_generation_that_was_opened(caplog):
    """Another thread opens the next one before they are handed out."""
    later = []

    def open_next(_):
        while not later:
            later.append(None)
            thread = threading.Thread(target=lambda: later.extend(host.open()))
            thread.start()
            thread.join()
        return True

    logger = logging.getLogger("raycrew.tensor_transport.process_groups._host")
    with GroupHost("g", ["first", "second"]) as host, caplog.at_level(logging.INFO, logger.name):
        logger.addFilter(open_next)
        try:
            invited = host.open()
        finally:
            logger.removeFilter(open_next)
        assert [(i.generation, i.rank) for i in invited] == [(1, 0), (1, 1)]
        assert [(i.generation, i.rank) for i in later[1:]] == [(2, 0), (2, 1)]
        assert len({(i.port, i.token) for i in invited}) == 1 and invited[0].token != later[1].token


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), True])
def test_a_deadline_is_a_positive_number(timeout_s):
    with GroupHost("g", ["only"]) as host, pytest.raises(ValueError, match="timeout_s"):
        join_group(host.open()[0], timeout_s=timeout_s)


def _close(group):
    group.close()


_sent = []


def _send_two_and_cancel_the_second(group):
    _sent[:] = [group.send([torch.ones(3)], timeout_s=60) for _ in range(2)]
    _sent[1].cancel()


def _outcome_of_the_second(group):
    _sent[0].wait()
    return type(_sent[1].exception(60)).__name__


def _receive_two(group):
    transfers = [group.receive([torch.zeros(3)], timeout_s=60) for _ in range(2)]
    transfers[0].wait()
    return type(transfers[1].exception(60)).__name__


def _use_in_child(group):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            group.send([torch.ones(3)])
        except TransportError as error:
            os.write(writer, str(error).encode())
        group.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def _with_default_group(group, address, rank):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found = []
    try:
        for step in range(3):
            if step == 1:
                found.append(receive(group) if rank else send(group, 4.0))
            else:
                value = torch.tensor(float(rank + 1))
                dist.all_reduce(value)
                found.append(value.item())
    finally:
        dist.destroy_process_group()
    return found


def _use_after_close(group):
    group.close()
    try:
        group.send([torch.ones(3)])
    except TransportClosedError as error:
        return [type(error).__name__, group.available()]
