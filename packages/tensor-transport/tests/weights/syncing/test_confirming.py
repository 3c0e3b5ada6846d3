"""A version is confirmed while generators load it, and counts no earlier."""

import threading

import pytest
from models import assert_same, weights
from streaming import Generator, Trainer, sync

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory
from raycrew.tensor_transport.weights._directory.record import Record

LATE_S = 20.0


class Beside:
    """A directory that is confirmed something once a generator loads."""

    def __init__(self, directory):
        self._directory, self.loading, self.error = directory, threading.Event(), None

    def ask(self, method, *args):
        if method is Record.confirm:
            assert self.loading.wait(LATE_S), "nobody loads before it is confirmed"
            if self.error is not None:
                raise self.error
        return self._directory.ask(method, *args)


def crew():
    store, directory = InProcessByteStore(), WeightDirectory.local()
    trainer, generator = Trainer(store, directory), Generator(store, directory, rollback="shadow")
    beside = Beside(directory)
    generator.before_load = beside.loading.set
    return trainer, generator, directory, beside


@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_nobody_waits_for_the_confirmation_to_load(prepare):
    trainer, generator, directory, beside = crew()
    report = sync([trainer], [generator], beside, prepare=prepare)
    assert report.version == generator.receiver.version == directory.latest == 1
    assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_what_can_not_be_confirmed_is_given_up_by_who_loaded_it(prepare):
    trainer, generator, directory, beside = crew()
    sync([trainer], [generator], beside, prepare=prepare)
    beside.loading.clear()
    trainer.seed, beside.error = 1, WeightUpdateError("asked for by somebody else")
    with pytest.raises(WeightUpdateError, match="asked for by somebody else"):
        sync([trainer], [generator], beside, prepare=prepare)
    assert generator.receiver.version == directory.latest == 1 and generator.receiver.intact
    assert_same(generator.model.tensors, weights(0))
    trainer.seed, beside.error = 2, None
    sync([trainer], [generator], beside, prepare=prepare)
    assert_same(generator.model.tensors, weights(2))
