"""What is fetched, and what is made ready of it, is let go of once that was exchanged, or is not wanted."""

import contextlib
import gc
import threading
import weakref

import pytest
from doubles import Generator, await_no_fetching
from models import assert_same, weights
from streaming import TIMEOUT_S, Trainer, sync

from raycrew.tensor_transport.errors import BucketFetchError, TransportError, WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory


class Noted(InProcessByteStore):
    """Gives a copy each time, and knows which of them are still there."""

    def __init__(self):
        super().__init__()
        self.given = []
        self.lost_at = None

    def get(self, ticket, timeout_s=None):
        if len(self.given) == self.lost_at:
            raise TransportError("a cable was pulled")
        found = super().get(ticket, timeout_s).copy()
        self.given.append(weakref.ref(found))
        return found

    @property
    def left(self):
        return sum(given() is not None for given in self.given)


class Made:
    """What is made ready."""

    def __init__(self, generator):
        self.generator, self.fails = generator, False

    def __call__(self, tensors):
        self.generator.model.load(tensors)
        if self.fails:
            raise RuntimeError("no room")


class Crew:
    """A trainer, and a generator that borrows what its store gives."""

    def __init__(self, directory, **options):
        self.store, self.made = Noted(), []
        self.during = lambda: None
        self.trainer = Trainer(self.store, directory)
        options = {"borrow": True, "ahead": self.go_ahead} | options
        self.generator = Generator(self.store, directory, **options)
        self.receiver = self.generator.receiver

    def go_ahead(self, tensors):
        for _ in tensors:
            self.during()
        made = Made(self.generator)
        self.made.append(weakref.ref(made))
        return made

    def prepare(self):
        self.store.given.clear()
        return self.receiver.prepare(self.trainer.publish_weights().version).version

    @property
    def left(self):
        """How many buckets, and how many things made of them, are there."""
        await_no_fetching()
        return self.store.left, sum(made() is not None for made in self.made)


@pytest.fixture
def directory():
    with WeightDirectory.local() as directory:
        yield directory


@pytest.fixture(autouse=True)
def _without_collections():
    """What is in a circle stays for as long as nobody looks for those."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_it_is_let_go_of_by_the_exchange(directory):
    crew = Crew(directory)
    for seed in range(3):
        crew.trainer.seed = seed
        crew.receiver.apply(crew.prepare())
        assert crew.left == (0, 0)
        assert_same(crew.generator.model.tensors, weights(seed))


def test_a_shadow_is_the_buckets_of_what_is_held(directory):
    crew = Crew(directory, rollback="shadow")
    for _ in range(3):
        number = crew.prepare()
        count = len(crew.store.given)
        crew.receiver.apply(number)
        assert crew.left == (count, 0)
    crew.receiver.close()
    assert crew.left == (0, 0)


def test_it_is_let_go_of_before_another_version_is_fetched(directory):
    crew = Crew(directory)
    crew.prepare()
    first, made = list(crew.store.given), list(crew.made)
    assert crew.left == (len(first), 1)

    def during():
        assert not any(one() is not None for one in first + made)

    crew.during = during
    crew.prepare()
    assert crew.left == (len(first), 1)


@pytest.mark.parametrize("end", ["pull", "close", "another version"])
def test_it_is_let_go_of_by_what_comes_in_its_place(directory, end):
    crew = Crew(directory)
    crew.prepare()
    assert crew.left[1] == 1
    if end == "close":
        crew.receiver.close()
    elif end == "pull":
        crew.receiver.pull()
    else:
        crew.receiver.apply(crew.trainer.publish_weights().version)
    assert crew.left == (0, 0)


@pytest.mark.hostile
@pytest.mark.parametrize("end", ["ahead", "a bucket", "the exchange"])
def test_it_is_let_go_of_where_something_failed(directory, end):
    crew = Crew(directory)
    if end == "ahead":
        crew.during = lambda: 1 / 0
    elif end == "a bucket":
        crew.store.lost_at = 3
    with pytest.raises(WeightUpdateError):
        number = crew.prepare()
        crew.made[0]().fails = True
        crew.receiver.apply(number)
    assert crew.left == (0, 0)


@pytest.mark.hostile
@pytest.mark.parametrize("rollback", ["none", "shadow"])
def test_so_it_is_where_a_bucket_of_what_is_loaded_is_lost(directory, rollback):
    crew = Crew(directory, rollback=rollback)
    crew.store.lost_at = 3
    with pytest.raises(BucketFetchError):
        crew.receiver.apply(crew.trainer.publish_weights().version)
    assert crew.left == (0, 0)


@pytest.mark.hostile
def test_threads_do_not_pile_up(directory):
    crew, before = Crew(directory), threading.active_count()
    for number in range(50):
        crew.during = (lambda: 1 / 0) if number % 3 == 2 else lambda: None
        with contextlib.suppress(WeightUpdateError):
            crew.receiver.apply(crew.prepare())
    await_no_fetching()
    assert threading.active_count() <= before
    crew.during = lambda: None
    report = sync([crew.trainer], [crew.generator], directory, prepare="prepare_weights", timeout_s=TIMEOUT_S)
    assert report.version == crew.receiver.version and crew.left == (0, 0)
