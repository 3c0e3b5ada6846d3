"""The mathematics of GRPO as pure functions of tensors.

Group-normalised advantages and the clipped loss follow Shao et al., "DeepSeekMath" (arXiv:2402.03300); the
divergence estimate is "k3" of Schulman's note "Approximating KL Divergence" (2020), as used there. That what
sampled and what clipping starts from may be two policies is of Hilton et al., "Batch size-invariance for
policy optimization" (arXiv:2110.00641); that the weight between them is cut off above, of Espeholt et al.,
"IMPALA" (arXiv:1802.01561).
"""

from dataclasses import dataclass

import torch


def group_advantages(rewards: torch.Tensor, samples_per_prompt: int, epsilon: float = 1e-6) -> torch.Tensor:
    """Rewards normalised within each prompt's group.

    Args:
        rewards: float, shape [prompts * samples_per_prompt], a prompt's samples side by side.
        samples_per_prompt: Size of each group, at least 2.
        epsilon: Keeps a group whose rewards are all equal at advantage zero.

    Returns:
        float, the shape of `rewards`; mean 0 in each group, deviation 1 in groups whose rewards differ.

    Raises:
        ValueError: The groups have fewer than two samples or do not fill the batch.
    """
    if samples_per_prompt < 2:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}: a group needs at least 2 to compare")
    if rewards.ndim != 1 or rewards.numel() % samples_per_prompt:
        shape = tuple(rewards.shape)
        raise ValueError(f"rewards of shape {shape} are not whole groups of {samples_per_prompt}")
    groups = rewards.view(-1, samples_per_prompt)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + epsilon)).view(-1)


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The loss and its parts, all scalars; `clipped` is the share of tokens outside the clip range."""

    loss: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor

    def metrics(self) -> dict[str, torch.Tensor]:
        """The parts worth watching, without their gradients."""
        return {"loss": self.loss.detach(), "kl": self.kl, "clipped": self.clipped}


def grpo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float,
    truncate: float,
    kl_weight: float,
) -> GrpoLoss:
    """Clipped policy-gradient loss plus the divergence from a frozen reference.

    Tokens that an older policy sampled count by how likely they are today: by the importance weight of the
    proximal policy over the one that sampled them, which is 1 where these are the same.

    Args:
        logprobs: Of the policy that is trained, shape [batch, length], with gradient.
        proximal_logprobs: Of the policy as it was before this round, same shape.
        behaviour_logprobs: Of the policy that sampled the tokens, recorded then, same shape.
        reference_logprobs: Of the frozen reference, same shape.
        advantages: One per completion, shape [batch].
        mask: 1 where a token belongs to the completion, same shape as `logprobs`.
        clip: The gradient of the ratio to the proximal policy stops outside [1 - clip, 1 + clip].
        truncate: Largest importance weight.
        kl_weight: Weight of the divergence.

    Returns:
        Means over completions of means over their tokens.
    """
    mask = mask.to(logprobs.dtype)

    def between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first - second).masked_fill(mask == 0, 0)  # An infinity times zero is no number.

    ratio = between(logprobs, proximal_logprobs).exp()
    importance = between(proximal_logprobs, behaviour_logprobs).exp().clamp(max=truncate)
    weight = importance * advantages[:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight)
    difference = between(reference_logprobs, logprobs)
    kl = difference.exp() - difference - 1
    clipped = ((ratio.detach() - 1).abs() > clip).to(logprobs.dtype)
    policy_loss = -masked_mean(gain, mask)
    mean_kl = masked_mean(kl, mask)
    return GrpoLoss(
        policy_loss + kl_weight * mean_kl, policy_loss.detach(), mean_kl.detach(), masked_mean(clipped, mask)
    )


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over rows of the mean over each row's masked values; a row without any counts as zero."""
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
