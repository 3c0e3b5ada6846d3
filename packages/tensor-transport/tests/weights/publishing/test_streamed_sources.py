"""Tensors of an iterator: a model's are looked at again at the end, a buffer may change, none is kept."""

import weakref

import pytest
import torch
from models import Model, assert_same

from raycrew.tensor_transport.errors import SourceChangedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver

pytestmark = pytest.mark.hostile


def arrived(pairs, **options):
    store, model = InProcessByteStore(), Model()
    update = WeightPublisher(store, bucket_bytes=256, **options).publish(pairs)
    WeightReceiver(model.load, store=store).apply(update)
    return model.tensors


def then(pairs, act):
    """Pairs, and an act after the last one."""
    yield from pairs
    act()


def flat(count=8, size=64):
    """Tensors of a model that keeps them in one storage."""
    base = torch.arange(float(count * size))
    return base, {f"w{i}": base[i * size : (i + 1) * size] for i in range(count)}


@pytest.mark.parametrize("order", [list, lambda names: list(reversed(names))])
def test_a_write_to_one_of_many_views_of_one_storage_is_refused(order):
    base, held = flat()
    pairs = ((name, held[name].detach()) for name in order(list(held)))
    with pytest.raises(SourceChangedError, match=r"1 of the tensors .* 'w3'"):
        arrived(then(pairs, lambda: base.numpy().__setitem__(3 * 64, -1)))
    assert_same(arrived((name, held[name].detach()) for name in held), held)


def test_a_write_to_tied_tensors_is_refused():
    tied = torch.ones(64)
    pairs = [("embed", tied), ("body", torch.ones(64)), ("head", tied)]
    with pytest.raises(SourceChangedError, match=r"2 of the tensors .* 'embed', 'head'"):
        arrived(then(((name, tensor.detach()) for name, tensor in pairs), lambda: tied.add_(1)))
    assert_same(arrived((name, tensor.detach()) for name, tensor in pairs), dict(pairs))


@pytest.mark.parametrize(
    "view", [torch.Tensor.conj, lambda t: t.conj().imag, torch.Tensor.t, lambda t: t[1:, ::2]]
)
def test_a_write_is_seen_through_any_view(view):
    held = torch.randn(4, 6, dtype=torch.complex64)
    expected = view(held).clone()
    assert torch.equal(arrived((name, view(held)) for name in ["w"])["w"], expected)
    with pytest.raises(SourceChangedError, match="'w'"):
        arrived(then(((name, view(held)) for name in ["w"]), lambda: held.mul_(2j)))


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"transform": lambda _, t: t * 2}])
def test_a_write_to_what_was_published_as_something_else_is_refused(options):
    held = {f"w{i}": torch.ones(64) for i in range(3)}
    with pytest.raises(SourceChangedError, match="'w1'"):
        arrived(then(((n, t.detach()) for n, t in held.items()), held["w1"].zero_), **options)


def test_a_write_is_seen_in_inference_mode():
    held = {f"w{i}": torch.nn.Parameter(torch.ones(64)) for i in range(3)}
    with torch.inference_mode():
        assert_same(
            arrived((n, p.detach()) for n, p in held.items()), {n: p.detach() for n, p in held.items()}
        )
        with pytest.raises(SourceChangedError, match="'w1'"):
            arrived(then(((n, p.detach()) for n, p in held.items()), held["w1"].zero_))


def test_one_buffer_may_hold_a_tensor_after_another_in_different_shapes():
    buffer, other = torch.empty(300), torch.ones(64)
    shapes = [(10, 30), (64,), (16, 4), (300,), (5,)]

    def gathered():
        for i, shape in enumerate(shapes):
            size = torch.Size(shape).numel()
            yield f"w{i}", buffer[:size].fill_(i).view(shape)
            yield f"other{i}", other.detach()

    found = arrived(gathered())
    assert all(torch.equal(found[f"w{i}"], torch.full(shape, float(i))) for i, shape in enumerate(shapes))
    with pytest.raises(SourceChangedError, match="'other0'"):
        arrived(then(gathered(), lambda: other.add_(1)))


def test_a_buffer_may_be_filled_with_several_tensors_at_a_time():
    buffer = torch.empty(300)

    def gathered():
        for bucket, count in enumerate([3, 2, 3, 1]):
            buffer.numpy()[:] = 10 * bucket  # What is not given is written, too.
            for i in range(count):
                yield f"w{bucket}.{i}", buffer[100 * i : 100 * i + 100].add_(i)

    found = arrived(gathered())
    assert {name: tensor[7].item() for name, tensor in found.items()} == {
        f"w{bucket}.{i}": 10.0 * bucket + i for bucket, count in enumerate([3, 2, 3, 1]) for i in range(count)
    }


def test_a_buffer_may_be_filled_with_what_is_not_selected():
    buffer = torch.empty(64)
    pairs = ((f"w{i}", buffer.fill_(i)) for i in range(4))
    assert arrived(pairs, select={"w0", "w1"})["w1"][0].item() == 1
    pairs = ((f"w{i}", buffer.fill_(i)) for i in range(4))
    assert arrived(pairs, select={"w0"})["w0"][0].item() == 0


def test_memory_that_is_given_back_is_not_looked_at():
    held = {f"w{i}": torch.nn.Parameter(torch.ones(64)) for i in range(3)}

    def gathered():
        for name, parameter in held.items():
            yield name, parameter.detach()
            yield f"{name}.parameter", parameter
            parameter.untyped_storage().resize_(0)

    assert set(arrived(gathered())) == {*held, *(f"{name}.parameter" for name in held)}


def test_a_tensor_that_was_made_as_it_was_asked_for_is_not_kept():
    alive, most = weakref.WeakSet(), 0

    def made():
        nonlocal most
        for i in range(20):
            tensor = torch.full((64,), float(i))
            alive.add(tensor.untyped_storage())
            most = max(most, len(alive))
            yield f"w{i}", tensor

    assert len(arrived(made())) == 20
    assert most <= 2
    assert not alive
