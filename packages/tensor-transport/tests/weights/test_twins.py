"""Names that are one tensor in a receiver: an update has to give them the same elements."""

import pytest
import torch
from models import weights

from raycrew.tensor_transport import DeltaSource, DeltaTarget
from raycrew.tensor_transport.errors import ManifestMismatchError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver, join_updates

pytestmark = pytest.mark.hostile
FIRST, LAST = "layer.0.weight", "layer.3.weight"


@pytest.fixture
def store():
    return InProcessByteStore()


def tied(seed=0):
    found = weights(seed)
    return found | {LAST: found[FIRST]}


class Tied:
    """Has two names for one tensor."""

    def __init__(self, store, **options):
        self.tensors, self.loads = tied(), 0
        self.receiver = WeightReceiver(self.load, expected=self.tensors, store=store, **options)

    def load(self, tensors):
        for name, tensor in tensors:
            self.loads += 1
            self.tensors[name].copy_(tensor)


def pairs(state):
    yield from state.items()


def test_what_is_told_apart_and_differs_is_refused_before_anything_is_changed(store):
    publisher, model = WeightPublisher(store, bucket_bytes=128), Tied(store)
    with pytest.raises(ManifestMismatchError, match="are one tensor here, and differ") as caught:
        model.receiver.apply(publisher.publish(weights(1)))
    assert caught.value.mismatched == [FIRST, LAST]
    assert model.loads == 0 and model.receiver.intact and model.receiver.version is None
    assert torch.equal(model.tensors["ids"], weights()["ids"])
    model.receiver.apply(publisher.publish(tied(1)))
    assert torch.equal(model.tensors[LAST], weights(1)[FIRST])


@pytest.mark.parametrize("apart", [False, True])
def test_equal_ones_are_loaded_tied_or_not(store, apart):
    state = tied(1)
    if apart:
        state[LAST] = state[LAST].clone()
    model = Tied(store)
    model.receiver.apply(WeightPublisher(store, bucket_bytes=128).publish(state))
    assert model.loads == len(state) and torch.equal(model.tensors[LAST], state[FIRST])


def test_those_of_an_iterator_are_compared_as_they_come(store):
    publisher, model = WeightPublisher(store, bucket_bytes=128), Tied(store, rollback="shadow")
    model.receiver.apply(publisher.publish(pairs(tied(1))))
    with WeightDirectory.local() as directory:
        streaming = WeightPublisher(store, bucket_bytes=128, directory=directory, timeout_s=60.0)
        receiver = WeightReceiver(model.load, expected=tied(), store=store, directory=directory)
        streaming.publish(pairs(weights(2)))
        with pytest.raises(ManifestMismatchError, match="are one tensor here"):
            receiver.pull(timeout_s=60.0)
        assert not receiver.intact
        receiver.close()
        streaming.close()
    model.receiver.apply(publisher.publish(pairs(tied(3))))
    with pytest.raises(ManifestMismatchError, match="are one tensor here"):
        model.receiver.apply(publisher.publish(pairs(weights(4))))
    assert model.receiver.intact, "it returned to what it had"
    assert torch.equal(model.tensors[LAST], weights(3)[FIRST])


@pytest.mark.parametrize("differ", [True, False])
def test_those_of_several_ranks_are_compared_wherever_they_lie(store, differ):
    """Each rank counts its buckets from 0: one that is at the same place of another part is another one."""
    state = tied(1) if not differ else weights(1)
    with WeightDirectory.local() as directory:
        ranks = [
            WeightPublisher(store, directory=directory, part=part, parts=2, timeout_s=60.0)
            for part in range(2)
        ]
        model = Tied(store, directory=directory)
        ranks[0].publish({name: tensor for name, tensor in state.items() if name != LAST}, version=1)
        ranks[1].publish({LAST: state[LAST]}, version=1)
        if differ:
            with pytest.raises(ManifestMismatchError, match="are one tensor here, and differ"):
                model.receiver.pull(timeout_s=60.0)
        else:
            model.receiver.pull(timeout_s=60.0)
        assert model.loads == (0 if differ else len(state)) and model.receiver.intact


def test_without_memory_nothing_is_tied(store):
    loaded = {}
    expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights().items()}
    receiver = WeightReceiver(lambda found: loaded.update(found), expected=expected, store=store)
    receiver.apply(WeightPublisher(store).publish(weights(1)))
    assert torch.equal(loaded[LAST], weights(1)[LAST])


def test_a_target_of_deltas_takes_nothing_else_for_one_tensor():
    held = tied()
    target, source = DeltaTarget(held, verify=False), DeltaSource()
    before = {name: tensor.clone() for name, tensor in held.items()}
    target.load(source.encode(before).tensors)
    target.committed(0, ())
    source.commit()
    for full in (True, False):
        with pytest.raises(ManifestMismatchError, match="are one tensor here"):
            target.load(source.encode(weights(1), full=full).tensors)
        assert all(torch.equal(held[name], before[name]) for name in held)
    target.load(source.encode(tied(2)).tensors)
    assert torch.equal(held[LAST], weights(2)[FIRST])


def test_those_of_a_model_without_memory_are_told_by_their_storage(store):
    with torch.device("meta"):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    loads = []
    receiver = WeightReceiver(loads.extend, expected=model.state_dict(), store=store)
    state = {f"{name}.weight": torch.full((3, 3), float(value)) for value, name in enumerate("abc")}
    with pytest.raises(ManifestMismatchError, match=r"'a\.weight' and 'c\.weight' are one tensor here"):
        receiver.apply(WeightPublisher(store).publish(state))
    assert not loads and receiver.intact
    receiver.apply(WeightPublisher(store).publish(state | {"c.weight": state["a.weight"]}))
    assert len(loads) == 3


HOWS = ["apply", "pull", "prepare"]


def receive(receiver, how, update):
    if how == "pull":
        receiver.pull(timeout_s=60.0)
        return
    if how == "prepare":
        receiver.prepare(update.version, timeout_s=60.0)
    receiver.apply(update if how == "apply" else update.version, timeout_s=60.0)


@pytest.mark.parametrize("how", HOWS)
def test_a_partial_update_brings_all_of_them_or_none(store, how):
    """What it brings for one of them would be that of the others, too, which the trainer did not change."""
    with WeightDirectory.local() as directory:
        publisher = WeightPublisher(store, bucket_bytes=128, directory=directory, timeout_s=60.0)
        model = Tied(store, directory=directory)
        publisher.publish(tied(1))
        model.receiver.pull(timeout_s=60.0)
        loads, one = model.loads, {FIRST: weights(2)[FIRST], "ids": weights(2)["ids"]}
        with pytest.raises(ManifestMismatchError, match="is one tensor here with a name that it") as caught:
            receive(model.receiver, how, publisher.publish(one, partial=True))
        assert caught.value.missing == [LAST]
        assert model.loads == loads and model.receiver.intact and model.receiver.version == 1
        assert torch.equal(model.tensors[LAST], weights(1)[FIRST])
        publisher.publish(tied(3))
        model.receiver.pull(timeout_s=60.0)
        both = {name: tied(4)[name] for name in (FIRST, LAST)}
        receive(model.receiver, how, publisher.publish(both, partial=True))
        receive(model.receiver, how, publisher.publish({"ids": torch.arange(7) + 5}, partial=True))
        assert model.receiver.version == 5 and torch.equal(model.tensors[LAST], weights(4)[FIRST])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("brings", [True, False])
def test_so_does_one_whose_names_come_with_its_buckets(store, how, brings):
    """One rank tells all of its part from an iterator, and another one what changed."""
    whole = tied(1)
    with WeightDirectory.local() as directory:
        ranks = [
            WeightPublisher(store, bucket_bytes=128, directory=directory, part=part, parts=2, timeout_s=60.0)
            for part in range(2)
        ]
        model = Tied(store, directory=directory)
        ranks[0].publish({FIRST: whole[FIRST]}, version=1)
        ranks[1].publish({name: tensor for name, tensor in whole.items() if name != FIRST}, version=1)
        model.receiver.pull(timeout_s=60.0)
        loads, changed = model.loads, tied(2)
        some = {name: changed[name] for name in ("ids", *([LAST] if brings else []))}
        parts = [ranks[0].publish(pairs({FIRST: changed[FIRST]}), version=2)]
        parts.append(ranks[1].publish(some, version=2, partial=True))
        update = join_updates(parts)
        if brings:
            receive(model.receiver, how, update)
            assert model.receiver.version == 2 and torch.equal(model.tensors[LAST], changed[LAST])
            return
        with pytest.raises(ManifestMismatchError, match="is one tensor here with a name that it brings"):
            receive(model.receiver, how, update)
        assert model.loads == loads and model.receiver.intact and model.receiver.version == 1
        assert torch.equal(model.tensors["ids"], whole["ids"])


def shapes_of(memory):
    """Tensors of the same elements, in the same order."""
    return {
        "all": memory,
        "rows": memory.view(2, 4),
        "one": memory.view(1, 8).as_strided((1, 8), (3, 1)),
        "cube": memory.view(2, 2, 2),
    }


@pytest.mark.parametrize("at", ["cpu", "meta"])
@pytest.mark.parametrize("other", ["rows", "one", "cube"])
def test_one_memory_in_several_shapes_is_one_tensor(store, at, other):
    held, loads = torch.zeros(8, device=at), []
    expected = {name: shapes_of(held)[name] for name in ("all", other)}
    receiver = WeightReceiver(loads.extend, expected=expected, store=store)
    differ = {"all": torch.ones(8), other: torch.full_like(expected[other], 2, device="cpu")}
    with pytest.raises(ManifestMismatchError, match="are one tensor here, and differ"):
        receiver.apply(WeightPublisher(store).publish(differ))
    assert not loads
    equal = {"all": torch.arange(8.0), other: torch.arange(8.0).view(expected[other].shape)}
    receiver.apply(WeightPublisher(store).publish(equal))
    assert len(loads) == 2


def test_other_elements_of_one_memory_or_in_another_order_are_another_tensor(store):
    base, loads = torch.arange(16.0).view(4, 4), []
    expected = {"rows": base[:2], "others": base[2:], "even": base[::2], "turned": base.t()[:, :2]}
    receiver = WeightReceiver(loads.extend, expected=expected, store=store)
    receiver.apply(WeightPublisher(store).publish({name: part.clone() for name, part in expected.items()}))
    assert len(loads) == 4


@pytest.mark.parametrize("other", ["rows", "one", "cube"])
def test_a_target_of_deltas_knows_one_memory_in_several_shapes(other):
    memory = torch.zeros(8)
    held = {name: shapes_of(memory)[name] for name in ("all", other)}
    target, source = DeltaTarget(held, verify=False), DeltaSource()
    with pytest.raises(ManifestMismatchError, match="are one tensor here"):
        target.load(source.encode({"all": torch.ones(8), other: torch.full_like(held[other], 2)}).tensors)
    target.load(source.encode({"all": torch.ones(8), other: torch.ones_like(held[other])}).tensors)
    assert memory.eq(1).all()


def lazy_of(values):
    """A memory, and what is read of it with other signs."""
    return {"w": values, "conjugate": values.conj(), "imaginary": values.conj().imag}


def test_what_is_read_with_other_signs_is_another_tensor(store):
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    sent = {name: tensor.clone() for name, tensor in lazy_of(values).items()}
    held = lazy_of(torch.zeros_like(values))
    target, source = DeltaTarget(lazy_of(torch.zeros_like(values))), DeltaSource()

    def load(tensors):
        for name, tensor in tensors:
            held[name].copy_(tensor)

    WeightReceiver(load, expected=held, store=store).apply(WeightPublisher(store).publish(sent))
    target.load(source.encode(sent).tensors)
    assert held["w"].equal(values) and target.version is not None


PARTS = {
    "rows": lambda whole: whole[1:3],
    "column": lambda whole: whole[:, 1],
    "bits": lambda whole: whole.view(torch.int32),
    "last": lambda whole: whole[3, 3],
}


@pytest.mark.parametrize("at", ["cpu", "meta"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", ["whole", "part"])
def test_names_that_have_some_memory_in_common_have_to_agree_there(store, at, streamed, part, first):
    def state_of(whole):
        both = {"whole": whole, "other": whole.new_zeros(3), "part": PARTS[part](whole)}
        return {name: both[name] for name in (first, *(other for other in both if other != first))}

    loaded = {}
    receiver = WeightReceiver(loaded.update, expected=state_of(torch.zeros(4, 4, device=at)), store=store)
    publisher, sent = WeightPublisher(store, bucket_bytes=128), state_of(torch.arange(16.0).view(4, 4))
    receiver.apply(publisher.publish(pairs(sent) if streamed else sent))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in sent.items())
    loaded.clear()
    sent["part"] = sent["part"] + 1
    with pytest.raises(ManifestMismatchError, match="have memory in common here, and differ") as caught:
        receiver.apply(publisher.publish(pairs(sent) if streamed else sent))
    assert sorted(caught.value.mismatched) == ["part", "whole"] and not loaded
    assert receiver.intact or streamed


def test_of_several_that_have_memory_in_common_those_that_differ_are_named(store):
    base = torch.arange(16.0)
    names = {"flat": base, "a": base[:8].view(2, 4), "b": base[8:12], "even": base[8::2]}
    receiver = WeightReceiver(list, expected=names, store=store)
    publisher = WeightPublisher(store)
    receiver.apply(publisher.publish(names))
    apart = {name: tensor.clone() for name, tensor in names.items()}
    apart["even"][-1] += 1
    with pytest.raises(ManifestMismatchError, match="'flat' and 'even' have memory in common here"):
        receiver.apply(publisher.publish(apart))
    apart["flat"][14] += 1
    receiver.apply(publisher.publish(apart))
    apart["a"][1, 1] += 1
    with pytest.raises(ManifestMismatchError, match="'flat' and 'a' have memory in common here"):
        receiver.apply(publisher.publish(apart))


@pytest.mark.parametrize("how", HOWS)
def test_a_partial_update_brings_all_that_have_memory_in_common_or_none(store, how):
    base = torch.zeros(8)
    held = {"whole": base, "part": base[:4], "columns": torch.zeros(2, 4)[:, :2], "ids": torch.zeros(2)}
    with WeightDirectory.local() as directory:
        publisher = WeightPublisher(store, bucket_bytes=128, directory=directory, timeout_s=60.0)
        receiver = WeightReceiver(list, expected=held, store=store, directory=directory)
        publisher.publish(held)
        receiver.pull(timeout_s=60.0)
        with pytest.raises(ManifestMismatchError, match="has memory in common here with a name") as caught:
            receive(receiver, how, publisher.publish({"part": torch.ones(4)}, partial=True))
        assert caught.value.missing == ["whole"] and receiver.intact and receiver.version == 1
        publisher.publish(held)
        receiver.pull(timeout_s=60.0)
        both = {"whole": torch.ones(8), "part": torch.ones(4)}
        receive(receiver, how, publisher.publish(both, partial=True))
        receive(receiver, how, publisher.publish({"ids": torch.ones(2)}, partial=True))
        assert receiver.version == 5


def test_what_has_other_columns_of_one_memory_has_none_in_common(store):
    """As the parts of a fused parameter have."""
    base, found = torch.zeros(4, 6), {}
    fused = {"q": base[:, :2], "k": base[:, 2:4], "v": base[:, 4:], "all but": base[1:, 1:1]}
    receiver = WeightReceiver(found.update, expected=fused, store=store)
    sent = {name: torch.full_like(tensor, i) for i, (name, tensor) in enumerate(fused.items())}
    receiver.apply(WeightPublisher(store).publish(sent))
    with WeightDirectory.local() as directory:
        publisher = WeightPublisher(store, directory=directory, timeout_s=60.0)
        receiver = WeightReceiver(found.update, expected=fused, store=store, directory=directory)
        for partial, some in ((False, sent), (True, {"k": sent["k"]})):
            publisher.publish(some, partial=partial)
            receiver.pull(timeout_s=60.0)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_target_of_deltas_refuses_what_differs_where_memory_is_in_common(part, verify):
    def state_of(whole):
        return {"whole": whole, "part": PARTS[part](whole), "other": torch.zeros(2)}

    held = state_of(torch.zeros(4, 4))
    target, source = DeltaTarget(held, verify=verify), DeltaSource()
    for step in range(3):
        sent = {n: t.clone() for n, t in state_of(torch.arange(16.0).view(4, 4) + step).items()}
        target.load(source.encode(sent).tensors)
        target.committed(0, ())
        source.commit()
        assert held["whole"].equal(sent["whole"])
    before = held["whole"].clone()
    with pytest.raises(ManifestMismatchError, match="'part', 'whole' have memory in common here"):
        target.load(source.encode(sent | {"part": sent["part"] + 1}).tensors)
    assert held["whole"].equal(before)


def test_what_is_read_with_other_signs_has_to_be_what_the_memory_has(store):
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    receiver = WeightReceiver(list, expected=lazy_of(torch.zeros_like(values)), store=store)
    sent = {name: tensor.clone() for name, tensor in lazy_of(values).items()}
    with pytest.raises(ManifestMismatchError, match="'w' and 'conjugate' have memory in common here"):
        receiver.apply(WeightPublisher(store).publish(sent | {"conjugate": values}))
    with pytest.raises(ManifestMismatchError, match="'w' and 'imaginary' have memory in common here"):
        receiver.apply(WeightPublisher(store).publish(sent | {"imaginary": values.imag.clone()}))


def test_of_freed_memory_nothing_is_one_tensor(store):
    """As sharded models have it of what they gather only to compute with."""
    expected, found = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(2, 3)}, {}
    for tensor in expected.values():
        tensor.untyped_storage().resize_(0)
    receiver = WeightReceiver(found.update, expected=expected, store=store)
    sent = {name: torch.full(tensor.shape, float(i)) for i, (name, tensor) in enumerate(expected.items())}
    receiver.apply(WeightPublisher(store).publish(sent))
    assert all(found[name].equal(tensor) for name, tensor in sent.items())
