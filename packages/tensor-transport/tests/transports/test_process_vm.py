"""Memory of other processes: the suite, and what must never give another process's bytes."""

import dataclasses
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from processes import MakingPeer

from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError
from raycrew.tensor_transport.testing import PullCase, check_transport
from raycrew.tensor_transport.transports import ProcessVmTransport, start_of
from raycrew.tensor_transport.transports._choosing import reasons as _reasons
from raycrew.tensor_transport.transports._native import readv

needs_it = pytest.mark.skipif(_reasons.no_process_vm() is not None, reason=str(_reasons.no_process_vm()))


@needs_it
@pytest.mark.hostile
@pytest.mark.slow
def test_conformance():
    check_transport(PullCase(ProcessVmTransport, lambda: MakingPeer(ProcessVmTransport)))


def pulled(transport, offer):
    into = np.zeros(offer.size_bytes, np.uint8)
    transport.pull([offer.whole], [into]).wait(60)
    return into


@needs_it
@pytest.mark.hostile
def test_a_reused_pid_is_not_read():
    with ProcessVmTransport() as transport:
        offer = transport.offer(torch.arange(10))
        other = dataclasses.replace(offer, owner=dataclasses.replace(offer.owner, started=5))
        with pytest.raises(ShardLostError, match="its owner is dead"):
            pulled(transport, other)
        inside = dataclasses.replace(offer, owner=dataclasses.replace(offer.owner, pid_namespace="pid:[1]"))
        with pytest.raises(ShardLostError, match="another container"):
            pulled(transport, inside)


@needs_it
@pytest.mark.hostile
def test_who_has_no_memory_any_more_is_dead():
    """Whoever is killed stays in the process table a while longer than its memory does."""
    holds = "held = bytearray(64 << 20); print(id(held), flush=True); input()"
    for _ in range(10):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-S", "-E", "-c", holds], **pipes) as process:
            address, into = int(process.stdout.readline()), np.zeros(8, np.uint8)
            process.kill()
            with pytest.raises(ProcessLookupError):
                while True:
                    readv.read(process.pid, [address], [into.ctypes.data], [8])
            assert start_of(process.pid) is None


@needs_it
@pytest.mark.hostile
def test_memory_that_is_used_anew_is_not_read():
    with ProcessVmTransport() as transport:
        source = np.full(1000, 1, np.uint8)
        first = transport.offer(source)
        transport.withdraw([first])
        second = transport.offer(source)
        assert second.key.mark_address == first.key.mark_address
        with pytest.raises(StaleHandleError, match="withdrawn"):
            pulled(transport, first)
        transport.withdraw([first])
        assert (pulled(transport, second) == 1).all()
        nowhere = dataclasses.replace(second, key=second.key._replace(mark_address=8))
        with pytest.raises(StaleHandleError, match="no memory there"):
            pulled(transport, nowhere)


@needs_it
@pytest.mark.hostile
def test_what_a_transport_offered_goes_with_it():
    with ProcessVmTransport() as reader:
        dropped = [ProcessVmTransport()]
        offer = dropped.pop().offer(torch.arange(10))
        gc.collect()
        with pytest.raises(StaleHandleError, match="withdrawn"):
            pulled(reader, offer)


@needs_it
@pytest.mark.hostile
def test_a_forked_child_reads_its_parent_and_takes_nothing_away():
    with ProcessVmTransport() as transport:
        offer = transport.offer(torch.arange(10))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transport.withdraw([offer])
                code = 0 if pulled(transport, offer).view(np.int64)[9] == 9 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pulled(transport, offer).view(np.int64)[3] == 3


@pytest.mark.parametrize(
    ("scope", "capable", "refused"),
    [(0, False, False), (1, False, True), (1, True, False), (2, False, True), (3, True, True)],
)
def test_the_scope_of_tracing_is_named(monkeypatch, scope, capable, refused):
    monkeypatch.setattr(_reasons, "_ptrace_scope", lambda: scope)
    monkeypatch.setattr(_reasons, "_may_trace_anybody", lambda: capable)
    monkeypatch.setattr(_reasons, "_refused_call", lambda: None)
    reason = _reasons.no_process_vm()
    assert (reason is not None) == refused
    assert reason is None or f"kernel.yama.ptrace_scope is {scope}" in reason
