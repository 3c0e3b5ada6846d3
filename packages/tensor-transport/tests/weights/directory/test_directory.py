"""Versions that stream through a directory, between threads of one process."""

import asyncio
import dataclasses
import math
import threading

import pytest
import torch
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.errors import (
    BaseVersionError,
    BucketFetchError,
    DirectoryLostError,
    ManifestMismatchError,
    StaleVersionError,
    TransportClosedError,
    TransportTimeoutError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    sync_weights,
    sync_weights_async,
)
from raycrew.tensor_transport.weights._directory import RecipientVersion, Record

CLOCKS_S = 5.0
"""So far the clock of spans may be from the one that whole times are measured by."""


def phases_of(report, rank):
    return {span.phase for span in report.spans if span.rank == rank}


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    with WeightDirectory.local() as directory:
        yield directory


@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
def test_parts_of_two_ranks_reach_two_generators(store, directory, prepare, publish):
    trainers = [Trainer(store, directory, part, 2) for part in range(2)]
    generators = [Generator(store, directory), Generator(store, directory)]
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.seed = version
        # LocalPeers calls ranks one after another, and the version ends with the last.
        report = sync(trainers, generators, directory, prepare=prepare, publish=publish)
        assert report.version == version
        assert {span.rank for span in report.spans} == {
            "trainer",
            "generators",
            "generator 0",
            "generator 1",
        }
        assert phases_of(report, "trainer") == {"gather", "put"}
        assert phases_of(report, "generators") == {"pause"}
        for number in range(2):
            assert phases_of(report, f"generator {number}") == {"wire", "load"}
        paused = next(span for span in report.spans if span.phase == "pause")
        for span in report.spans:
            assert 0 <= span.start_s <= span.end_s <= report.total_s + CLOCKS_S
            if span.phase == "load":
                assert paused.start_s <= span.start_s and span.end_s <= paused.end_s
            if span.phase == "wire" and prepare:
                assert span.end_s <= paused.start_s, "what is fetched before is fetched while they serve"
        for generator in generators:
            assert_same(generator.model.tensors, weights(version))
            assert generator.receiver.version == version
    assert generators[0].events[-4:] == (["prepare"] if prepare else ["go"]) + ["stop", "apply", "go"]
    (status,) = [s for s in directory.status() if s.state == "committed" and s.size_bytes]
    assert status.version == 3
    assert status.holders == tuple(sorted(g.receiver.name for g in generators))
    assert len(store.held) == sum(len(t.publisher.publish(t.mine(), version=4).buckets) for t in trainers)


def test_a_bucket_is_fetched_before_the_next_tensor_is_made(store, directory):
    """What the receiver has decides how far the publisher goes: no bucket waits for the last one."""
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    seen = threading.Event()
    generator.model.load = lambda tensors: [seen.set() for _ in tensors]

    def wait_for_the_first(name):
        if name == sorted(weights())[-1] and not seen.wait(TIMEOUT_S):
            raise TimeoutError("nothing was loaded before the last tensor was made")

    trainer.before_each = wait_for_the_first
    sync([trainer], [generator], directory)
    assert generator.receiver.version == 1


@pytest.mark.parametrize("rollback", ["shadow", "refetch"])
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_a_load_that_fails_half_way_gives_the_version_up_for_all(store, directory, rollback, prepare):
    trainer = Trainer(store, directory)
    generators = [Generator(store, directory, rollback=rollback) for _ in range(2)]
    sync([trainer], generators, directory)
    trainer.seed = 1
    broken = generators[1].model
    load, calls = broken.load, []

    def half(tensors):
        calls.append(1)
        if len(calls) > 1:
            return load(tensors)
        name, tensor = next(tensors)
        broken.tensors[name] = tensor.clone()
        raise RuntimeError("no room")

    broken.load = half
    with pytest.raises(WeightUpdateError, match="no room") as caught:
        sync([trainer], generators, directory, prepare=prepare)
    assert caught.value.intact and caught.value.current_version == 1
    assert any("returned to version 1" in note for note in caught.value.__notes__)
    for generator in generators:
        assert generator.receiver.version == 1 and generator.receiver.intact
        assert generator.events[-1] == "go"
        assert_same(generator.model.tensors, weights(0))
    assert directory.latest == 1
    assert sync([trainer], generators, directory, prepare=prepare).version == 3
    for generator in generators:
        assert_same(generator.model.tensors, weights(1))


def test_without_a_rollback_a_version_that_was_given_up_stays_and_is_told(store, directory):
    trainer = Trainer(store, directory)
    generators = [Generator(store, directory) for _ in range(2)]
    sync([trainer], generators, directory)
    trainer.seed = 1
    loaded = threading.Event()
    load = generators[0].model.load
    generators[0].model.load = lambda tensors: (load(tensors), loaded.set())

    def fail():
        loaded.wait(TIMEOUT_S)
        raise ZeroDivisionError

    generators[1].before_load = fail
    with pytest.raises(WeightUpdateError, match="ZeroDivisionError"):
        sync([trainer], generators, directory)
    assert [g.receiver.intact for g in generators] == [False, True]
    assert [g.events[-1] for g in generators] == ["apply", "go"]
    with pytest.raises(WeightUpdateError, match="a mixture"):
        generators[0].receiver.tag(3)
    assert generators[1].receiver.tag(3).tolist() == [1, 1, 1]


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_a_trainer_that_fails_half_way_leaves_the_old_version(store, directory, prepare):
    trainers = [Trainer(store, directory, part, 2) for part in range(2)]
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    sync(trainers, generators, directory)
    held = set(store.held)

    def fail(name):
        if name == sorted(trainers[1].mine())[-1]:
            raise RuntimeError("gather failed")

    trainers[1].before_each = fail
    for trainer in trainers:
        trainer.seed = 1
    with pytest.raises(RuntimeError, match="gather failed"):
        sync(trainers, generators, directory, prepare=prepare)
    for generator in generators:
        assert generator.receiver.version == 1 and generator.receiver.intact
        assert_same(generator.model.tensors, weights(0))
    assert set(store.held) == held


@pytest.mark.hostile
def test_a_publisher_that_says_no_more_is_given_up_by_its_lease(store):
    directory = WeightDirectory.local(lease_s=0.2)
    publisher = WeightPublisher(store, directory=directory, bucket_bytes=64)
    go_on = threading.Event()

    def stops():
        yield "a", torch.ones(100)
        yield "b", torch.ones(100)
        yield "c", torch.ones(100)
        go_on.wait(TIMEOUT_S)
        yield "d", torch.ones(100)

    outcome = []

    def publish():
        try:
            publisher.publish(stops())
        except WeightUpdateError as error:
            outcome.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    model = Model()
    receiver = WeightReceiver(model.load, store=store, directory=directory)
    with pytest.raises(UpdateAbortedError, match=r"publishers of parts \[0\] are silent since 0.2 s"):
        receiver.apply(1, timeout_s=TIMEOUT_S)
    assert receiver.version is None
    go_on.set()
    thread.join()
    assert isinstance(outcome[0], UpdateAbortedError)
    assert not store.held


@pytest.mark.hostile
def test_a_receiver_that_is_silent_is_given_up_by_its_lease(store):
    directory = WeightDirectory.local(lease_s=2.0)  # for those who are only slow
    trainer = Trainer(store, directory, window_bytes=600)
    stuck, healthy = Generator(store, directory), Generator(store, directory, rollback="shadow")
    inside, go_on = threading.Event(), threading.Event()

    class Stops(InProcessByteStore):
        def get(self, ticket, timeout_s=None):
            inside.set()
            go_on.wait(TIMEOUT_S)
            return store.get(ticket, timeout_s)

    stuck.receiver = WeightReceiver(stuck.load, store=Stops(), directory=directory, name="stuck")

    def run():
        with pytest.raises(UpdateAbortedError):
            sync([trainer], [healthy, stuck], directory)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(TIMEOUT_S)
    directory.wait(Record.decision, TIMEOUT_S, 1)
    go_on.set()
    thread.join()
    (reason,) = [s.reason for s in directory.status() if s.state == "aborted"]
    assert "'stuck'" in reason and reason.endswith("are silent since 2 s")
    assert healthy.receiver.version is None


def test_the_publisher_waits_for_receivers_that_lag(store):
    with WeightDirectory.local(keep=0) as directory:
        trainer = Trainer(store, directory, window_bytes=1024)
        generators = [Generator(store, directory), Generator(store, directory)]
        peak = []
        put = store.put
        store.put = lambda data: (peak.append(sum(d.nbytes for d in store.held.values())), put(data))[1]
        for version in (1, 2):
            assert sync([trainer], generators, directory).version == version
        assert max(peak) <= 1024
        assert_same(generators[1].model.tensors, weights(0))
        assert directory.latest is None
        late = Generator(store, directory)
        with pytest.raises(BucketFetchError, match="no version is kept"):
            late.receiver.pull()
        with pytest.raises(WeightUpdateError, match="keep=0 takes updates from sync_weights"):
            trainer.publish_weights()


@pytest.mark.hostile
def test_waiting_for_receivers_has_a_deadline(store, directory):
    trainer = Trainer(store, directory)
    directory.ask(Record.reserve, ["ballot"], None)
    publisher = WeightPublisher(store, directory=directory, bucket_bytes=512, window_bytes=512, timeout_s=0.2)
    with pytest.raises(TransportTimeoutError, match=r"no credit within 0.2 s"):
        publisher.publish(weights())
    assert not store.held
    with pytest.raises(StaleVersionError, match="was replaced by"):
        trainer.publish_weights()


def test_late_and_restarted_receivers_pull_by_themselves(store):
    with WeightDirectory.local(keep=2) as directory:
        trainer = Trainer(store, directory)
        for seed in range(3):
            trainer.seed = seed
            trainer.publish_weights()
        late = Generator(store, directory, name="late")
        with pytest.raises(BucketFetchError, match=r"version 1 is not kept \(keep=2\); there are \[2, 3\]"):
            late.receiver.pull(1)
        assert late.receiver.pull(2).version == 2
        assert late.receiver.pull().version == 3
        assert late.receiver.pull().size_bytes == 0
        assert_same(late.model.tensors, weights(2))
        assert {s.version: s.holders for s in directory.status()}[3] == ("late",)
        late.receiver.close()
        late.receiver.close()
        assert {s.version: s.holders for s in directory.status()}[3] == ()
        with pytest.raises(TransportClosedError):
            late.receiver.pull()


def test_versions_stay_while_there_are_no_more_than_are_kept(store):
    with WeightDirectory.local(keep=4) as directory:
        trainer = Trainer(store, directory)
        for trainer.seed in range(3):
            trainer.publish_weights()
        late = Generator(store, directory)
        for version in (1, 2, 3):
            assert late.receiver.pull(version).version == version
            assert_same(late.model.tensors, weights(version - 1))


def test_partial_versions_are_added_to_what_they_belong_to(store):
    with WeightDirectory.local(keep=1) as directory:
        publisher = WeightPublisher(store, directory=directory)
        with pytest.raises(ValueError, match="no version that a partial update could be added to"):
            publisher.publish({"scale": torch.ones(1)}, partial=True)
        publisher.publish(weights(0))
        always = Generator(store, directory, rollback="shadow")
        always.receiver.pull()
        changed = {"ids": torch.arange(7) + 1}
        publisher.publish(changed, partial=True)
        assert always.receiver.pull().size_bytes == 56
        publisher.publish({"ids": torch.arange(7) + 2}, partial=True)
        late = Generator(store, directory)
        assert late.receiver.pull().version == always.receiver.pull().version == 3
        want = weights(0) | {"ids": torch.arange(7) + 2}
        assert_same(late.model.tensors, want)
        assert_same(always.model.tensors, want)
        publisher.publish({"scale": torch.tensor(9.0).bfloat16()}, partial=True)
        behind = Generator(store, directory)
        with pytest.raises(BaseVersionError, match=r"one of the versions \[3\]"):
            behind.receiver.apply(4)
        behind.receiver.pull()
        assert_same(behind.model.tensors, want | {"scale": torch.tensor(9.0).bfloat16()})


@pytest.mark.hostile
def test_a_publisher_that_was_replaced_is_fenced_off(store, directory):
    old, new = Trainer(store, directory), Trainer(store, directory)
    with pytest.raises(StaleVersionError, match="only the one that was made last may publish"):
        old.publish_weights()
    assert new.publish_weights().version == 1
    assert len(store.held) == len(directory.status()[0].holders) + len(
        new.publisher.publish(new.mine()).buckets
    )


@pytest.mark.hostile
def test_a_replaced_publisher_takes_its_half_version_along(store, directory):
    old, inside, go_on = Trainer(store, directory), threading.Event(), threading.Event()

    def wait(name):
        if name == sorted(weights())[-1]:
            inside.set()
            go_on.wait(TIMEOUT_S)

    def publish():
        try:
            old.publish_weights()
        except UpdateAbortedError as error:
            caught.append(error)

    old.before_each, caught = wait, []
    thread = threading.Thread(target=publish)
    thread.start()
    inside.wait(TIMEOUT_S)
    new = Trainer(store, directory)
    go_on.set()
    thread.join()
    assert "the publisher of part 0 was replaced" in str(caught[0])
    update = new.publish_weights()
    assert update.version == 2
    assert set(store.held) == {bucket.ticket for bucket in update.buckets}


@pytest.mark.hostile
def test_a_lost_directory_leaves_every_receiver_at_one_version(store, directory):
    trainer = Trainer(store, directory)
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    sync([trainer], generators, directory)
    trainer.seed = 1
    generators[0].before_load = directory.close
    with pytest.raises(DirectoryLostError):
        sync([trainer], generators, directory)
    for generator in generators:
        generator.before_load = lambda: None
        assert generator.receiver.version == 1 and generator.receiver.intact
        assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
def test_the_record_decides_when_the_coordinator_is_gone(store, directory):
    """A receiver that voted, and whose driver died, hears from the directory what became of the version."""
    trainer = Trainer(store, directory)
    generator = Generator(store, directory, rollback="shadow")
    sync([trainer], [generator], directory)
    trainer.seed = 1
    number = directory.ask(Record.reserve, ["mine", "other"], 1.0)  # The other, and the driver, are silent.
    version = RecipientVersion(number, "mine")
    trainer.publish_weights()
    with pytest.raises(UpdateAbortedError, match="not all receivers had loaded it by its deadline"):
        generator.apply_weights(version)
    assert generator.receiver.version == 1
    assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
def test_a_damaged_bucket_gives_the_version_up(store, directory):
    trainer = Trainer(store, directory)
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    sync([trainer], generators, directory)
    trainer.seed = 1
    put = store.put

    def damaged(data):
        ticket = put(data)
        store.damage(ticket, 5)
        return ticket

    store.put = damaged
    with pytest.raises(WeightUpdateError, match="its checksum differs"):
        sync([trainer], generators, directory, prepare="prepare_weights")
    assert all(g.receiver.version == 1 and g.receiver.intact for g in generators)
    assert all(g.events[-1] in ("prepare", "apply") for g in generators)


def test_the_manifest_is_compared_before_a_byte_moves(store, directory):
    trainer = Trainer(store, directory)
    generator = Generator(store, directory, expected=weights() | {"other": torch.ones(1)})
    trainer.publish_mapping()
    reads = store.reads
    with pytest.raises(ManifestMismatchError, match="missing: other"):
        generator.receiver.pull()
    assert store.reads == reads
    from_generator = Generator(store, directory, expected={"nothing": torch.ones(1)})
    trainer.publish_weights()
    with pytest.raises(ManifestMismatchError, match="unexpected"):
        from_generator.receiver.pull()
    assert not from_generator.model.tensors


@pytest.mark.hostile
def test_a_manifest_of_another_digest_is_refused_before_a_byte_moves(store, directory):
    """As one would be that another release reads otherwise than its publisher: its places differ."""
    Trainer(store, directory).publish_mapping()
    plans = directory._edge._record._plans
    ((digest, plan),) = plans.items()
    first, second = (entry for entry in plan.tensors if entry.name in ("layer.0.weight", "layer.1.weight"))
    rest = [entry for entry in plan.tensors if entry not in (first, second)]
    turned = [
        dataclasses.replace(one, bucket=other.bucket, offset=other.offset)
        for one, other in ((first, second), (second, first))
    ]
    generator = Generator(store, directory, expected=weights())
    plans[digest] = dataclasses.replace(plan, tensors=(*turned, *rest))
    reads = store.reads
    with pytest.raises(ManifestMismatchError, match=r"digest of the manifest .* nothing was fetched"):
        generator.receiver.pull()
    assert store.reads == reads and not generator.model.tensors and generator.receiver.intact
    plans[digest] = plan
    assert generator.receiver.pull().version == 1
    assert_same(generator.model.tensors, weights())


def test_two_parts_of_one_name_are_refused(store, directory):
    publishers = [WeightPublisher(store, directory=directory, part=i, parts=2) for i in range(2)]
    for publisher in publishers:
        publisher.publish({"x": torch.ones(2)}, version=1)
    with pytest.raises(ManifestMismatchError, match="'x' comes from several ranks"):
        Generator(store, directory).receiver.pull()


def test_an_update_can_be_awaited_and_cancelled(store, directory):
    trainer = Trainer(store, directory)
    generator = Generator(store, directory, rollback="shadow")
    steps = []

    async def run():
        options = {"pause": "stop", "resume": "go", "directory": directory, "timeout_s": TIMEOUT_S}
        peers = (LocalPeers([trainer]), LocalPeers([generator]))
        report = await sync_weights_async(*peers, **options, progress=steps.append)
        assert report.version == 1
        inside, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait(name):
            loop.call_soon_threadsafe(inside.set)
            go_on.wait(TIMEOUT_S)

        trainer.before_each, trainer.seed = wait, 1
        task = asyncio.create_task(sync_weights_async(*peers, **options))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run())
    assert {(s.phase, s.done, s.total) for s in steps} == {
        (phase, 1, 1) for phase in ("publish", "pause", "apply", "resume")
    }
    assert [s.reason for s in directory.status() if s.state == "aborted"] == [
        "the synchronisation was cancelled"
    ]
    assert directory.latest == 1


def test_only_some_generators_are_updated(store, directory):
    trainer, generators = Trainer(store, directory), [Generator(store, directory) for _ in range(3)]
    groups = [LocalPeers(generators[:2]), LocalPeers(generators[2:])]
    sync_weights(LocalPeers([trainer]), groups, directory=directory, recipients=[0, 2])
    assert [g.receiver.version for g in generators] == [1, None, 1]
    with pytest.raises(ValueError, match=r"there are no generators \[7\]; there are 3"):
        sync_weights(LocalPeers([trainer]), groups, directory=directory, recipients=[7])
    with pytest.raises(ValueError, match="give directory="):
        sync_weights(LocalPeers([trainer]), groups, prepare="prepare_weights")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": -1}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": math.nan}, "lease_s"),
        ({"fanout": 0}, "fanout"),
        ({"fanout": True}, "fanout"),
    ],
)
def test_options_of_the_directory_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        WeightDirectory.local(**options)


def test_a_receiver_says_once_what_it_holds(store, directory):
    asked = []

    class Heard(WeightDirectory):
        def ask(self, method, /, *args):
            asked.append(method)
            return super().ask(method, *args)

        def say_and_wait(self, said, method, until, /, *args):
            asked.append(method if said is None else said[0])
            return super().say_and_wait(said, method, until, *args)

    trainer, generator = Trainer(store, directory), Generator(store, Heard(directory._edge))
    sync([trainer], [generator], directory)
    assert Record.vote in asked and Record.hold not in asked
    (status,) = directory.status()
    assert status.holders == (generator.receiver.name,)
    late = Generator(store, Heard(directory._edge))
    late.receiver.pull()
    assert Record.hold in asked
    assert set(directory.status()[0].holders) == {generator.receiver.name, late.receiver.name}
