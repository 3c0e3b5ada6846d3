"""What of a model is brought to generators, and as what, within updates by `sync_weights`."""

import math

import pytest
import torch
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import ManifestMismatchError, TransportError
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers, LocalResults
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    digest_weights,
    sync_weights,
)

TIMEOUT_S = 60.0
FLOATS = {name: tensor for name, tensor in weights().items() if tensor.is_floating_point()}


class Trainer:
    def __init__(self, publisher, state):
        self.publisher, self.state, self.partial = publisher, state, False

    def publish_weights(self):
        return self.publisher.publish(self.state, partial=self.partial)


class Generator:
    def __init__(self, store, directory, **options):
        self.model = Model()
        self.receiver = WeightReceiver(self.model.load, store=store, directory=directory, **options)

    def prepare_weights(self, version):
        return self.receiver.prepare(version, timeout_s=TIMEOUT_S)

    def apply_weights(self, version):
        return self.receiver.apply(version, timeout_s=TIMEOUT_S)


class Crew:
    def __init__(self, state, expected=None, store=None, **options):
        self.store, self.directory = store or InProcessByteStore(), WeightDirectory.local(keep=2)
        publisher = WeightPublisher(self.store, directory=self.directory, bucket_bytes=512, **options)
        self.trainer = Trainer(publisher, state)
        receiving = {"expected": expected, "rollback": "shadow"}
        self.generators = [Generator(self.store, self.directory, **receiving) for _ in range(3)]

    def sync(self, **options):
        options = {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S} | options
        peers = LocalPeers([self.trainer]), LocalPeers(self.generators)
        return sync_weights(*peers, directory=self.directory, **options)

    def all_hold(self, state):
        for generator in self.generators:
            assert_same(generator.model.tensors, state)
            assert digest_weights(generator.model.tensors) == digest_weights(state)


def cast(state):
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}


def test_floats_are_cast_and_names_are_those_of_the_receivers():
    names = {name: f"model.{name}" for name in weights()}
    want = {names[name]: tensor for name, tensor in cast(weights()).items()}
    crew = Crew(weights(), expected=want, dtype=torch.bfloat16, rename=names)
    crew.sync()
    crew.all_hold(want)


def test_what_is_not_cast_is_refused_by_who_expects_it_cast_and_nothing_is_fetched():
    crew = Crew(weights(), expected=cast(weights()))
    with pytest.raises(
        ManifestMismatchError, match=r"different: .*receiver has bfloat16.*update has float32"
    ):
        crew.sync()
    assert crew.store.reads == 0
    assert all(generator.receiver.version is None for generator in crew.generators)


def quantise(name, tensor):
    """Each float by eight bits and a scale."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    scale = tensor.abs().max() / 127
    return [(name, (tensor / scale).round().to(torch.int8)), (f"{name}.scale", scale)]


def test_quantised_weights_arrive_with_their_scales():
    want = {}
    for name, tensor in weights().items():
        made = quantise(name, tensor)
        want |= {name: made} if isinstance(made, torch.Tensor) else dict(made)
    crew = Crew(weights(), expected=want, transform=quantise)
    crew.sync()
    crew.all_hold(want)


def test_adapters_alone_are_brought_and_then_what_changed_of_them():
    adapters = {f"layer.{i}.lora_{ab}": torch.full((4, 2), float(i)) for i in range(3) for ab in "ab"}
    state = {f"base.{name}": tensor for name, tensor in (weights() | adapters).items()}
    options = {"select": lambda name: "lora" in name, "rename": lambda name: name.removeprefix("base.")}
    crew = Crew(state, **options)
    whole = crew.sync()
    crew.all_hold(adapters)
    changed = {"layer.1.lora_a": torch.full((4, 2), 7.0)}
    crew.trainer.state, crew.trainer.partial = {f"base.{n}": t for n, t in changed.items()}, True
    part = crew.sync()
    crew.all_hold(adapters | changed)
    assert part.size_bytes < whole.size_bytes / 2


def test_ranks_that_were_no_recipients_come_to_what_a_partial_version_is_added_to():
    state = dict(FLOATS)
    crew = Crew(state)
    crew.sync()
    crew.trainer.partial = True
    for number, recipients in enumerate(([0, 2], None), 1):
        crew.trainer.state = {f"layer.{number}.weight": torch.full((8, 16), float(number))}
        state |= crew.trainer.state
        report = crew.sync(recipients=recipients)
        assert len(report.receipts) == (2 if recipients else 3)
    crew.all_hold(state)
    assert {generator.receiver.version for generator in crew.generators} == {3}


@pytest.mark.hostile
def test_groups_are_told_of_an_infinite_time_as_of_none(monkeypatch):
    """A `RayWorkerGroup` takes finite times alone."""
    told = []
    get_results = LocalResults.get_results

    def noted(self, *, timeout=None):
        told.append(timeout)
        return get_results(self, timeout=timeout)

    monkeypatch.setattr(LocalResults, "get_results", noted)
    crew = Crew(dict(FLOATS))
    crew.sync(timeout_s=math.inf)
    crew.all_hold(FLOATS)
    assert set(told) == {None}


@pytest.mark.hostile
def test_without_room_for_a_version_all_keep_the_one_before():
    state = {f"layer.{i}": torch.full((128,), float(i)) for i in range(8)}
    with SharedMemoryTransport(arena_bytes=1 << 13, max_bytes=1 << 15) as memory:
        crew = Crew(state, store=memory)
        crew.sync()
        others = []
        with pytest.raises(TransportError, match="max_bytes=32768"):
            while True:
                others.append(memory.offer(torch.zeros(1 << 9, dtype=torch.uint8)))
        crew.trainer.state = {name: tensor + 1 for name, tensor in state.items()}
        for _ in range(2):
            with pytest.raises(TransportError, match="max_bytes=32768"):
                crew.sync()
            crew.all_hold(state)
            assert all(g.receiver.intact and g.receiver.version == 1 for g in crew.generators)
        memory.withdraw(others)
        assert crew.sync().version > 1
        crew.all_hold(crew.trainer.state)
