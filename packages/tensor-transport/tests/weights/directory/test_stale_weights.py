"""Receivers that were restarted, or lag: their weights are refused until they are synchronised."""

import pytest
import torch
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.errors import (
    BaseVersionError,
    BucketFetchError,
    StaleVersionError,
    StaleWeightsError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    WeightUpdate,
    join_updates,
)
from raycrew.tensor_transport.weights._directory import Record
from raycrew.tensor_transport.weights._receiving.held import Held

CHANGES = {
    2: {"ids": torch.arange(7) + 2},
    3: {"scale": torch.tensor(9.0, dtype=torch.bfloat16), "ids": torch.arange(7) + 3},
}


class PartialTrainer:
    """Publishes a whole model first, and then what changed."""

    def __init__(self, store, directory):
        self.publisher = WeightPublisher(store, directory=directory, timeout_s=TIMEOUT_S)
        self.step = 0

    def publish_weights(self):
        self.step += 1
        changed = CHANGES.get(self.step)
        return self.publisher.publish(changed or weights(), partial=changed is not None)


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    with WeightDirectory.local(keep=1) as found:
        yield found


def test_weights_are_required_of_a_version(store, directory):
    trainer, generator = PartialTrainer(store, directory), Generator(store, directory)
    with pytest.raises(StaleWeightsError, match=r"holds no version yet.*pull\(\)") as stale:
        generator.receiver.require()
    assert (stale.value.version, stale.value.current_version) == (0, None)
    with pytest.raises(StaleWeightsError, match="holds no version yet"):
        generator.receiver.tag(3)
    sync([trainer], [generator], directory)
    assert generator.receiver.require() == generator.receiver.require(1) == 1
    with pytest.raises(StaleWeightsError, match="version 1, and version 2 is required") as stale:
        generator.receiver.require(2)
    assert (stale.value.version, stale.value.current_version, stale.value.intact) == (2, 1, True)


@pytest.mark.hostile
def test_a_mixture_is_of_no_version_whatever_is_required(store, directory):
    generator, seen = Generator(store, directory), []

    def look():
        with pytest.raises(StaleWeightsError) as found:
            generator.receiver.require()
        seen.append(found.value.intact)
        return True

    generator.model.load = lambda tensors: [look() for _ in tensors]
    PartialTrainer(store, directory).publish_weights()
    generator.receiver.pull()
    assert set(seen) == {False} and generator.receiver.require(1) == 1


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_a_generator_that_was_restarted_comes_to_what_the_next_update_is_added_to(store, directory, prepare):
    trainer, generators = PartialTrainer(store, directory), [Generator(store, directory) for _ in range(2)]
    for version in (1, 2):
        assert sync([trainer], generators, directory, prepare=prepare).version == version
    generators[1].receiver.close()
    generators[1] = Generator(store, directory)
    assert sync([trainer], generators, directory, prepare=prepare).version == 3
    for generator in generators:
        assert generator.receiver.require(3) == 3
        assert_same(generator.model.tensors, weights() | CHANGES[3])


@pytest.mark.hostile
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
def test_a_generator_that_is_updated_now_and_then_comes_to_what_an_update_is_added_to(
    store, directory, prepare, monkeypatch
):
    monkeypatch.setitem(CHANGES, 3, {"scale": torch.tensor(9.0, dtype=torch.bfloat16)})
    trainer, generators = PartialTrainer(store, directory), [Generator(store, directory) for _ in range(2)]
    sync([trainer], generators, directory, prepare=prepare)
    sync([trainer], generators, directory, prepare=prepare, recipients=[0])
    assert [generator.receiver.version for generator in generators] == [2, 1]
    seen = []
    generators[1].before_load = lambda: seen.append(list(generators[1].events))
    assert sync([trainer], generators, directory, prepare=prepare).version == 3
    for generator in generators:
        assert generator.receiver.require(3) == 3
        assert_same(generator.model.tensors, weights() | CHANGES[2] | CHANGES[3])
    assert len(seen) == 2 and all(events[-2:] == ["stop", "apply"] for events in seen), "paused"


@pytest.mark.hostile
def test_what_a_restarted_generator_cannot_catch_up_with_ends_the_update_for_all(store):
    with WeightDirectory.local(keep=0) as directory:
        trainer, generators = (
            PartialTrainer(store, directory),
            [Generator(store, directory) for _ in range(2)],
        )
        sync([trainer], generators, directory)
        generators[1] = Generator(store, directory)
        with pytest.raises(BucketFetchError, match="version 1 is not kept"):
            sync([trainer], generators, directory)
        assert [generator.receiver.version for generator in generators] == [1, None]


@pytest.mark.hostile
def test_a_mixture_comes_to_a_version_that_consists_of_several(store, directory):
    trainer, generator = PartialTrainer(store, directory), Generator(store, directory)
    for _ in range(2):
        trainer.publish_weights()
        generator.receiver.pull()
    trainer.publish_weights()
    load = generator.model.load
    generator.model.load = lambda tensors: next(tensors) and 1 / 0
    with pytest.raises(Exception, match="division by zero"):
        generator.receiver.pull()
    assert not generator.receiver.intact
    generator.model.load = load
    assert generator.receiver.pull().version == 3
    assert_same(generator.model.tensors, weights() | CHANGES[3])


def test_a_receiver_that_was_restarted_under_its_name_holds_nothing(store, directory):
    trainer, generator = PartialTrainer(store, directory), Generator(store, directory, name="rank 0")
    trainer.publish_weights()
    generator.receiver.pull()
    assert directory.status()[0].holders == ("rank 0",)
    again = Generator(store, directory, name="rank 0")
    assert directory.status()[0].holders == ()
    again.receiver.pull()
    assert directory.status()[0].holders == ("rank 0",)


@pytest.mark.hostile
@pytest.mark.parametrize("keep", [0, 1])
def test_a_restarted_generator_can_pull_what_there_is_also_where_there_is_nothing(store, keep):
    with WeightDirectory.local(keep=keep) as directory:
        trainer, generator = PartialTrainer(store, directory), Generator(store, directory, name="rank 0")
        assert generator.receiver.pull(missing_ok=True) is None
        with pytest.raises(BucketFetchError, match="no version was published yet"):
            generator.receiver.pull()
        with pytest.raises(ValueError, match="version 1 was asked for"):
            generator.receiver.pull(1, missing_ok=True)
        sync([trainer], [generator], directory)
        again = Generator(store, directory, name="rank 0")
        receipt = again.receiver.pull(missing_ok=True)
        if keep:
            assert receipt.version == again.receiver.require(1) == 1
            trainer.publisher.close()
        else:
            assert receipt is None
            with pytest.raises(StaleWeightsError, match="holds no version yet"):
                again.receiver.require()
        assert again.receiver.pull(missing_ok=True) is generator.receiver.pull(missing_ok=True) is None
        assert generator.receiver.require() == 1, "what is held is kept"


@pytest.mark.hostile
@pytest.mark.parametrize("touched", [False, True])
def test_what_goes_while_it_is_pulled_is_missing_unless_it_left_a_mixture(store, directory, touched):
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    trainer.publish_weights()
    get, fetched = store.get, []

    def goes(ticket, timeout_s=None):
        if len(fetched) == touched:
            trainer.publisher.close()
        fetched.append(ticket)
        return get(ticket, timeout_s)

    store.get = goes
    if touched:
        with pytest.raises(BucketFetchError):
            generator.receiver.pull(missing_ok=True)
    else:
        assert generator.receiver.pull(missing_ok=True) is None
    assert generator.receiver.intact is not touched and directory.latest is None


@pytest.mark.hostile
def test_a_version_of_a_restarted_trainer_is_not_taken_for_that_of_the_one_before(store):
    receiver = WeightReceiver(dict, store=store)
    before = [publisher.publish(weights()) for publisher in [WeightPublisher(store)] for _ in range(5)]
    receiver.apply(before[4])
    assert receiver.require(before[2]) == receiver.require(before[4]) == receiver.require(5) == 5
    restarted = WeightPublisher(store)
    missed = restarted.publish(weights(1))
    with pytest.raises(
        StaleWeightsError, match=r"version 5 of publisher .*, and version 1 of publisher"
    ) as stale:
        receiver.require(missed)
    assert (stale.value.version, stale.value.current_version, stale.value.intact) == (1, 5, True)
    with pytest.raises(StaleWeightsError, match="version 1 is required, which may be a later one"):
        receiver.require(1)
    receiver.apply(missed)
    assert receiver.require(missed) == receiver.require(1) == 1
    assert receiver.require(before[4]) == 1, "what replaced it here is later"
    for later in (restarted.publish(weights(2)), 2):
        with pytest.raises(StaleWeightsError, match="version 1, and version 2 is required"):
            receiver.require(later)


@pytest.mark.hostile
@pytest.mark.parametrize("directed", [False, True])
def test_what_sync_weights_reports_is_required_of_those_that_missed_it(store, directory, directed):
    known = directory if directed else None
    generators = [Generator(store, known) for _ in range(2)]
    first = sync([Trainer(store, known)], generators, known)
    missed = sync([Trainer(store, known)], generators, known, recipients=[1])
    assert first.publisher != missed.publisher
    with pytest.raises(StaleWeightsError, match=f"and version {missed.version} of publisher"):
        generators[0].receiver.require(missed)
    assert generators[1].receiver.require(missed) == generators[1].receiver.require(first) == missed.version
    if directed:
        assert generators[1].receiver.require(first.version) == 2, "a directory uses no number again"


@pytest.mark.hostile
@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])
def test_of_two_publishers_the_one_that_was_followed_is_older_whatever_they_are_called(one, other):
    held = Held().followed_by(5, one, is_numbered_once=False)
    with pytest.raises(
        StaleWeightsError, match=f"version 5 of publisher {one}, and version 4 of publisher {other}"
    ):
        held.check(WeightUpdate(other, 4, (), ()))
    later = held.followed_by(1, other, is_numbered_once=False)
    assert later.check(WeightUpdate(one, 9, (), ())) == later.check(WeightUpdate(other, 1, (), ())) == 1
    assert later.followed_by(2, other, is_numbered_once=False).superseded == {one}
    again = later.followed_by(6, one, is_numbered_once=False)
    assert again.superseded == {one, other}


@pytest.mark.hostile
@pytest.mark.parametrize("version", [None, 3])
def test_a_mixture_is_refused_whatever_version_it_was_before(version):
    held = Held(version, "a", intact=False, loading=4)
    assert not held.is_whole and not Held().is_whole and Held(3, "a").is_whole
    for required in (None, 1, WeightUpdate("a", 3, (), ())):
        with pytest.raises(StaleWeightsError, match="a mixture: version 4 is being loaded") as stale:
            held.check(required)
        assert (stale.value.current_version, stale.value.intact) == (version, False)


@pytest.mark.parametrize(("is_numbered_once", "held"), [(True, True), (False, False)])
def test_a_number_below_is_an_earlier_version_where_a_number_is_used_once(is_numbered_once, held):
    weights = Held().followed_by(5, "a", is_numbered_once=is_numbered_once)
    assert weights.check(5) == weights.check(None) == 5
    if held:
        assert weights.check(4) == 5
    else:
        with pytest.raises(StaleWeightsError, match="version 4 is required, which may be a later one"):
            weights.check(4)
    with pytest.raises(StaleWeightsError, match="version 5, and version 6 is required"):
        weights.check(6)
    assert not Held().is_numbered_once


def test_what_is_required_is_a_number_or_was_published(store):
    receiver, publishers = (
        WeightReceiver(dict, store=store),
        [WeightPublisher(store, part=i, parts=2) for i in range(2)],
    )
    parts = [
        publisher.publish({name: torch.ones(1)}, version=3)
        for name, publisher in zip("ab", publishers, strict=True)
    ]
    receipt = receiver.apply(join_updates(parts))
    assert receiver.require(join_updates(parts)) == receiver.require(torch.tensor(3)) == 3
    with pytest.raises(WeightUpdateError, match="every rank of the trainer has to publish its own part"):
        receiver.require(parts[0])
    for wrong in ("3", receipt):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            receiver.require(wrong)


@pytest.mark.hostile
def test_a_partial_version_is_not_added_to_that_of_another_publisher_with_the_same_number(store):
    model = Model()
    receiver = WeightReceiver(model.load, store=store)
    receiver.apply(WeightPublisher(store).publish(weights(1)))
    restarted = PartialTrainer(store, None)
    restarted.publisher = WeightPublisher(store, keep=2)
    missed, partial = (restarted.publish_weights() for _ in range(2))
    with pytest.raises(BaseVersionError, match=r"versions \[1\] of its publisher"):
        receiver.apply(partial)
    assert_same(model.tensors, weights(1))
    assert receiver.intact
    receiver.apply(missed)
    assert receiver.apply(partial).version == 2
    assert_same(model.tensors, weights() | CHANGES[2])


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["pull", "sync"])
def test_what_a_directory_did_not_number_is_replaced_by_what_its_versions_are_added_to(store, directory, how):
    trainer, generator = PartialTrainer(store, directory), Generator(store, directory)
    generator.receiver.apply(WeightPublisher(store).publish(weights(1)))
    trainer.publish_weights()
    if how == "pull":
        generator.receiver.pull()
        assert_same(generator.model.tensors, weights())
    else:
        sync([trainer], [generator], directory)
        assert_same(generator.model.tensors, weights() | CHANGES[2])


@pytest.mark.hostile
def test_what_is_fetched_again_is_the_version_that_was_held_not_one_of_its_number(store, directory):
    trainer, generator = PartialTrainer(store, directory), Generator(store, directory, rollback="refetch")
    generator.receiver.apply(WeightPublisher(store).publish(weights(1)))
    trainer.publish_weights()
    generator.receiver.apply(1)
    trainer.step = 2
    trainer.publish_weights()
    load = generator.model.load

    def breaks(tensors):
        generator.model.load = load
        load(tensors)
        raise ValueError("the worker ran out of memory")

    generator.model.load = breaks
    with pytest.raises(WeightUpdateError, match="the worker ran out of memory"):
        generator.receiver.pull()
    assert generator.receiver.require(1) == 1
    assert_same(generator.model.tensors, weights())


class Late:
    """A directory whose answer to what there is comes late once: something is done before."""

    def __init__(self, directory, before):
        self._directory, self._before = directory, before

    def __getattr__(self, name):
        return getattr(self._directory, name)

    def ask(self, method, *args):
        found = self._directory.ask(method, *args)
        if method is Record.chain and self._before is not None:
            before, self._before = self._before, None
            before()
        return found


@pytest.mark.hostile
def test_who_pulls_is_content_with_a_later_version_that_came_by_another_thread(store):
    with WeightDirectory.local(keep=2) as directory:
        trainer = Trainer(store, directory)
        trainer.publish_weights()

        def another():
            trainer.seed = 1
            trainer.publish_weights()
            assert generator.receiver.pull().version == 2

        generator = Generator(store, Late(directory, another))
        assert generator.receiver.pull().version == 2
        assert_same(generator.model.tensors, weights(1))
        with pytest.raises(StaleVersionError, match="version 2 is held already"):
            generator.receiver.pull(1)


@pytest.mark.hostile
def test_who_pulls_is_content_with_what_came_by_another_thread_also_where_it_takes_several(store):
    with WeightDirectory.local(keep=2) as directory:
        trainer = Trainer(store, directory)
        trainer.publish_weights()
        changed = {"ids": weights(1)["ids"]}
        trainer.publisher.publish(changed, partial=True)

        def another():
            assert generator.receiver.pull().version == 2

        generator = Generator(store, Late(directory, another))
        assert generator.receiver.pull().version == 2
        assert_same(generator.model.tensors, weights() | changed)
