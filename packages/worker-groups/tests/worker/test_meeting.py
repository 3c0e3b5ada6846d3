import os
from dataclasses import replace

import pytest

from raycrew.cluster_core import PortsExhaustedError, lease_ports
from raycrew.worker_groups import WorkerGroupError
from raycrew.worker_groups._worker.meeting import MeetingPorts
from raycrew.worker_groups._worker.shell import CurrentWorker, Orders, Shell
from raycrew.worker_groups.sharding._ranks import RankInfo

pytestmark = pytest.mark.hostile

FIRST = RankInfo(0, 2, 0, 2, 0, "node", "127.0.0.1", 0, None, "127.0.0.1", 0, (), "policy")


@pytest.fixture
def three_ports():
    """The first and the last of three ports; who names no range is given other ones."""
    with lease_ports(3, port_range=(7220, 7299), consecutive=True) as lease:
        ports = lease.ports
    return ports[0], ports[-1]


def renewed(worker, port):
    return replace(worker, master_port=port, generation=worker.generation + 1)


def test_each_generation_meets_at_another_port_than_the_one_before(three_ports):
    meeting = MeetingPorts(three_ports)
    worker = replace(FIRST, master_port=meeting.ports[0])
    assert meeting.take(worker) == meeting.ports[1]
    assert meeting.ports[0] == worker.master_port
    for _ in range(6):
        before, port = meeting.ports
        worker = renewed(worker, port)
        assert meeting.take(worker) not in (before, port, 0)
        assert meeting.ports[0] == port


def test_a_generation_that_meets_elsewhere_changes_no_port(three_ports):
    meeting = MeetingPorts(three_ports)
    before = meeting.ports
    for port in (1, 65535):
        assert meeting.take(replace(FIRST, master_port=port)) == before[1]
    assert meeting.ports == before


def test_no_port_for_the_next_generation_is_no_failure_of_this_one(three_ports):
    meeting = MeetingPorts(three_ports)
    with lease_ports(port_range=three_ports) as other:
        old, port = meeting.ports
        assert meeting.take(replace(FIRST, master_port=port, generation=1)) == 0
        assert meeting.ports == (port,)
        with lease_ports(port_range=three_ports) as last:
            assert last.ports == (old,)
            with pytest.raises(PortsExhaustedError):
                meeting.next_port()
        assert meeting.next_port() == meeting.next_port() == old
        assert other.port not in meeting.ports


def test_who_is_not_rank_0_gives_its_ports_back(three_ports):
    meeting = MeetingPorts(three_ports)
    assert meeting.take(replace(FIRST, rank=1, master_port=meeting.ports[0])) == 0
    with lease_ports(3, port_range=three_ports) as lease:
        assert len(lease.ports) == 3


@pytest.fixture
def environment(monkeypatch):
    mine = dict(os.environ)
    monkeypatch.setattr(os, "environ", mine)
    return mine


def test_the_place_is_taken_whether_or_not_a_port_is_free(three_ports, environment):
    shell = Shell()
    shell._raycrew_meeting = MeetingPorts(three_ports)
    port = shell._raycrew_meeting.ports[1]
    worker = CurrentWorker(*vars_of(renewed(FIRST, port)))
    with lease_ports(port_range=three_ports):
        assert shell._raycrew_prepare(Orders(worker, {"COLOUR": "red"})) == 0
    assert (environment["MASTER_PORT"], environment["COLOUR"]) == (str(port), "red")
    assert shell._raycrew_next_port() != port


def test_a_worker_that_could_not_take_its_place_refuses_calls_until_it_has(environment):
    shell = Shell()
    shell._raycrew_instance = []
    worker = CurrentWorker(*vars_of(renewed(FIRST, 29500)))
    with pytest.raises(TypeError):
        shell._raycrew_prepare(Orders(worker, None))
    with pytest.raises(WorkerGroupError, match="could not take its place in generation 1: TypeError"):
        shell._raycrew_bound("append")
    shell._raycrew_prepare(Orders(worker, {}))
    assert not shell._raycrew_misplaced


def vars_of(info):
    return [getattr(info, name) for name in RankInfo.__dataclass_fields__]


def test_no_more_than_two_ports_are_held_however_often_the_next_one_is_asked_for():
    meeting = MeetingPorts(None)
    assert [meeting.next_port() for _ in range(3)] == [meeting.ports[1]] * 3
    assert len(meeting.ports) == 2
    meeting.take(replace(FIRST, rank=1))
    assert meeting.ports == (), "another rank is the first"
    assert meeting.take(replace(FIRST, rank=1)) == 0
