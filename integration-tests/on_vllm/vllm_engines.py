"""Small models, and engines of vLLM for them; imported only where vLLM is installed."""

import contextlib
import ctypes
import gc
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MixtralConfig, Qwen2Config
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from raycrew.tensor_transport import WeightPublisher
from raycrew.tensor_transport.integrations.vllm import BACKEND, greedy_references

torch.set_num_threads(1)
ARENA_BYTES = 4 << 20  # so that each is used again and again
SIZES = {
    "vocab_size": 100,  # vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
CONFIGS = {
    "separate embeddings": LlamaConfig(**SIZES, tie_word_embeddings=False, dtype="float32"),
    "tied embeddings, biases": Qwen2Config(**SIZES, tie_word_embeddings=True, dtype="float32"),
    "no output layer": Gemma2Config(
        **SIZES,
        architectures=["Gemma2ForCausalLM"],
        head_dim=32,
        query_pre_attn_scalar=32,
        final_logit_softcapping=None,
        dtype="float32",
    ),
    "experts": MixtralConfig(
        **SIZES,
        architectures=["MixtralForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        dtype="float32",
    ),
}
LONG = [2 + i * 7 % 90 for i in range(70)]  # Longer than two blocks of the prefix cache.
PROMPTS = [[5, 6, 7, 8], LONG]


def model_of(kind, seed):
    """A model whose weights, all of them, are those of a seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def weights_of(model):
    """What a trainer publishes."""
    return dict(model.named_parameters())


def checkpoint_of(model):
    """Its weights as a checkpoint names them, and not transformers."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def references(model, tokens=8):
    return greedy_references(lambda ids: model(ids).logits, PROMPTS, tokens)


@contextlib.contextmanager
def engine_options(kind, **options):
    """Arguments of an engine with weights of no use, whose folder is there while it starts."""
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[kind].save_pretrained(folder)
        yield {
            "model": folder,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "load_format": "dummy",
            "max_model_len": 256,
            "block_size": 32,
            "kv_cache_memory_bytes": 8 << 20,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            **options,
        }


def start(kind, **options):
    with engine_options(kind, **options) as given:
        return LLM(**given)


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def versions_of(sample):
    """Version -> after how many tokens it ended; None before vLLM 0.32, whose outputs first have it."""
    spans = getattr(sample, "weight_versions", None)
    return None if spans is None else {span.version: span.end for span in spans}


class Trainer:
    """Publishes models of seeds, as versions 1, 2, ..."""

    def __init__(self, kind, store, directory=None):
        self.kind, self.publisher = kind, WeightPublisher(store, directory=directory)

    def publish(self, seed, device="cpu", **changes):
        self.model = model_of(self.kind, seed)
        weights = {name: tensor.to(device) for name, tensor in weights_of(self.model).items()}
        return self.publisher.publish(weights | changes)

    def close(self):
        self.publisher.close()


def continued(old, new, prompt, after, tokens):
    """Greedy tokens of one model, from some number of them on of another."""
    ids = list(prompt)
    with torch.no_grad():
        for number in range(tokens):
            model = old if number < after else new
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def assert_200_updates_take_no_memory(update):
    """Each keeps less than a hundredth of a version; `update` does one, and tells the bytes of a version."""
    seen, version_bytes = [], 0
    for number in range(240):
        version_bytes = update()
        if 20 <= number < 40 or number >= 220:  # what is kept for good is there after 20
            seen.append(_held())
    most, least = map(max, zip(*seen[:20], strict=True)), map(min, zip(*seen[20:], strict=True))
    own, shared, files = more = [now - before for before, now in zip(most, least, strict=True)]
    assert own < version_bytes, more
    assert max(shared, files) <= 0, more


def _held():
    """Bytes of its own memory, bytes of shared memory that are mapped, and descriptors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is freed, and still its own, hides what comes to stay
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    shared = sum(_bytes_of(*line.split()[0].split("-")) for line in mapped)
    (own,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
    return int(own.split()[1]) << 10, shared, len(list(Path("/proc/self/fd").iterdir()))


def _bytes_of(start, stop):
    return int(stop, 16) - int(start, 16)
