"""The workers of the suite `vllm`, in the environment of the vLLM generator."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams

from generation.engine import Engine
from generation.options import EngineOptions
from generation.vllm_engine import VllmEngine
from generation.vllm_worker import VllmWorker
from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightUpdate
from raycrew.tensor_transport.transports import SharedMemoryTransport


class Trainer:
    """Publishes a model's weights, or saves them."""

    def __init__(self, config: Mapping[str, Any], directory: WeightDirectory) -> None:
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
        self.config, self.weights = model.config, model.state_dict()
        self.directory, self.store = directory, SharedMemoryTransport()
        self.use_checksums(True)
        size = sum(tensor.nbytes for tensor in self.weights.values())
        self.copied = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def use_checksums(self, checksums: bool) -> None:
        self.publisher = WeightPublisher(self.store, directory=self.directory, checksums=checksums)

    def publish_weights(self) -> WeightUpdate:
        return self.publisher.publish(self.weights)

    def copy(self) -> float:
        """Seconds of a copy of as many bytes, into memory that was written to before."""
        start = time.perf_counter()
        np.copyto(*self.copied)
        return time.perf_counter() - start

    def copy_tensors(self) -> float:
        """The same of the weights, one after another."""
        pairs, start = [], 0
        for tensor in self.weights.values():
            pairs.append(
                (self.copied[0][start : start + tensor.nbytes], tensor.flatten().numpy().view(np.uint8))
            )
            start += tensor.nbytes
        begun = time.perf_counter()
        for place, content in pairs:
            np.copyto(place, content)
        return time.perf_counter() - begun

    def save(self, folder: str) -> None:
        """As a checkpoint that vLLM loads."""
        self.config.save_pretrained(folder)
        save_file(self.weights, Path(folder, "model.safetensors"), {"format": "pt"})

    def size_bytes(self) -> int:
        return int(self.copied[0].nbytes)


class MeasuredEngine(VllmEngine):
    """Can be used without its worker."""

    def generate_alone(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds of vLLM's own call."""
        how = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        self._llm.generate(given, how, use_tqdm=False)
        return time.perf_counter() - start

    def reload(self, folder: str) -> None:
        """Load a checkpoint as vLLM does."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


class MeasuredWorker(VllmWorker):
    """Gets its weights by shared memory."""

    def __init__(self, options: EngineOptions, directory: WeightDirectory, **rest: Any) -> None:
        super().__init__(options, directory, SharedMemoryTransport(), **rest)

    def create_engine(self, seed: int) -> Engine:
        return MeasuredEngine(self.options, seed)

    def generate_alone(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        loop = self._life.awake.loop
        return float(loop.call(loop.engine.generate_alone, prompts, tokens).result())

    def reload(self, folder: str) -> None:
        loop = self._life.awake.loop
        loop.call(loop.engine.reload, folder).result()

    def read(self, folder: str) -> int:
        """Have all of a checkpoint's bytes in this process's memory."""
        weights = load_file(Path(folder, "model.safetensors"))
        return sum(tensor.clone().nbytes for tensor in weights.values())
