"""Tensors whose form changes while they are published, as by a `half()`: what was planned holds."""

import pytest
import torch
from models import Model, assert_same

from raycrew.tensor_transport.errors import SourceChangedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver

pytestmark = pytest.mark.hostile

CHANGES = {
    "turned": lambda tensor: tensor.t().contiguous(),
    "of as many bytes": lambda tensor: tensor.half().repeat(2, 1),
    "smaller": torch.Tensor.half,
    "larger": torch.Tensor.double,
    "of more rows": lambda tensor: tensor.repeat(2, 1),
    "none left": lambda tensor: tensor[:0],
}


def parameters():
    return {f"w{i}": torch.nn.Parameter(torch.arange(24.0).reshape(4, 6) + i) for i in range(4)}


class Renaming:
    """Asked for each name as tensors are planned, and as each is taken: the nth time something happens."""

    def __init__(self, act, nth):
        self.act, self.left = act, nth

    def __call__(self, name):
        self.left -= 1
        if self.left == 0:
            self.act()
        return name


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bucket_bytes", [128, None])
@pytest.mark.parametrize("make", [InProcessByteStore, SharedMemoryTransport])
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_a_tensor_that_takes_another_form_is_named(directory, make, bucket_bytes, change):
    """All take it at once, before each of the moments at which one is planned or taken."""
    store, nth, refused = make(), 0, 0
    while True:
        nth += 1
        held, planned = parameters(), parameters()

        def act(held=held):
            for parameter in held.values():
                parameter.data = CHANGES[change](parameter.data)

        rename = Renaming(act, nth)
        options = {"directory": directory and directory(), "bucket_bytes": bucket_bytes}
        publisher = WeightPublisher(store, rename=rename, **options)
        try:
            update = publisher.publish(held)
        except SourceChangedError as error:
            refused += 1
            assert set(error.names) <= held.keys()
            publisher.close()
            continue
        model = Model()
        WeightReceiver(model.load, store=store, expected=planned).apply(update)
        assert_same(model.tensors, {name: p.detach() for name, p in planned.items()})
        publisher.close()
        break
    assert rename.left > 0 and refused == nth - 1 == 8


@pytest.mark.parametrize("form", [dict, lambda held: list(held.items())])
def test_a_tensor_that_is_tied_no_more_is_named(form):
    """Its elements come with those of the other name, which stays as it was."""
    tied = torch.nn.Parameter(torch.ones(4, 6))
    body, head = torch.nn.Parameter(torch.zeros(4, 6)), torch.nn.Parameter(tied.data)
    held = {"embed": tied, "body": body, "head": head}

    def act():
        head.data = torch.full((4, 6), 7.0)
        body.data.fill_(7)

    store = InProcessByteStore()
    publisher = WeightPublisher(store, rename=Renaming(act, 2 + 3 + 2))  # As the body is taken.
    with pytest.raises(SourceChangedError, match="'head'") as caught:
        publisher.publish(form(held))
    assert caught.value.names == ("head",)
    assert not store.held and publisher.latest is None
    update = publisher.publish(form(held))
    model = Model()
    WeightReceiver(model.load, store=store).apply(update)
    assert_same(model.tensors, {name: p.detach() for name, p in held.items()})
