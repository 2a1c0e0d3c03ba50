"""The feed-forward parts of DeepSeek and GLM layers: one gated network, or a mixture of experts.

Not what this library is about, so in the plainest form that gives a checkpoint's own logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, silu

from mla_ref.checks import require_count
from mla_ref.numerics import compute_dtype


@dataclass(frozen=True)
class MoEConfig:
    """How tokens find their experts (DeepSeek-V3: arXiv:2412.19437).

    Attributes:
        num_experts: Routed experts, `n_routed_experts`.
        num_experts_per_tok: Experts that a token goes to.
        n_group: Groups the experts fall into.
        topk_group: Groups that a token may choose from.
        routed_scaling_factor: Factor on the routed experts' sum.
        norm_topk_prob: Divide the chosen scores by their sum.
    """

    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        """Raise a ValueError that names what does not fit."""
        for name in ("num_experts", "num_experts_per_tok", "n_group", "topk_group"):
            require_count(name, getattr(self, name), at_least=1)
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group must divide num_experts = {self.num_experts} and be at least topk_group "
                f"= {self.topk_group}, got {self.n_group}"
            )
        if self.num_experts_per_tok > self.num_experts // self.n_group * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok must not pass the {self.topk_group} groups of "
                f"{self.num_experts // self.n_group} that a token may choose from, got "
                f"{self.num_experts_per_tok}"
            )


@dataclass(frozen=True)
class GatedFeedForward:
    """down(silu(gate x) * up x).

    Attributes:
        gate: Weight.
        up: Weight.
        down: Weight.
    """

    gate: Float[Tensor, "inner hidden"]
    up: Float[Tensor, "inner hidden"]
    down: Float[Tensor, "hidden inner"]

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor], prefix: str) -> "GatedFeedForward":
        """The three weights under `prefix`."""
        names = ("gate_proj", "up_proj", "down_proj")
        return cls(*(state_dict[f"{prefix}{name}.weight"] for name in names))

    def __call__(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s hidden"]:
        """Apply to each row."""
        return linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)


@dataclass(frozen=True)
class MixtureOfExperts:
    """A shared expert for every token, and the routed experts that each token chose.

    Attributes:
        config: How tokens choose.
        router: One row an expert.
        bias: Added to the scores for the choice alone (`e_score_correction_bias`).
        experts: The routed experts.
        shared: The shared one.
    """

    config: MoEConfig
    router: Float[Tensor, "experts hidden"]
    bias: Float[Tensor, " experts"]
    experts: tuple[GatedFeedForward, ...]
    shared: GatedFeedForward

    @classmethod
    def from_state_dict(
        cls, config: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str
    ) -> "MixtureOfExperts":
        """Experts one by one, as checkpoints store them, or fused, as transformers holds them."""
        fused = state_dict.get(f"{prefix}experts.gate_up_proj")
        if fused is None:
            names = (f"{prefix}experts.{expert}." for expert in range(config.num_experts))
            experts = tuple(GatedFeedForward.from_state_dict(state_dict, name) for name in names)
        else:
            down = state_dict[f"{prefix}experts.down_proj"]
            experts = tuple(
                GatedFeedForward(gate=gate, up=up, down=out)
                for (gate, up), out in zip(fused.unflatten(1, (2, -1)), down, strict=True)
            )
        return cls(
            config,
            state_dict[f"{prefix}gate.weight"],
            state_dict[f"{prefix}gate.e_score_correction_bias"],
            experts,
            GatedFeedForward.from_state_dict(state_dict, f"{prefix}shared_experts."),
        )

    def route(
        self, x: Float[Tensor, "s hidden"]
    ) -> tuple[Float[Tensor, "s chosen"], Int[Tensor, "s chosen"]]:
        """Weight and number of the experts that each token goes to.

        The bias and the groups decide who is chosen; the weights are the sigmoid scores without
        the bias. A group counts by the sum of its two best.
        """
        config, wide = self.config, compute_dtype(x)
        scores = torch.sigmoid(linear(x.to(wide), self.router.to(wide)))
        choice = (scores + self.bias.to(wide)).unflatten(-1, (config.n_group, -1))
        best_two = choice.topk(min(2, choice.shape[-1]), dim=-1).values.sum(dim=-1)
        groups = best_two.topk(config.topk_group, dim=-1).indices
        closed = torch.ones_like(best_two, dtype=torch.bool).scatter(-1, groups, False)
        choice = choice.masked_fill(closed[..., None], -torch.inf).flatten(-2)
        chosen = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, chosen

    def __call__(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s hidden"]:
        """Apply to each row."""
        weights, chosen = self.route(x)
        out = self.shared(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            routed = expert(x[tokens]) * weights[tokens, place, None]
            out = out.index_add(0, tokens, routed.to(out.dtype))
        return out
