"""Generators that an update has paused stay so while it loads, whatever one resumes that was given up."""

import asyncio
import threading

import pytest
import streaming
import torch
from streaming import TIMEOUT_S, Trainer

from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.weights import WeightDirectory, sync_weights, sync_weights_async

pytestmark = pytest.mark.hostile


class Generator(streaming.Generator):
    """Notes what it loads while it is not paused."""

    def __init__(self, store, directory):
        super().__init__(store, directory, rollback="shadow")
        self.is_paused, self.unpaused = False, []

    def stop(self):
        super().stop()
        self.is_paused = True

    def go(self):
        super().go()
        self.is_paused = False

    def load(self, tensors):
        self.before_load()
        for name, tensor in tensors:
            self.model.load([(name, tensor)])
            if not self.is_paused:
                self.unpaused.append(name)


class Crew:
    def __init__(self, count=1):
        store, self.directory = InProcessByteStore(), WeightDirectory.local(keep=2)
        self.trainer = Trainer(store, self.directory)
        self.generators = [Generator(store, self.directory) for _ in range(count)]
        self.groups = [LocalPeers([generator]) for generator in self.generators]
        self.options = {"directory": self.directory, "pause": "stop", "resume": "go", "timeout_s": TIMEOUT_S}

    def update(self, groups=None, **options):
        trainer = LocalPeers([self.trainer])
        return sync_weights_async(trainer, groups or self.groups, **self.options | options)


@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_an_update_pauses_generators_once_the_one_that_was_cancelled_has_resumed_them(prepare):
    crew = Crew()
    (generator,) = crew.generators
    loading, go_on = threading.Event(), threading.Event()

    def stand_still():
        loading.set()
        assert go_on.wait(TIMEOUT_S)

    async def run():
        await crew.update(prepare=prepare)
        generator.before_load, crew.trainer.seed = stand_still, 1
        first = asyncio.create_task(crew.update(prepare=prepare))
        await asyncio.to_thread(loading.wait, TIMEOUT_S)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(crew.update())
        while not {s.version for s in crew.directory.status() if s.state == "complete"}:
            await asyncio.sleep(0.01)  # Until all is published: it has nothing to do but to pause.
        await asyncio.sleep(0.1)
        go_on.set()
        return await second

    report = asyncio.run(run())
    assert generator.receiver.version == report.version == crew.directory.latest > 1
    assert not generator.unpaused and not generator.is_paused
    told = [event for event in generator.events if event in ("stop", "go")]
    assert told == ["stop", "go"] * 3


def test_groups_in_any_order_are_paused_by_one_at_a_time():
    crew = Crew(2)

    async def run():
        first, second = crew.groups
        for _ in range(10):
            updates = [crew.update([first, second]), crew.update([second, first])]
            await asyncio.gather(*updates, return_exceptions=True)
        return await crew.update()

    assert asyncio.run(run()).version == crew.directory.latest
    for generator in crew.generators:
        assert not generator.unpaused and not generator.is_paused


def test_who_waits_for_its_turn_has_a_deadline_and_one_within_another_is_refused():
    crew = Crew()
    (generator,) = crew.generators
    others, raised = Crew(), []

    def update_within(step):
        if step.phase == "apply":
            for timeout_s, run in ((TIMEOUT_S, lambda act: act()), (0.2, in_a_thread)):
                with pytest.raises((TransportError, TransportTimeoutError)) as error:
                    run(lambda timeout_s=timeout_s: update_again(timeout_s))
                raised.append(error.value)

    def update_again(timeout_s):
        options = others.options | {"timeout_s": timeout_s}
        return sync_weights(LocalPeers([others.trainer]), crew.groups, **options)

    def in_a_thread(act):
        async def away():
            return await asyncio.to_thread(act)

        return asyncio.run(away())

    assert (
        sync_weights(LocalPeers([crew.trainer]), crew.groups, **crew.options, progress=update_within).version
        == 1
    )
    assert [type(error) for error in raised] == [TransportError, TransportTimeoutError]
    assert all("pauses these generators" in str(error) for error in raised)
    assert generator.receiver.version == 1 and not generator.is_paused
    assert torch.equal(generator.model.tensors["ids"], torch.arange(7))
