"""The vLLM generator, in an environment of its own; the driver knows this module only by name."""

import tempfile
from collections.abc import Iterable, Sequence

import torch
from vllm import LLM, SamplingParams

from grpo.config import RunConfig
from grpo.generation import Completion, Generator
from grpo.model import llama_config
from raycrew.tensor_transport import WeightDirectory

CACHE_BYTES = 64 << 20


class VllmGenerator(Generator):
    """Samples with vLLM, whose engine runs in this process; takes weights through its reload call."""

    def __init__(self, config: RunConfig, directory: WeightDirectory) -> None:
        super().__init__(config, directory)
        with tempfile.TemporaryDirectory(prefix="grpo-model-") as folder:
            self.tokenizer.save_pretrained(folder)
            llama_config(config.model, len(self.tokenizer)).save_pretrained(folder)
            self.engine = LLM(
                model=folder,
                dtype="float32",
                load_format="dummy",
                max_model_len=config.model.max_positions,
                kv_cache_memory_bytes=CACHE_BYTES,
                gpu_memory_utilization=0.3,
                enforce_eager=True,
                enable_prefix_caching=False,
                seed=config.seed,
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have the engine load the tensors as if from a checkpoint; it fuses and packs them as it needs."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> list[list[Completion]]:
        """Some completions of each prompt."""
        how = [
            SamplingParams(
                n=samples,
                temperature=temperature,
                max_tokens=max_tokens,
                logprobs=0,
                seed=seed + index * samples,
            )
            for index in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.engine.generate(requests, how, use_tqdm=False)
        return [[_completion(sample) for sample in output.outputs] for output in outputs]


def _completion(sample: object) -> Completion:
    chosen = list(sample.token_ids)
    return Completion(chosen, [at[token].logprob for at, token in zip(sample.logprobs, chosen, strict=True)])
