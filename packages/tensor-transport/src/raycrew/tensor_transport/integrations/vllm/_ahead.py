"""Weights made ready beside those that a model computes with: a pause then only exchanges the two.

When a model is loaded whole, it is noted which call of a loader takes which tensor. From then on the same
calls load doubles of its layers, in any order, between steps of the engine; what a layer makes of its
weights, as a CPU packs them, is made by the double. Only models of plain layers, on a CPU, have such a plan.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.integrations.vllm._layers import (
    Call,
    PlainLayer,
    carved,
    form_of,
    like,
    room_for,
)

_OF_A_DEFERRED_LOADER = "online_process_loader"
_WAS_PROCESSED = "_already_called_process_weights_after_loading"
_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PARAMETER, _WEIGHT = object(), object()
_ABSENT = object()


class Taken:
    """A model's weights as they are taken, which are remembered by what they are."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.names: dict[int, str] = {}
        self.are_distinct = True
        self._weights, self._held = weights, list[torch.Tensor]()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.are_distinct = self.are_distinct and id(tensor) not in self.names
            self.names[id(tensor)] = name
            self._held.append(tensor)  # or another one might have its number
            yield name, tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of a layer's loader, for any tensor of that name.

    Attributes:
        name: Of the tensor, in a checkpoint.
        parameter: Of the layer, that it is loaded into.
        call: The call, with marks in place of both.
    """

    name: str
    parameter: str
    call: Call

    def run(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        def filled(value: object) -> object:
            return parameter if value is _PARAMETER else weight if value is _WEIGHT else value

        args = [filled(value) for value in self.call.args]
        self.call.loader(*args, **{key: filled(value) for key, value in self.call.options.items()})


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """How a layer is loaded.

    Attributes:
        module: vLLM's.
        forms: What its parameters are like before they are packed.
        steps: What loads them.
        method: What packs them; None where nothing does.
        is_kept: Whether the layer computes with its parameters as they are loaded, too.
    """

    module: torch.nn.Module
    forms: Mapping[str, torch.Tensor]
    steps: Sequence[_Step]
    method: Any
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is loaded.

    Attributes:
        names: Of all tensors that it was given.
        layers: Of all layers that took some.
        attention: Layers that vLLM has look at the others when these are loaded.
    """

    names: frozenset[str]
    layers: Sequence[_LayerPlan]
    attention: Sequence[Any]


def plan_of(model: torch.nn.Module, layers: Sequence[PlainLayer], taken: Taken) -> Plan | None:
    """How a model was loaded, from all of its layers, before vLLM ended that; None where it can't be said.

    That is so where another layer took something, or something other than the tensors as they were given.
    """
    noted = {layer.module for layer in layers}
    if not taken.are_distinct or any(_took(module) for module in model.modules() if module not in noted):
        return None
    plans = [_layer_plan(layer, taken.names) for layer in layers if layer.calls]
    found = [plan for plan in plans if plan is not None]
    if len(found) < len(plans) or not found:
        return None
    attention = [module for module in model.modules() if is_deferred_attention_layer(module)]
    return Plan(frozenset(taken.names.values()), found, attention)


def _took(module: torch.nn.Module) -> bool:
    """Whether a layer was loaded, wholly or in part."""
    info = get_layerwise_info(module)
    return not info.can_load() or info.load_numel > 0


def _layer_plan(layer: PlainLayer, names: Mapping[int, str]) -> _LayerPlan | None:
    steps = [_step(call, layer, names) for call in layer.calls]
    found = [step for step in steps if step is not None]
    are_plain = all(parameter.is_contiguous() for parameter in layer.parameters.values())
    if len(found) < len(steps) or not are_plain or layer.module._buffers:  # noqa: SLF001 - with those of None
        return None
    forms = {name: like(one, torch.empty_like(one, device="meta")) for name, one in layer.parameters.items()}
    method = getattr(layer.module, "quant_method", None)
    is_kept = method is None or isinstance(method, UnquantizedEmbeddingMethod)
    if is_kept and any(form_of(live) != form_of(forms[name]) for name, live in layer.kept.items()):
        return None
    if not is_kept and forms.keys() != {step.parameter for step in found}:  # A double has no other values.
        return None
    return _LayerPlan(layer.module, forms, found, method, is_kept)


def _step(call: Call, layer: PlainLayer, names: Mapping[int, str]) -> _Step | None:
    """A call that takes a parameter of the layer and a tensor as it was given, and no other tensor."""
    given = [*call.args, *call.options.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    parameters = [name for name, one in layer.parameters.items() if any(one is value for value in tensors)]
    weights = [value for value in tensors if id(value) in names]
    if (len(tensors), len(parameters), len(weights)) != (2, 1, 1):
        return None
    (parameter,), (weight,) = parameters, weights

    def marked(value: object) -> object:
        return _WEIGHT if value is weight else _PARAMETER if isinstance(value, torch.Tensor) else value

    args = tuple(marked(value) for value in call.args)
    options = {key: marked(value) for key, value in call.options.items()}
    return _Step(names[id(weight)], parameter, Call(_own_loader(call.loader), args, options))


def _own_loader(loader: Callable[..., object]) -> Callable[..., object]:
    """A layer's own loader, within the one by which vLLM has it wait until the layer has all."""
    found: Callable[..., object] = inspect.unwrap(
        loader, stop=lambda each: getattr(each, "__name__", "") != _OF_A_DEFERRED_LOADER
    )
    return found


class Ahead:
    """A version on its way into doubles of a model's layers, one after another.

    What a model no longer computes with is kept, and given up piece by piece as the next version comes: its
    memory is then had again, which takes less time than memory that the system has to make ready.

    Args:
        plan: How the model is loaded.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._waiting = plan, set(plan.names)
        self._doubles = [_Double(layer) for layer in plan.layers]
        self._wanting: defaultdict[str, list[tuple[_Double, int]]] = defaultdict(list)
        for double in self._doubles:
            for number, step in enumerate(double.plan.steps):
                self._wanting[step.name].append((double, number))
        self._room = torch.empty(
            max(room_for(layer.forms.values()) for layer in plan.layers), dtype=torch.uint8
        )

    def forget(self) -> None:
        """Nothing of a version has come."""
        self._waiting = set(self._plan.names)
        for double in self._doubles:
            double.given.clear()

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load what has come; the tensors have to stay until the exchange.

        Raises:
            WeightUpdateError: The model was loaded without such a tensor, or one came twice.
            Exception: What a loader raises.
        """
        with torch.no_grad():
            for name, tensor in weights:
                if name not in self._waiting:
                    raise WeightUpdateError(f"the model was loaded without {name!r} before, or it came twice")
                self._waiting.remove(name)
                for double, number in self._wanting[name]:
                    double.given[number] = tensor
                    if len(double.given) == len(double.plan.steps):
                        double.make(self._room)

    def check_whole(self) -> None:
        """Raise WeightUpdateError unless all tensors have come."""
        if self._waiting:
            raise WeightUpdateError(f"the update brings no {sorted(self._waiting)[:5]}")

    def exchange(self, dtype: torch.dtype) -> None:
        """Have the model compute with it.

        Args:
            dtype: In which the model computes.

        Raises:
            WeightUpdateError: Not all of it has come; nothing has changed.
        """
        self.check_whole()
        with torch.no_grad():
            for double in self._doubles:
                double.exchange()
            for layer in self._plan.attention:
                layer.process_weights_after_loading(dtype)
        self.forget()


class _Double:
    """A layer's parameters of another version, and what is made of them.

    Attributes:
        plan: How the layer is loaded.
        given: The tensors of its steps that have come.
    """

    def __init__(self, plan: _LayerPlan) -> None:
        self.plan = plan
        self.given: dict[int, torch.Tensor] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._made: dict[str, Any] = {}

    def make(self, room: torch.Tensor) -> None:
        """Make of the tensors that were given what the layer computes with.

        Args:
            room: Memory for parameters as they are loaded.
        """
        if self.plan.method is None:
            return
        self._made.clear()
        layer, left = _double(self.plan.module), room
        before = dict(vars(layer))
        for name, form in self.plan.forms.items():
            data, left = carved(left, form)
            setattr(layer, name, like(form, data))
        for number, step in enumerate(self.plan.steps):
            step.run(getattr(layer, step.parameter), self.given[number])
        self.plan.method.process_weights_after_loading(layer)
        made = {name: _apart(value, room) for name, value in vars(layer).items() if name not in _OWN}
        self._made = {name: value for name, value in made.items() if before.get(name, _ABSENT) is not value}
        if not self.plan.is_kept:
            present = self.plan.module.named_parameters(recurse=False)
            self._parameters = {name: _apart(getattr(layer, name), room) for name, _ in present}
            self.given.clear()

    def exchange(self) -> None:
        """Have the layer compute with it, in the memory that it has."""
        module = self.plan.module
        for number, weight in self.given.items():
            step = self.plan.steps[number]
            step.run(like(self.plan.forms[step.parameter], getattr(module, step.parameter).data), weight)
        self.given.clear()
        for name, parameter in self._parameters.items():
            getattr(module, name).data.copy_(parameter)
        for name, value in self._made.items():
            self._made[name] = vars(module).get(name)
            setattr(module, name, value)


def _double(module: torch.nn.Module) -> torch.nn.Module:
    """A layer with all that another one has, which can be given other parameters."""
    layer = type(module).__new__(type(module))
    vars(layer).update(vars(module))
    for own in _OWN:
        vars(layer)[own] = copy.copy(vars(module)[own])
    vars(layer).pop(_WAS_PROCESSED, None)
    return layer


def _apart(value: Any, room: torch.Tensor) -> Any:
    """A tensor that is not in the room, which the next layer uses; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
        return value
    return value.clone() if value.untyped_storage().data_ptr() == room.untyped_storage().data_ptr() else value
