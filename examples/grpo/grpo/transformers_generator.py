"""The plain generator: transformers' own `generate`, in the trainer's environment."""

from collections.abc import Iterable, Sequence

import torch

from grpo.config import RunConfig
from grpo.generation import Completion, Generator
from grpo.model import build_model, local_device
from raycrew.tensor_transport import WeightDirectory


class TransformersGenerator(Generator):
    """Samples with transformers; takes weights by copying them into its module."""

    def __init__(self, config: RunConfig, directory: WeightDirectory) -> None:
        super().__init__(config, directory)
        self.device = local_device()
        self.model = build_model(config.model, config.seed).to(self.device).eval()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into the module's own."""
        with torch.no_grad():
            own = self.model.state_dict()
            for name, tensor in weights:
                own[name].copy_(tensor)

    @torch.no_grad()
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
        torch.manual_seed(seed)
        inputs = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.device)
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        output = self.model.generate(
            **inputs,
            **how,
            max_new_tokens=max_tokens,
            num_return_sequences=samples,
            return_dict_in_generate=True,
            output_logits=True,
        )
        chosen = output.sequences[:, inputs["input_ids"].shape[1] :].cpu()
        logprobs = torch.stack(output.logits, 1).float().log_softmax(-1).cpu()
        logprobs = logprobs.gather(-1, chosen[..., None]).squeeze(-1)
        flat = [self._completion(*row) for row in zip(chosen.tolist(), logprobs.tolist(), strict=True)]
        return [flat[start : start + samples] for start in range(0, len(flat), samples)]

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        """Cut off what follows the end token."""
        end = self.tokenizer.eos_token_id
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        return Completion(tokens[:length], logprobs[:length])
