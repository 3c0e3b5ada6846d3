"""In which order a group over NCCL queues things on the device: by a fake one, and on GPUs by values."""

import contextlib
import gc
import itertools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from group_members import Crew

from raycrew.tensor_transport.process_groups import GroupHost, _join, join_group
from raycrew.tensor_transport.process_groups._broadcasting import CollectiveGroup, nccl
from raycrew.tensor_transport.process_groups._broadcasting.nccl import NcclFabric
from raycrew.tensor_transport.process_groups._broadcasting.session import Party

DEVICE = torch.device("cuda", 3)


class FakeCuda:
    """Streams that are done when somebody has looked often enough, and a log of what they were given."""

    def __init__(self, monkeypatch):
        self.log, self.here, self.error = [], threading.local(), SimpleNamespace(value=0)
        self.names = itertools.cycle(["own", "behind"])
        for name in ("Stream", "stream", "current_stream", "device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        made = {"Options": SimpleNamespace, "__new__": lambda _, *args: self.group()}
        monkeypatch.setattr(dist, "ProcessGroupNCCL", type("FakeGroup", (), made), raising=False)

    def Stream(self, device):
        return FakeStream(self, next(self.names), device)

    def current_stream(self, device):
        return getattr(self.here, "stream", None) or FakeStream(self, "caller's", device)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here.stream = getattr(self.here, "stream", None), stream
        yield
        self.here.stream = before

    @contextlib.contextmanager
    def device(self, device):
        self.log.append(f"device {device}")
        yield

    def group(self):
        def say(what):
            self.log.append(what.format(self.current_stream(DEVICE).name))

        def begin(tensor, root):
            say("broadcast after the {} stream")
            return SimpleNamespace(wait=lambda: say("the {} stream goes on after it"))

        return SimpleNamespace(
            broadcast=begin,
            eager_connect_single_device=lambda device: say(f"connect {device}"),
            get_error=lambda: self.error,
            abort=lambda: None,
        )


class FakeStream:
    def __init__(self, cuda, name, device):
        self.cuda, self.name, self.device, self.looks = cuda, name, device, 0

    def record_event(self):
        self.cuda.log.append(f"mark on the {self.name} stream of {self.device}")
        return SimpleNamespace(query=self._query, name=self.name)

    def wait_event(self, event):
        self.cuda.log.append(f"the {self.name} stream waits for the {event.name} one")

    def _query(self):
        """Copies go on for a while after the broadcast has ended."""
        self.looks += 1
        if self.looks == 3:
            self.cuda.log.append(f"the {self.name} stream is done")
        return self.looks >= 3


class Alone(Party):
    """Whose other members want what it wants."""

    def __init__(self, cuda, fabric):
        invitation = SimpleNamespace(label="a group", members=("a",), member="a", rank=0)
        super().__init__(invitation, SimpleNamespace(blame=lambda _: None, close=lambda: None), None, fabric)
        self.cuda = cuda

    def agree(self, turn, wish, guard):
        return 0

    def check(self, guard, what, missing=()):
        guard.check()

    def confirm(self, turn, guard):
        self.cuda.log.append("confirm")


@pytest.mark.hostile
@pytest.mark.parametrize("role", ["send", "receive"])
def test_bytes_leave_after_they_were_written_and_are_confirmed_when_they_are_there(monkeypatch, role):
    cuda = FakeCuda(monkeypatch)
    fabric = NcclFabric(None, 0, 2, DEVICE)
    assert cuda.log == ["device cuda:3", "connect cuda:3"]
    cuda.log.clear()
    monkeypatch.setattr(fabric, "device", torch.device("cpu"))  # Where the buffers of this test are.
    lifeline = SimpleNamespace(close=lambda: None)
    group = CollectiveGroup(Alone(cuda, fabric), lifeline, SimpleNamespace(name="nccl", candidates=[]))
    try:
        getattr(group, role)([torch.zeros(9), torch.zeros(5)], timeout_s=60).wait()
    finally:
        group.close()
    assert cuda.log == [
        "mark on the caller's stream of cpu",
        "the own stream waits for the caller's one",
        "broadcast after the own stream",
        "the behind stream goes on after it",
        "mark on the behind stream of cuda:3",
        "the behind stream is done",
        "mark on the own stream of cuda:3",
        "the own stream is done",
        "confirm",
    ]


@pytest.mark.hostile
def test_a_broadcast_that_nccl_gave_up_is_no_broadcast_that_is_done(monkeypatch):
    """The device never comes to its end."""
    cuda = FakeCuda(monkeypatch)
    fabric = NcclFabric(None, 0, 2, DEVICE)
    monkeypatch.setattr(FakeStream, "_query", lambda _: False)
    work = fabric.broadcast(torch.zeros(9), 0, 60)
    assert not fabric.wait(work, 0.01) and not fabric.settle(0.01)
    cuda.error = SimpleNamespace(value=2, name="COMM_ERROR")
    for waits in (partial(fabric.wait, work), fabric.settle):
        with pytest.raises(RuntimeError, match="NCCL failed: COMM_ERROR"):
            waits(60)


@pytest.mark.hostile
def test_a_join_that_hangs_holds_nobody_up_and_leaves_no_variables(monkeypatch):
    """Members that join two groups in opposite order wait for each other while they connect, and go on."""
    variable = "TORCH_NCCL_ENABLE_MONITORING"
    monkeypatch.delenv(variable, raising=False)
    cuda, seen, both = FakeCuda(monkeypatch), [], threading.Barrier(2, timeout=30)

    def connect(device):
        both.wait()
        seen.append(os.environ.get(variable))

    def group():
        seen.append(os.environ.get(variable))
        return SimpleNamespace(eager_connect_single_device=connect)

    monkeypatch.setattr(cuda, "group", group)
    with ThreadPoolExecutor() as pool:
        for joining in [pool.submit(NcclFabric, None, 0, 2, DEVICE) for _ in range(2)]:
            joining.result()
    assert sorted(seen, key=str) == ["0", "0", None, None]


@pytest.mark.hostile
def test_a_device_that_stands_still_holds_up_nobody_and_frees_nothing(monkeypatch):
    FakeCuda(monkeypatch)
    goes_on, returned = threading.Event(), threading.Event()
    waits = {"synchronize": lambda device: goes_on.wait(60)}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits["synchronize"](device))
    monkeypatch.setattr(nccl, "_END_S", 0.1)
    fabric, buffer = NcclFabric(None, 0, 2, DEVICE), torch.zeros(9)
    freed = threading.Event()
    weakref.finalize(buffer, freed.set)

    def end(held):
        fabric.end([], held)
        returned.set()

    ending = threading.Thread(target=end, args=([buffer],), daemon=True)
    ending.start()
    del buffer
    assert returned.wait(30)
    ending.join()
    gc.collect()
    assert not freed.is_set()
    goes_on.set()
    assert freed.wait(30)
    waits["synchronize"] = lambda device: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fabric.end([])


def test_the_device_is_that_of_the_thread_that_joins(monkeypatch):
    """Each thread has a current device of its own, and the group is made in another one."""
    chosen, here = [], threading.current_thread()
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: False
    )  # What it says of itself is not asked here.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.current_thread() is here else 0)
    monkeypatch.setattr(_join, "choose_backend", lambda *_: SimpleNamespace(name="nccl"))

    def connect(backend, store, rank, seats, timeout_s, device):
        assert threading.current_thread() is not here
        chosen.append(device)
        raise RuntimeError("there is no such device")

    monkeypatch.setattr(_join, "fabric_for", connect)
    with GroupHost("weights", ["a"], address="127.0.0.1") as host, pytest.raises(Exception, match="no such"):
        join_group(host.open()[0])
    assert chosen == [DEVICE]


def busy(value):
    """A large tensor that is being written on a stream which nobody waits for."""
    made = torch.zeros(1 << 26, device="cuda")
    for _ in range(50):
        made += value / 50
    return made


def send_busy(group):
    with torch.cuda.stream(torch.cuda.Stream()):
        group.send([busy(50.0), busy(100.0)[:7]], timeout_s=60).wait()


def receive_busy(group):
    with torch.cuda.stream(torch.cuda.Stream()):
        targets = [busy(1.0), busy(2.0)[:7]]
        transfer = group.receive(targets, timeout_s=60)
    transfer.wait()
    return [(target.min().item(), target.max().item()) for target in targets]


@pytest.mark.gpu
@pytest.mark.hostile
def test_nccl_moves_what_was_still_being_written():
    crew = Crew(("trainer/0", "generator/0"), backend="nccl")
    try:
        first, second = crew.join()
        for _ in range(3):
            first.begin(send_busy)
            assert second.call(receive_busy) == [(50.0, 50.0), (100.0, 100.0)]
            first.result()
    finally:
        crew.close()
