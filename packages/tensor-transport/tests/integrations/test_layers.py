"""Plain layers of vLLM, loaded at once: here plain objects that load and pack as vLLM's do."""

from types import SimpleNamespace

import pytest
import torch
from vllm_fake import UnquantizedEmbeddingMethod, UnquantizedLinearMethod, install

FORM, COUNT = (4, 8), 12


class Weight(torch.nn.Parameter):
    """A parameter that knows how it is loaded."""

    weight_loader = None


class Plain(torch.nn.Module):
    """Takes two halves; when it has both, it packs them in the memory that it is given, and gives that up."""

    def __init__(self, method, keeps):
        super().__init__()
        self.quant_method, self.rooms = method(), []
        kept = torch.nn.Parameter(torch.zeros(FORM if keeps else (0,)), requires_grad=False)
        self.info = SimpleNamespace(
            restore_device=torch.device("cpu"),
            kernel_tensors=({"weight": kept}, {}),
            can_load=lambda: True,
        )
        self.kept, self.packed, self.taken = kept, None, []
        self.weight = Weight(torch.empty(FORM, device="meta"), requires_grad=False)
        self.weight.weight_loader = self.take

    def take(self, parameter, half, place):
        assert half.shape == (FORM[0] // 2, FORM[1]), f"half {place} has the shape {tuple(half.shape)}"
        self.taken.append((half, place))
        if len(self.taken) == 2:
            for half, place in self.taken:
                self.weight.data[2 * place : 2 * place + 2].copy_(half)
            self.packed = self.weight.data.clone()
            self.rooms.append(self.weight.data_ptr())
            assert type(self.weight) is Weight


class Model(torch.nn.Module):
    def __init__(self, method=UnquantizedLinearMethod, keeps=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(Plain(method, keeps) for _ in range(COUNT))

    def load_weights(self, values):
        for place in range(2):
            for layer, value in zip(self.layers, values, strict=True):
                layer.weight.weight_loader(layer.weight, value[2 * place : 2 * place + 2], place=place)


@pytest.fixture
def loading(monkeypatch):
    install(monkeypatch)
    from raycrew.tensor_transport.integrations.vllm import _layers

    return _layers.loading_plain_layers


@pytest.fixture
def values():
    return list(torch.arange(float(COUNT * FORM[0] * FORM[1])).reshape(COUNT, *FORM))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("method", [UnquantizedLinearMethod, UnquantizedEmbeddingMethod])
def test_each_layer_gets_its_own_weights(loading, values, method, keeps):
    model = Model(method, keeps)
    with loading(model):
        model.load_weights(values)
        assert not any(layer.taken for layer in model.layers)
    assert all(torch.equal(layer.packed, value) for layer, value in zip(model.layers, values, strict=True))


def test_one_room_serves_all_layers(loading, values):
    with loading(model := Model()):
        model.load_weights(values)
    assert len({room for layer in model.layers for room in layer.rooms}) == 1


def test_what_a_layer_computes_with_is_loaded_in_place(loading, values):
    with loading(model := Model(UnquantizedEmbeddingMethod, keeps=True)):
        model.load_weights(values)
    assert all(layer.rooms == [layer.kept.data_ptr()] for layer in model.layers)
    assert all(torch.equal(layer.kept, value) for layer, value in zip(model.layers, values, strict=True))


def test_what_a_loader_raises_is_raised(loading, values):
    values[3] = torch.zeros(FORM[0], FORM[1] + 1)
    with pytest.raises(AssertionError, match="shape"), loading(model := Model()):
        model.load_weights(values)
    assert model.layers[3].packed is None


def test_after_an_error_of_the_model_nothing_is_loaded_and_layers_load_by_themselves(loading, values):
    model = Model()
    with pytest.raises(ValueError, match="shorter"), loading(model):
        model.load_weights(values[:3])
    assert not any(layer.taken for layer in model.layers)
    model.load_weights(values)
    assert all(layer.weight.weight_loader == layer.take for layer in model.layers)


def test_other_layers_load_when_they_are_given_something(loading, values):
    model = Model(method=dict)
    with loading(model):
        model.load_weights(values)
        assert all(len(layer.taken) == 2 for layer in model.layers)
