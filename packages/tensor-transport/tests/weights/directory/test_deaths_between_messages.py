"""Whoever dies before or after any of its messages: the others serve one version, which the record knows."""

import contextlib
import itertools
import threading

import pytest
from models import assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, sync

from raycrew.tensor_transport.errors import DirectoryLostError, UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge

pytestmark = pytest.mark.hostile


DECISION_S = 1.0
"""So long the record waits for a driver that died; who is slower than that is given up by it all the same."""


class DiedError(Exception):
    """What a group says of a worker whose process is gone."""


class CutOffError(DirectoryLostError):
    """A driver that died says no more; the calls that it had made go on."""


class Mortal(_LocalEdge):
    """Ends whoever speaks through it with one of its messages: unsent, or sent and not answered."""

    def __init__(self, alive, error):
        super().__init__(alive._edge._record)
        self._changed = alive._edge._changed
        self._own, self.count, self.last = threading.local(), 0, -1
        self.is_sent = self.is_dead = False
        self.error = error

    def ask(self, method, args, timeout_s):
        act = super().ask
        return self._say(lambda: act(method, args, timeout_s))

    def tell(self, method, args):
        act = super().tell
        self._say(lambda: act(method, args))

    def poll(self, method, args, wait_s, said=None):
        act, waits = super().poll, not (self.is_sent and self.count + 1 == self.last)
        return self._say(lambda: act(method, args, wait_s if waits else 0.0, said))

    def _say(self, deliver):
        if getattr(self._own, "within", False):
            return deliver()
        self.count += 1
        self.is_dead = self.is_dead or self.count == self.last
        if self.is_dead and not (self.is_sent and self.count == self.last):
            raise self.error("it died")
        self._own.within = True
        try:
            found = deliver()
        finally:
            self._own.within = False
        if self.is_dead:
            raise self.error("it died")
        return found


class Crew:
    """A driver, a trainer and two generators; one of them is mortal."""

    def __init__(self, who, publish, bucket_bytes, prepare):
        self.store, self.directory = InProcessByteStore(), WeightDirectory.local(keep=2)
        self.edge = Mortal(self.directory, CutOffError if who == "driver" else DiedError)
        mortal = WeightDirectory(self.edge)
        self.driver = mortal if who == "driver" else self.directory
        self.bucket_bytes = bucket_bytes
        self.trainer = self.new_trainer(mortal if who == "trainer" else self.directory)
        self.generators = [
            self.new_generator(i, mortal if (who, i) == ("generator", 0) else self.directory)
            for i in range(2)
        ]
        self.options = {"publish": publish, "prepare": prepare}
        self.update(1)

    def new_trainer(self, directory):
        trainer = Trainer(self.store, directory)
        trainer.publisher = WeightPublisher(
            self.store, directory=directory, bucket_bytes=self.bucket_bytes, timeout_s=TIMEOUT_S
        )
        return trainer

    def new_generator(self, number, directory):
        return Generator(self.store, directory, rollback="shadow", name=f"generator {number}")

    def update(self, seed, **options):
        self.trainer.seed = seed
        return sync([self.trainer], self.generators, self.driver, **self.options, **options)

    def check_one_version(self, who):
        latest = self.directory.latest
        for generator in self.generators[who == "generator" :]:
            assert generator.receiver.intact and generator.receiver.version == latest
            assert_same(generator.model.tensors, weights(2 if latest > 1 else 1))

    def go_on(self, who):
        """Who died is replaced, and comes to what all have; the next update reaches all."""
        if who == "driver":
            self.driver = self.directory
            with contextlib.suppress(UpdateAbortedError):  # Its publisher hears of one that nobody began.
                self.update(2)
        elif who == "trainer":
            self.trainer = self.new_trainer(self.directory)
        else:
            self.generators[0] = self.new_generator(0, self.directory)
            self.generators[0].receiver.pull(timeout_s=TIMEOUT_S)
        self.check_one_version("nobody")
        self.update(3)
        for generator in self.generators:
            assert_same(generator.model.tensors, weights(3))


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("prepare", [None, "prepare_weights"])
@pytest.mark.parametrize(
    ("publish", "bucket_bytes"),
    [("publish_mapping", 1 << 20), ("publish_mapping", 512), ("publish_weights", 512)],
)
@pytest.mark.parametrize("who", ["trainer", "generator", "driver"])
def test_whoever_dies_at_any_of_its_messages_the_others_serve_one_version(
    who, publish, bucket_bytes, prepare, is_sent
):
    for message in itertools.count(1):
        crew = Crew(who, publish, bucket_bytes, prepare)
        crew.edge.is_sent, crew.edge.last = is_sent, crew.edge.count + message
        try:
            crew.update(2, **({"timeout_s": DECISION_S} if who == "driver" else {}))
        except (DiedError, CutOffError):
            assert crew.edge.is_dead
        except UpdateAbortedError:
            assert who == "driver", "others are slow for as long as they like"
        if not crew.edge.is_dead:
            break
        crew.check_one_version(who)
        crew.go_on(who)
    assert message > 1, "nobody died"
