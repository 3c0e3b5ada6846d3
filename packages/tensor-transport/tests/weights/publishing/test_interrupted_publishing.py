"""A publisher that is interrupted: what it keeps of that goes with the next version at the latest."""

import threading

import pytest
import torch
from pressing import press_everywhere

from raycrew.tensor_transport.errors import TransportClosedError, TransportError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._publishing import copying, packing
from raycrew.tensor_transport.weights._publishing.source import SourceWatch
from raycrew.tensor_transport.weights._update import stores

MODEL = {f"layers.{i}": torch.full((4096,), float(i)) for i in range(6)}
PLACES = ("/_bytes/shared/", "/transports/shared_memory.py", "/_update/stores.py", "/packing.py")
MORE_PLACES = ("/keeping.py", "/publisher.py", "/telling.py")
TIMEOUT_S = 60.0
BUCKET = MODEL["layers.0"].nbytes


class Pressed(InProcessByteStore):
    """Somebody presses Ctrl-C while it releases something."""

    left = -1

    def release(self, ticket):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        super().release(ticket)


@pytest.mark.hostile
@pytest.mark.parametrize("nth", [1, 4, 6])
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_what_an_interrupt_keeps_goes_with_the_next_version(directory, nth):
    store = Pressed()
    publisher = WeightPublisher(store, directory=directory and directory(), bucket_bytes=BUCKET)
    for _ in range(2):
        publisher.publish(MODEL)
    store.left = nth
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(MODEL)
    for _ in range(2):
        publisher.publish(MODEL)
        assert len(store.held) == len(MODEL)
    publisher.close()
    assert not store.held


class Failing(InProcessByteStore):
    """Fails to release one bucket."""

    left = -1

    def release(self, ticket):
        self.left -= 1
        if self.left == 0:
            raise OSError("the disk does not answer")
        super().release(ticket)


@pytest.mark.hostile
@pytest.mark.parametrize("nth", [1, 4, 6])
@pytest.mark.parametrize("method", ["publish", "release", "close"])
def test_what_an_error_keeps_goes_with_the_next_version(method, nth):
    store = Failing()
    publisher = WeightPublisher(store, bucket_bytes=BUCKET)
    publisher.publish(MODEL)
    store.left = nth
    with pytest.raises(OSError, match="does not answer"):
        publisher.publish(MODEL) if method == "publish" else getattr(publisher, method)()
    publisher.publish(MODEL)
    assert len(store.held) == len(MODEL) + 1, "what it could not release is there"
    publisher.close()
    assert len(store.held) == 1


class PressedAtPublish(Record):
    """Somebody presses Ctrl-C before, or after, a small version is published."""

    moment = "never"

    def publish(self, *args):
        if self.moment == "before":
            raise KeyboardInterrupt
        found = super().publish(*args)
        if self.moment == "after":
            raise KeyboardInterrupt
        return found


@pytest.mark.hostile
@pytest.mark.parametrize("moment", ["before", "after"])
def test_who_is_interrupted_while_a_small_version_is_published_releases_it_unless_it_is(moment):
    store, directory, found = InProcessByteStore(), WeightDirectory.local(), {}
    record = directory._edge._record = PressedAtPublish(lease_s=1e9)
    publisher = WeightPublisher(store, directory=directory)
    publisher.publish({"a": torch.ones(3)})
    first = set(store.held)  # Who misses that this one is over hears of it again, after a lease.
    record.moment = moment
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"a": torch.full((3,), 2.0)})
    record.moment = "never"
    receiver = WeightReceiver(found.update, store=store, directory=directory)
    receiver.pull(timeout_s=TIMEOUT_S)
    assert found["a"].eq(1 if moment == "before" else 2).all()
    publisher.publish({"a": torch.full((3,), 3.0)})
    receiver.pull(timeout_s=TIMEOUT_S)
    assert found["a"].eq(3).all() and len(store.held.keys() - first) == 1
    receiver.close()
    publisher.close()
    assert store.held.keys() <= first


METHODS = {"planned": "__init__", "begun": "begin", "packed": "copy", "filled": "finish"}


class Counted(SharedMemoryTransport):
    def __init__(self):
        self.held = set()
        super().__init__()

    def reserve(self, size_bytes):
        offer, room = super().reserve(size_bytes)
        self.held.add(offer.key)
        return offer, room

    def withdraw(self, offers):
        self.held -= {offer.key for offer in offers}
        super().withdraw(offers)


@pytest.mark.hostile
@pytest.mark.parametrize("where", ["reserved", "planned", "begun", "packed", "filled", "sent"])
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_an_interrupt_while_a_bucket_is_made_keeps_none(directory, where, monkeypatch):
    """As it gets its memory, as it was filled, or as it was sent and the next one is begun."""
    left = 3

    def interrupted(function):
        def call(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return function(*args, **options)

        return call

    with Counted() as transport:
        publisher = WeightPublisher(transport, directory=directory and directory(), bucket_bytes=BUCKET)
        publisher.publish(MODEL)
        with monkeypatch.context() as patched:
            if where == "reserved":
                patched.setattr(stores, "_over", interrupted(stores._over))
            elif where in METHODS:
                name = METHODS[where]
                patched.setattr(packing.Filling, name, interrupted(getattr(packing.Filling, name)))
            else:
                patched.setattr(packing.Placer, "place", interrupted(packing.Placer.place))
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(MODEL)
        assert len(transport.held) == len(MODEL)
        publisher.publish(MODEL)
        assert len(transport.held) == len(MODEL)
        publisher.close()
        assert not transport.held


@pytest.mark.hostile
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_an_interrupt_at_any_moment_keeps_no_shared_memory(directory):
    with SharedMemoryTransport() as transport:
        publisher = WeightPublisher(transport, directory=directory and directory(), bucket_bytes=BUCKET)
        publisher.publish(MODEL)
        for nth in press_everywhere(lambda: publisher.publish(MODEL), PLACES):
            publisher.publish(MODEL)
            assert transport._arenas.stats().shards == len(MODEL), nth
        publisher.close()
        assert transport._arenas.stats().shards == 0
    assert nth > 50


@pytest.mark.hostile
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
@pytest.mark.parametrize("is_mapping", [True, False])
def test_an_interrupt_while_a_version_is_given_up_keeps_no_bucket_for_good(directory, is_mapping):
    """It has failed, or was interrupted once, when somebody presses Ctrl-C again."""

    def failing(name, tensor):
        if name == "layers.4":
            raise MemoryError
        return tensor

    store = InProcessByteStore()
    options = {"directory": directory and directory(), "bucket_bytes": BUCKET}
    publisher = WeightPublisher(store, **options, transform=failing)

    def publish():
        with pytest.raises(MemoryError):
            publisher.publish(MODEL if is_mapping else iter(MODEL.items()))

    for nth in press_everywhere(publish, (*PLACES, *MORE_PLACES)):
        publish()
        assert not store.held, nth
    assert nth > 50
    publisher.close()


@pytest.mark.hostile
def test_an_interrupt_as_a_version_is_complete_keeps_that_one_alone():
    store = InProcessByteStore()
    publisher = WeightPublisher(store, bucket_bytes=BUCKET)
    publisher.publish(MODEL)
    for nth in press_everywhere(lambda: publisher.publish(MODEL), MORE_PLACES):
        assert all(bucket.ticket in store.held for bucket in publisher.latest.buckets), nth
        publisher.publish(MODEL)
        assert {bucket.ticket for bucket in publisher.latest.buckets} == store.held.keys(), nth
    publisher.close()
    assert not store.held


@pytest.mark.hostile
def test_a_publisher_whose_end_was_interrupted_is_ended_by_ending_it_again():
    store = InProcessByteStore()

    def publish():
        made.append(WeightPublisher(store, bucket_bytes=BUCKET))
        made[-1].publish(MODEL)

    made = []
    for nth in press_everywhere(lambda: made[-1].close(), MORE_PLACES, before=publish):
        made[-1].close()
        assert not store.held, nth
    with pytest.raises(TransportClosedError):
        made[-1].publish(MODEL)


@pytest.mark.hostile
@pytest.mark.parametrize("runs", ["while it is given up", "while the next one is published"])
def test_no_bucket_of_a_version_that_was_given_up_is_one_of_the_next(runs, monkeypatch):
    """The interrupt comes as the thread that sends buckets is started: nobody knows of it."""
    stragglers, go_on, inside = [], threading.Event(), threading.Event()

    class Interrupted(packing.ThreadPoolExecutor):
        def submit(self, work, *args):
            def run():
                if runs == "while it is given up":
                    inside.set()
                else:
                    assert go_on.wait(TIMEOUT_S)
                work(*args)

            stragglers.append(threading.Thread(target=run))
            stragglers[-1].start()
            raise KeyboardInterrupt

    class Slow(InProcessByteStore):
        def put(self, data):
            if threading.current_thread() in stragglers:
                assert go_on.wait(TIMEOUT_S)
            return super().put(data)

    def next_ones():
        for n, (name, tensor) in enumerate(MODEL.items()):
            if n == 3:
                go_on.set()
                stragglers[0].join(TIMEOUT_S)
            yield name, tensor + 1

    with WeightDirectory.local() as directory:
        store, got = Slow(), {}
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=BUCKET)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(packing, "ThreadPoolExecutor", Interrupted)
            if runs == "while it is given up":
                threading.Thread(target=lambda: inside.wait(TIMEOUT_S) and go_on.set()).start()
            publisher.publish(MODEL)
        version = publisher.publish(next_ones()).version
        receiver = WeightReceiver(got.update, store=store, directory=directory)
        assert receiver.pull().version == version
        assert all(torch.equal(got[name], tensor + 1) for name, tensor in MODEL.items())
        assert len(store.held) == len(MODEL)


class Full(Counted):
    """Has room for two buckets alone; `after` is called when there is none."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def reserve(self, size_bytes):
        if len(self.held) == 2:
            self.after()
            raise TransportError("no room")
        return super().reserve(size_bytes)


@pytest.mark.hostile
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_nobody_writes_to_a_bucket_that_was_given_up(directory, monkeypatch):
    """There is no room for the third bucket while a helper still copies to the second one."""
    model = {name: torch.ones(4 << 20) for name in "abc"}
    take, inside, let_go, mine = (
        copying.fold_bytes,
        threading.Event(),
        threading.Event(),
        threading.get_ident(),
    )
    under_way, begun, begin = [], [], packing.Filling.begin

    def note(filling):
        begun.append(filling)
        begin(filling)

    def held_up(raw):
        if len(begun) == 2 and threading.get_ident() != mine:
            under_way.append(1)
            inside.set()
            let_go.wait(60)
            under_way.pop()
        return take(raw)

    def give_up():
        assert inside.wait(60)
        threading.Timer(0.2, let_go.set).start()

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    monkeypatch.setattr(copying, "fold_bytes", held_up)
    monkeypatch.setattr(packing.Filling, "begin", note)
    with Full(give_up) as transport:
        options = {"directory": directory and directory(), "bucket_bytes": model["a"].nbytes}
        with (
            WeightPublisher(transport, **options) as publisher,
            pytest.raises(TransportError, match="no room"),
        ):
            publisher.publish(model)
        assert inside.is_set() and not under_way and not transport.held


@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_a_bucket_is_filled_while_the_next_one_is_planned(directory, monkeypatch):
    events, copied = [], SourceWatch.copied

    class Noted(SharedMemoryTransport):
        def reserve(self, size_bytes):
            events.append("reserved")
            return super().reserve(size_bytes)

    def note(self, name, tensor, content):
        events.append("copied")
        copied(self, name, tensor, content)

    monkeypatch.setattr(SourceWatch, "copied", note)
    options = {"directory": directory and directory(), "bucket_bytes": BUCKET}
    with Noted() as transport, WeightPublisher(transport, **options) as publisher:
        publisher.publish(MODEL)
    assert events == ["reserved", *["reserved", "copied"] * (len(MODEL) - 1), "copied"]
