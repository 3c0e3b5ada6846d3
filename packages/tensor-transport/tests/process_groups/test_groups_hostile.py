"""Groups among peers that stand still, ports that others took, forks, threads, and each other."""

import asyncio
import os
import signal
import socket
import threading

import pytest
import torch
from group_members import Crew

from raycrew.tensor_transport.errors import (
    GroupTimeoutError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.process_groups import GroupHost, _join, join_group

pytestmark = pytest.mark.hostile
NAMES = ("trainer/0", "generator/0")


@pytest.fixture(scope="module")
def crew():
    crew = Crew(NAMES)
    yield crew
    crew.close()


def failure(member):
    with pytest.raises(TransportError) as caught:
        member.result()
    return caught.value


def send(group, value, timeout_s=60):
    group.send([torch.full((9,), value)], timeout_s=timeout_s).wait()


def receive(group, timeout_s=60):
    data = torch.zeros(9)
    group.receive([data], timeout_s=timeout_s).wait()
    return data.tolist()


def lifeline_of(group):
    return group._lifeline.endpoint


def test_a_member_is_lost_though_somebody_else_has_its_port_by_now(crew):
    trainer, generator = crew.join()
    port = generator.call(lifeline_of)[1]
    os.kill(generator.pid, signal.SIGKILL)
    generator.process.join(60)
    with socket.create_server(("127.0.0.1", port)):
        trainer.begin(send, 1.0)
        error = failure(trainer)
    assert type(error) is PeerLostError and error.members == ("generator/0",)


def test_a_member_that_stands_still_before_it_connects_is_named(crew):
    trainer, generator = crew.join()
    generator.call(stop_before_connecting)
    invitations = crew.host.open()
    for member, invitation in zip((trainer, generator), invitations, strict=True):
        member.begin("join", invitation, 4.0)
    try:
        error = failure(trainer)
    finally:
        os.kill(generator.pid, signal.SIGCONT)
    assert type(error) is GroupTimeoutError and error.members == ("generator/0",)
    assert "generator/0 of generation" in str(error)
    assert isinstance(failure(generator), TransportError)


def stop_before_connecting(group):
    connect = _join.fabric_for

    def stop(*args):
        _join.fabric_for = connect
        os.kill(os.getpid(), signal.SIGSTOP)
        return connect(*args)

    _join.fabric_for = stop


def test_what_waits_for_its_turn_heeds_its_own_deadline_and_is_cancelled_at_once(crew):
    trainer, generator = crew.join()
    assert trainer.call(give_up_behind_another) == ["TransportTimeoutError", "TransferCancelledError"]
    assert generator.call(receive) == [1.0] * 9
    for _ in range(2):
        generator.begin(receive)
        assert "cancelled it" in str(failure(generator))
    trainer.begin(send, 2.0)
    assert generator.call(receive) == [2.0] * 9
    trainer.result()


def give_up_behind_another(group):
    group.send([torch.full((9,), 1.0)], timeout_s=60)
    late = group.send([torch.zeros(9)], timeout_s=0.05)
    cancelled = group.send([torch.zeros(9)], timeout_s=60)
    found = [type(late.exception(30)).__name__]
    cancelled.cancel()
    return [*found, type(cancelled.exception(0)).__name__]


def test_a_forked_child_does_not_wait_for_its_parents_operations(crew):
    trainer, generator = crew.join()
    assert "from which this one was forked" in trainer.call(wait_in_child)
    assert generator.call(receive) == [1.0] * 9
    trainer.begin(send, 2.0)
    assert generator.call(receive) == [2.0] * 9
    trainer.result()


def wait_in_child(group):
    transfer = group.send([torch.full((9,), 1.0)], timeout_s=60)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writer, str(transfer.exception(5)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    os.waitpid(pid, 0)
    return text


def test_an_event_loop_waits_for_operations_and_ends_them(crew):
    trainer, generator = crew.join()
    trainer.begin(send_awaited)
    assert generator.call(receive) == [5.0] * 9
    assert trainer.result() == "nobody came"


def send_awaited(group):
    async def both():
        await group.send([torch.full((9,), 5.0)], timeout_s=60)
        try:
            await asyncio.wait_for(group.send([torch.zeros(9)], timeout_s=60), 0.2)
        except TimeoutError:
            return "nobody came"

    return asyncio.run(both())


def test_two_groups_of_the_same_processes_go_on_at_the_same_time(crew):
    with GroupHost("other", NAMES, backend="gloo", address="127.0.0.1") as host:
        trainer, generator = crew.join()
        for member, invitation in zip((trainer, generator), host.open(), strict=True):
            member.begin(exchange_in_both, invitation)
        assert [member.result() for member in (trainer, generator)] == [True, True]


def exchange_in_both(group, invitation):
    """Send in one direction in one group and in the other one in the other, at once, and compare."""
    right = []

    def exchange(own, root, seed):
        for turn in range(6):
            wanted = torch.arange(1 << 20) * (seed + turn)
            if own.rank == root:
                own.send([wanted], timeout_s=60).wait()
                continue
            found = torch.zeros(1 << 20, dtype=torch.int64)
            own.receive([found], timeout_s=60).wait()
            right.append(torch.equal(found, wanted))

    with join_group(invitation) as other:
        threads = [
            threading.Thread(target=exchange, args=args) for args in ((group, 0, 100), (other, 1, 1000))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    return right == [True] * 6


@pytest.mark.long
def test_a_host_that_stands_still_ends_an_operation_all_the_same(crew):
    """In short: no answer of a store is waited for without an end."""
    trainer, generator = crew.join()
    with Stopped() as host:
        for member, invitation in zip((trainer, generator), host.invitations, strict=True):
            member.begin("join", invitation, 60)
        for member in (trainer, generator):
            member.result()
        host.stop()
        trainer.begin(send, 1.0, 2.0)
        generator.begin(receive, 2.0)
        for member in (trainer, generator):
            assert isinstance(failure(member), TransportTimeoutError)
    crew.join()
    trainer.begin(send, 2.0)
    assert generator.call(receive) == [2.0] * 9
    trainer.result()


class Stopped:
    """A host in a process of its own, that can be stopped."""

    def __enter__(self):
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs,), daemon=True)
        self.process.start()
        self.invitations = self.pipe.recv()
        return self

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def __exit__(self, *_):
        self.process.kill()
        self.process.join(60)


def hold(pipe):
    with GroupHost("weights", NAMES, backend="gloo", address="127.0.0.1") as host:
        pipe.send(host.open())
        pipe.recv()
