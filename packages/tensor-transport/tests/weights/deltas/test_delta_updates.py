"""Updates by deltas through a publisher and receivers: committed, aborted, missed, damaged."""

import pytest
import torch

from raycrew.tensor_transport import DeltaSource, DeltaTarget, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.errors import (
    BaseVersionError,
    DamagedBytesError,
    DecodeError,
    ManifestMismatchError,
    TransportClosedError,
    TransportError,
    UnsupportedTensorError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.testing._transports import bits_of, samples
from raycrew.tensor_transport.weights import WeightDirectory


def model():
    random = torch.Generator().manual_seed(5)
    return {
        "embed": torch.randn(300, 64, generator=random).bfloat16(),
        "scale": torch.randn(64, generator=random),
        "float8": torch.randn(64, 32, generator=random).to(torch.float8_e4m3fn),
        "counts": torch.arange(1000),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.0),
    }


def step(weights, share=0.01):
    """Change a few values in place."""
    for tensor in weights.values():
        if flat := tensor.numel():
            where = torch.rand(flat) < share
            bits(tensor).view(flat, -1)[where] ^= 1


def blank(weights):
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def same(a, b):
    return all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


class Trainer:
    def __init__(self):
        self.weights, self.store = model(), InProcessByteStore()
        self.source, self.publisher = DeltaSource(), WeightPublisher(self.store)

    def publish(self, **options):
        update = self.source.encode(self.weights, **options)
        return self.publisher.publish(update.tensors, partial=update.partial), update

    def receiver(self, weights=None):
        weights = blank(self.weights) if weights is None else weights
        target = DeltaTarget(weights)
        return weights, target, WeightReceiver(target.load, store=self.store, deltas=target)


def test_changes_alone_are_sent_and_arrive_exactly():
    trainer = Trainer()
    held, target, receiver = trainer.receiver()
    for number in range(4):
        published, update = trainer.publish()
        receiver.apply(published)
        trainer.source.commit()
        assert same(held, trainer.weights) and target.version == number + 1
        assert update.partial == (number > 0)
        assert number == 0 or update.size_bytes < 0.2 * update.whole_bytes
        step(trainer.weights)


def test_tensors_of_every_dtype_and_layout_are_told_bit_by_bit():
    weights, source = samples(), DeltaSource()
    held = {name: torch.zeros_like(tensor.detach().resolve_conj()) for name, tensor in weights.items()}
    target = DeltaTarget(held)
    for number in range(3):
        target.load(source.encode(weights, full=number == 1).tensors)
        source.commit()
        for name, tensor in weights.items():
            assert torch.equal(bits_of(held[name]), bits_of(tensor)), name
        bits_of_first = weights["uint8"].numpy()
        bits_of_first[7 * number] ^= 1  # Of which all dtypes are views.


def test_an_update_that_was_not_committed_counts_as_if_it_had_never_been():
    trainer = Trainer()
    held, target, receiver = trainer.receiver()
    receiver.apply(trainer.publish()[0])
    trainer.source.commit()
    for share in (0.01, 0.9):
        step(trainer.weights, share)
        trainer.publish()
    step(trainer.weights)
    _again(target, trainer)
    assert same(held, trainer.weights)


def _again(target, trainer):
    """The next update told against the first one: without the publisher's lineage, which saw three more."""
    update = trainer.source.encode(trainer.weights)
    target.load(update.tensors)
    trainer.source.commit()


@pytest.mark.hostile
def test_a_receiver_of_another_version_is_told_in_full():
    trainer = Trainer()
    early, _, first = trainer.receiver()
    first.apply(trainer.publish()[0])
    trainer.source.commit()
    step(trainer.weights)
    late, target, second = trainer.receiver()
    published, _ = trainer.publish()
    first.apply(published)
    trainer.source.commit()
    with pytest.raises(BaseVersionError):
        second.apply(published)
    assert not late["counts"].any() and second.intact
    update = trainer.source.encode(trainer.weights)
    with pytest.raises(BaseVersionError, match="told in full"):
        target.load(update.tensors)
    published, update = trainer.publish(full=True)
    assert not update.partial
    for receiver in (first, second):
        receiver.apply(published)
    trainer.source.commit()
    assert same(early, trainer.weights) and same(late, trainer.weights)


@pytest.mark.hostile
def test_a_load_that_fails_half_way_leaves_the_version_before():
    trainer = Trainer()
    held, target, receiver = trainer.receiver()
    receiver.apply(trainer.publish()[0])
    trainer.source.commit()
    before = {name: tensor.clone() for name, tensor in held.items()}
    step(trainer.weights)
    held["counts"][7] += 1
    before["counts"][7] += 1
    published, _ = trainer.publish()
    with pytest.raises(WeightUpdateError) as caught:
        receiver.apply(published)
    assert isinstance(caught.value.__cause__, DamagedBytesError)
    assert caught.value.intact and receiver.version == 1 and target.version == 1
    assert same(held, before)
    held["counts"][7] -= 1
    receiver.apply(published)
    assert same(held, trainer.weights)


@pytest.mark.hostile
def test_what_was_loaded_can_be_taken_back_until_it_is_committed():
    trainer = Trainer()
    held = blank(trainer.weights)
    target = DeltaTarget(held)
    for full in (True, False, True):
        target.load(trainer.source.encode(trainer.weights, full=full).tensors)
        trainer.source.commit()
        target.committed(0, ())
        before, version = {n: t.clone() for n, t in held.items()}, target.version
        step(trainer.weights)
        target.load(trainer.source.encode(trainer.weights, full=full).tensors)
        assert same(held, trainer.weights)
        assert list(target.weights(frozenset())) == [] and target.version == version
        assert same(held, before)


@pytest.mark.hostile
def test_other_names_shapes_and_dtypes_are_refused():
    trainer = Trainer()
    weights = blank(trainer.weights)
    changes = [
        {"more": torch.zeros(2)},
        {"counts": torch.zeros(999, dtype=torch.int64)},
        {"scale": torch.zeros(32, dtype=torch.float64)},
        {"scale": torch.zeros(64, dtype=torch.int32)},
        {"embed": torch.zeros(300, 64, dtype=torch.float16)},
        {"embed": torch.zeros(64, 300, dtype=torch.bfloat16)},
    ]
    for change in changes:
        target = DeltaTarget(weights | change)
        with pytest.raises(ManifestMismatchError, match=next(iter(change))):
            target.load(trainer.source.encode(trainer.weights).tensors)
        assert target.version is None
    with pytest.raises(ManifestMismatchError, match="'embed' is unknown"):
        DeltaTarget({"scale": weights["scale"]}).load(trainer.source.encode(trainer.weights).tensors)
    with pytest.raises(UnsupportedTensorError, match="meta"):
        DeltaTarget({"scale": torch.zeros(2, device="meta")})


@pytest.mark.hostile
def test_nothing_is_committed_that_was_not_told():
    source, weights = DeltaSource(), model()
    with pytest.raises(TransportError, match="no update to commit"):
        source.commit()
    update = source.encode(weights)
    next(update.tensors)
    with pytest.raises(TransportError, match="no update to commit"):
        source.commit()
    later = source.encode(weights)
    with pytest.raises(TransportError, match="was given up"):
        next(update.tensors)
    assert len(list(later.tensors)) == len(weights)
    source.commit()
    assert source.size_bytes == sum(t.nbytes for t in weights.values()), "one copy"
    source.close()
    with pytest.raises(TransportClosedError):
        source.encode(weights)


def test_parameters_that_are_not_contiguous_are_filled_all_the_same():
    source, base = DeltaSource(), torch.zeros(6, 10)
    weights = {"w": torch.randn(5, 6)}
    target = DeltaTarget({"w": base[:, 2:7].t()})
    for _ in range(2):
        target.load(source.encode(weights).tensors)
        source.commit()
        assert torch.equal(base[:, 2:7].t(), weights["w"])
        weights["w"][1, 2] += 1


def test_options_that_say_the_same_twice_are_refused():
    target = DeltaTarget({})
    with pytest.raises(ValueError, match="goes without expected= and rollback="):
        WeightReceiver(target.load, deltas=target, rollback="shadow", store=InProcessByteStore())


def test_a_late_receiver_adds_the_changes_up_by_itself():
    with WeightDirectory.local(keep=4) as directory:
        store, weights, source = InProcessByteStore(), model(), DeltaSource()
        publisher = WeightPublisher(store, directory=directory, timeout_s=60.0)
        for _ in range(3):
            update = source.encode(weights)
            publisher.publish(update.tensors, partial=update.partial)
            source.commit()
            step(weights)
        late = blank(weights)
        target = DeltaTarget(late)
        receiver = WeightReceiver(target.load, store=store, directory=directory, deltas=target)
        receiver.pull(timeout_s=60.0)
        assert target.version == 3
        receiver.close()
        publisher.close()
    again = DeltaTarget(early := blank(weights))
    again.load(DeltaSource().encode(weights).tensors)
    assert same(early, weights) and not same(late, weights)


class Rank:
    """A rank of a trainer that tells of its part of the names."""

    def __init__(self, weights, part, store, directory):
        self.weights = {name: weights[name] for name in sorted(weights)[part::2]}
        self.source = DeltaSource()
        self.publisher = WeightPublisher(store, directory=directory, part=part, parts=2, timeout_s=60.0)

    def publish(self, version):
        update = self.source.encode(self.weights)
        self.publisher.publish(update.tensors, version=version, partial=update.partial)
        self.source.commit()
        return update


def test_several_ranks_tell_each_of_their_part():
    with WeightDirectory.local() as directory:
        weights, store = model(), InProcessByteStore()
        ranks, held = [Rank(weights, part, store, directory) for part in range(2)], blank(weights)
        target = DeltaTarget(held)
        receiver = WeightReceiver(target.load, store=store, deltas=target, directory=directory)
        for number in range(5):
            if number == 3:  # Restarted: it tells everything, and the other one goes on.
                ranks[1].publisher.close()
                ranks[1] = Rank(weights, 1, store, directory)
            updates = [rank.publish(number + 1) for rank in ranks]
            assert [update.partial for update in updates] == [number > 0, number not in (0, 3)]
            receiver.pull()
            assert same(held, weights)
            assert receiver.version == number + 1
            step(weights)


@pytest.mark.hostile
def test_a_tensor_is_told_against_what_its_own_source_said_last():
    weights, sources = model(), [DeltaSource(), DeltaSource()]
    names, held = sorted(weights), blank(weights)
    parts = [{name: weights[name] for name in names[part::2]} for part in range(2)]
    target = DeltaTarget(held)

    def encode(order=(0, 1)):
        updates = [sources[i].encode(parts[j]) for i, j in enumerate(order)]
        return [pair for update in updates for pair in update.tensors]

    for _ in range(2):
        target.load(encode())
        target.committed(0, ())
        for source in sources:
            source.commit()
        step(weights)
    assert target.version == 2
    before = {name: tensor.clone() for name, tensor in held.items()}
    first = encode()
    with pytest.raises(DecodeError, match="comes twice"):
        target.load([*first, first[0]])
    assert same(held, before)
    sources[1].commit()
    step(weights)
    with pytest.raises(BaseVersionError, match="version 3, and this receiver holds version 2"):
        target.load(encode())
    with pytest.raises(DecodeError, match="one version of each source"):
        target.load([*first[:1], *encode()[1:]])
    assert same(held, before)


@pytest.mark.hostile
def test_autograd_knows_what_a_delta_changed():
    source, weights = DeltaSource(), {"w": torch.zeros(100, requires_grad=True)}
    target = DeltaTarget(weights)
    new = torch.zeros(100)
    for written in (100, 3):
        new[:written] += 1
        loss = (weights["w"] ** 2).sum()
        target.load(source.encode({"w": new}).tensors)
        source.commit()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert torch.equal(weights["w"].detach(), new)
    loss = (weights["w"] ** 2).sum()
    target.revert()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
