"""What of vLLM the integration uses, as plain objects in this process: layers, workers, an engine, requests.

Each worker holds every second row of each tensor. A layer `fused` takes its two halves one after the other.
"""

import contextlib
import importlib
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

NAMES = {"a": ("a",), "fused": ("first", "second"), "vocabulary": ("vocabulary",)}
ROWS, WIDTH = 8, 4


@dataclass
class Info:
    """Of a layer: how much was loaded, while it can be."""

    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list = field(default_factory=list)

    def can_load(self):
        return self.load_numel_total is not None


class Layer(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((rows, WIDTH), -1.0), requires_grad=False)
        self.info = Info()


class UnquantizedLinearMethod:
    """Of layers that load their weights as they are, and compute with what they make of them."""


class UnquantizedEmbeddingMethod:
    """Of those that compute with the weights themselves, too."""


class UnquantizedFusedMoEMethod:
    """Of experts."""


class Norm(torch.nn.Module):
    """Of which the model has none."""


class Vocabulary(Layer):
    """One row of it is padding, which nobody loads."""

    embedding_dim = WIDTH

    def __init__(self, rows):
        super().__init__(rows + 1)
        self.shard_indices = SimpleNamespace(num_org_vocab_padding=1, num_added_vocab_padding=0)


class Connector:
    """Of keys and values."""

    def reset_cache(self):
        return None


class Model(torch.nn.Module):
    def __init__(self, rank, members):
        super().__init__()
        self.rank, self.members = rank, members
        rows = ROWS // members
        self.a, self.fused, self.vocabulary = Layer(rows), Layer(2 * rows), Vocabulary(rows)

    def load_weights(self, weights):
        for name, tensor in weights:
            ((layer, part),) = [
                (layer, parts.index(name)) for layer, parts in NAMES.items() if name in parts
            ] or [(None, 0)]
            if layer is None:
                raise ValueError(f"there is no module or parameter named {name!r}")
            module, mine = getattr(self, layer), tensor[self.rank :: self.members]
            rows = len(mine)
            module.weight[part * rows : (part + 1) * rows] = mine
            module.info.load_numel += mine.numel()
            if module.info.load_numel >= module.info.load_numel_total:
                module.info = Info()

    def held(self):
        """What it computes with, by name of the tensors: this rank's rows."""
        rows = ROWS // self.members
        return {
            name: getattr(self, layer).weight[part * rows : (part + 1) * rows].clone()
            for layer, parts in NAMES.items()
            for part, name in enumerate(parts)
        }


def initialize_layerwise_reload(model):
    for layer in (model.a, model.fused, model.vocabulary):
        if not layer.info.can_load():
            layer.info = Info(0, layer.weight.numel())


def finalize_layerwise_reload(model, model_config):
    for layer in (model.a, model.fused, model.vocabulary):
        layer.info = Info()


class WeightTransferEngine:
    def __init__(self, config, vllm_config, device, model):
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self.model = model

    def __class_getitem__(cls, item):
        return cls

    def parse_init_info(self, told):
        return self.init_info_cls(**told)

    def update_weights(self, told):
        self.receive_weights(self.update_info_cls(**told))


class Factory:
    def __init__(self):
        self.engines = {}

    def register_engine(self, name, module, attribute):
        if name in self.engines:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self.engines[name] = (module, attribute)

    def create(self, name, parallel, model):
        module, attribute = self.engines[name]
        made = getattr(importlib.import_module(module), attribute)
        of_model = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False))
        config = SimpleNamespace(parallel_config=parallel, model_config=of_model)
        return made(None, config, torch.device("cpu"), model)


def install(patch):
    """Have `import vllm...` find these; gone with the patch."""
    factory = Factory()
    contents = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda _: contextlib.nullcontext()},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {
            "get_kv_transfer_group": Connector,
            "has_kv_transfer_group": lambda: False,
        },
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {"KVConnectorBase_V1": Connector},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
            "WeightTransferInitRequest": SimpleNamespace,
            "WeightTransferUpdateRequest": SimpleNamespace,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda _: False},
        "vllm.model_executor.layers.fused_moe": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        "vllm.model_executor.layers.layernorm": {"GemmaRMSNorm": Norm, "RMSNorm": Norm},
        "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": Vocabulary,
        },
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize_layerwise_reload,
            "finalize_layerwise_reload": finalize_layerwise_reload,
        },
        "vllm.platforms": {
            "current_platform": SimpleNamespace(is_cpu=lambda: True, is_zen_cpu=lambda: False)
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: getattr(layer, "info", None) or Info()
        },
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    for room in ("_worker", "_connectors", "_loading", "_layers", "_ahead"):
        patch.delitem(sys.modules, f"raycrew.tensor_transport.integrations.vllm.{room}", raising=False)
    return factory


class Workers:
    """The workers of an engine; `told` is what they were asked, in order."""

    def __init__(self, factory, members, backend="raycrew"):
        self.told = []
        self.models = [Model(rank, members) for rank in range(members)]
        self.engines = [
            factory.create(
                backend,
                SimpleNamespace(rank=rank, world_size=members, data_parallel_index=0, data_parallel_size=1),
                model,
            )
            for rank, model in enumerate(self.models)
        ]

    def ask(self, what, *args):
        self.told.append(what)
        for engine in self.engines:
            getattr(engine, what)(*args)

    def initialise(self, told):
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(told))

    def held(self):
        """The model's tensors, put together."""
        parts = [model.held() for model in self.models]
        whole = {}
        for name in parts[0]:
            whole[name] = torch.zeros(ROWS, WIDTH)
            for rank, part in enumerate(parts):
                whole[name][rank :: len(parts)] = part[name]
        return whole


class Llm:
    """A `vllm.LLM` whose requests take three steps each."""

    def __init__(self, factory, members=1, in_process=True):
        self.workers = Workers(factory, members)
        self.left, self.version, self.is_paused = {}, "default", False
        self.told = self.workers.told
        self.connector_resets = True
        self.llm_engine = self
        self.engine_core = SimpleNamespace() if in_process else SimpleNamespace(call_utility=None)
        self.output_processor = SimpleNamespace(request_states=self.left)

    def init_weight_transfer_engine(self, request):
        self.workers.initialise(request["init_info"])

    def start_weight_update(self):
        assert self.is_paused
        self.workers.ask("start_weight_update")

    def update_weights(self, request):
        self.workers.ask("update_weights", request["update_info"])

    def finish_weight_update(self):
        self.workers.ask("finish_weight_update")

    def sleep(self, level, mode):
        self.told.append(f"pause {level} {mode}")
        self.is_paused = True

    def is_sleeping(self):
        return self.is_paused

    def wake_up(self, tags):
        self.told.append(f"resume {tags}")
        self.is_paused = False

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        assert self.is_paused
        assert reset_running_requests
        self.told.append("reset_prefix_cache")
        if reset_connector:
            self.told.append("reset_connector")
        return not reset_connector or self.connector_resets

    def reset_encoder_cache(self):
        self.told.append("reset_encoder_cache")

    def update_weight_version(self, version):
        self.version = version

    def has_unfinished_requests(self):
        return bool(self.left)

    def abort_request(self, names, internal):
        for name in names:
            del self.left[name]

    def step(self):
        assert not self.is_paused
        self.left.update({name: left - 1 for name, left in self.left.items()})
        done = [name for name, left in self.left.items() if not left]
        for name in done:
            del self.left[name]
        return [SimpleNamespace(request_id=name, finished=True) for name in done]
