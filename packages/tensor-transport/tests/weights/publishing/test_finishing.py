"""A part is told to be complete while its source is looked at again, where that counts later."""

import os
import threading
from concurrent.futures import Future

import pytest
import torch
from models import assert_same, weights
from streaming import Generator, Trainer, sync

from raycrew.tensor_transport._bytes import sections
from raycrew.tensor_transport.errors import SourceChangedError, UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._publishing.source import SourceWatch

LATE_S = 20.0


class Told(Record):
    """Says when a part is complete."""

    def __init__(self):
        super().__init__(lease_s=1e9)
        self.complete = threading.Event()

    def end(self, *args):
        found = super().end(*args)
        self.complete.set()
        return found


@pytest.fixture
def crew(monkeypatch):
    store, directory = InProcessByteStore(), WeightDirectory.local()
    record = directory._edge._record = Told()
    trainer, generator = Trainer(store, directory), Generator(store, directory, rollback="shadow")
    trainer.held, trainer.looking, check = trainer.mine(), lambda: None, SourceWatch.check
    trainer.mine = lambda: trainer.held

    def look(watch, **how):
        trainer.looking()
        check(watch, **how)

    monkeypatch.setattr(SourceWatch, "check", look)

    def update(**options):
        record.complete.clear()
        return sync([trainer], [generator], directory, publish="publish_mapping", **options)

    update.directory = directory
    return trainer, generator, record, store, update


@pytest.mark.parametrize(("processors", "helpers"), [(2, 0), (4, 1), (64, 3)])
def test_half_of_the_processors_are_left_to_receivers_meanwhile(crew, monkeypatch, processors, helpers):
    trainer, _, _, _, update = crew
    trainer.held, asked = {str(n): torch.ones(1 << 19) for n in range(8)}, []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def look():
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(processors))
        monkeypatch.setattr(sections, "run_beside", lambda work: asked.append(work) or Future())

    trainer.looking = look
    update()
    assert len(asked) == helpers


@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_receivers_hear_that_all_is_there_before_it_was_looked_at_again(crew, prepare):
    trainer, generator, record, _, update = crew
    seen = []
    trainer.looking = lambda: seen.append(record.complete.wait(LATE_S))
    update(prepare=prepare)
    assert seen == [True]
    assert_same(generator.model.tensors, trainer.held)


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_nothing_stays_of_what_was_complete_and_had_changed(crew, prepare):
    trainer, generator, record, store, update = crew
    update(prepare=prepare)
    before, held = {name: tensor.clone() for name, tensor in trainer.held.items()}, len(store.held)

    def write():
        assert record.complete.wait(LATE_S)
        max(trainer.held.values(), key=torch.Tensor.numel).data.fill_(7)

    trainer.looking = write
    with pytest.raises(SourceChangedError):
        update(prepare=prepare)
    assert record.versions[2].state == "aborted" and "SourceChangedError" in record.versions[2].reason
    assert generator.receiver.version == record.newest(0) == 1 and generator.receiver.intact
    assert_same(generator.model.tensors, before)
    assert len(store.held) == held
    trainer.looking = lambda: None
    update(prepare=prepare)
    assert_same(generator.model.tensors, trainer.held)


@pytest.mark.hostile
def test_a_part_is_not_complete_whose_last_bucket_could_not_be_put(crew):
    _, generator, record, store, update = crew
    update()
    put, held = store.put, len(store.held)

    def full(data):
        if len(store.held) == 2 * held - 1:
            raise OSError("no space left")
        return put(data)

    store.put = full
    with pytest.raises(OSError, match="no space left"):
        update()
    assert not record.complete.is_set() and record.versions[2].state == "aborted"
    assert generator.receiver.version == 1 and len(store.held) == held


@pytest.mark.hostile
def test_what_nobody_asked_for_is_complete_once_it_was_looked_at(crew):
    """It counts at once."""
    trainer, _, record, _, _ = crew
    seen = []
    trainer.looking = lambda: seen.append(record.complete.is_set())
    trainer.publish_mapping()
    assert seen == [False] and record.newest(0) == 1


@pytest.mark.hostile
def test_a_publisher_without_a_directory_goes_on_as_ever(crew):
    trainer, _, _, store, _ = crew
    with WeightPublisher(store, bucket_bytes=512) as publisher:
        assert len(publisher.publish(trainer.held).buckets) > 2


def test_who_can_return_loads_while_it_is_looked_at_again(crew):
    trainer, generator, _, _, update = crew
    update(prepare="prepare_weights")
    loaded, seen = threading.Event(), []
    generator.before_load = loaded.set
    trainer.looking = lambda: seen.append(loaded.wait(LATE_S))
    update(prepare="prepare_weights")
    assert seen == [True]
    assert_same(generator.model.tensors, trainer.held)


@pytest.mark.hostile
def test_what_was_loaded_and_had_changed_is_returned_from(crew):
    trainer, generator, record, _, update = crew
    update(prepare="prepare_weights")
    before, loaded = {name: tensor.clone() for name, tensor in trainer.held.items()}, threading.Event()
    generator.before_load = loaded.set

    def write():
        assert loaded.wait(LATE_S)
        max(trainer.held.values(), key=torch.Tensor.numel).data.fill_(7)

    trainer.looking = write
    with pytest.raises(SourceChangedError) as caught:
        update(prepare="prepare_weights")
    assert not any("not resumed" in note for note in caught.value.__notes__)
    assert generator.events[-3:] == ["stop", "apply", "go"]
    assert generator.receiver.version == record.newest(0) == 1 and generator.receiver.intact
    assert_same(generator.model.tensors, before)


@pytest.mark.hostile
def test_generators_go_on_with_what_they_had_while_a_trainer_looks_for_ever(crew):
    trainer, generator, record, _, update = crew
    update(prepare="prepare_weights")
    before, resumed = {name: tensor.clone() for name, tensor in trainer.held.items()}, threading.Event()
    trainer.held = {name: tensor.clone() for name, tensor in weights(1).items()}
    trainer.looking, generator.go = lambda: resumed.wait(LATE_S), resumed.set
    with pytest.raises(UpdateAbortedError, match="deadline"):
        update(prepare="prepare_weights", timeout_s=1.0)
    assert resumed.is_set() and record.newest(0) == 1 and generator.receiver.intact
    assert_same(generator.model.tensors, before)


@pytest.mark.hostile
@pytest.mark.parametrize("rollback", ["none", "refetch", "shadow"])
def test_who_has_nothing_at_hand_to_return_to_loads_what_was_looked_at(crew, rollback):
    """Of a first version, nobody has."""
    trainer, generator, record, store, update = crew
    generator.receiver = WeightReceiver(
        generator.load, store=store, directory=update.directory, rollback=rollback
    )
    if rollback != "shadow":
        update(prepare="prepare_weights")
    version, loaded = generator.receiver.version, threading.Event()
    generator.before_load = loaded.set

    def write():
        assert record.complete.wait(LATE_S) and not loaded.wait(0.2)
        max(trainer.held.values(), key=torch.Tensor.numel).data.fill_(7)

    trainer.looking = write
    with pytest.raises(SourceChangedError):
        update(prepare="prepare_weights")
    assert not loaded.is_set() and "stop" not in generator.events[-2:]
    assert generator.receiver.version == version and generator.receiver.intact
