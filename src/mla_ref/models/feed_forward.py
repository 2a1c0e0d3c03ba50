"""The feed-forward parts of DeepSeek and GLM layers: one gated network, or a mixture of experts.

Not what this library is about, so in the plainest form that gives a checkpoint's own logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, silu

from mla_ref.checks import describe, require_count
from mla_ref.models.state_dict import module_tensors
from mla_ref.numerics import compute_dtype

_NAMES = ("gate_proj", "up_proj", "down_proj")


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
        """The three weights under `prefix`.

        Raises:
            ValueError: One is missing, or they do not fit each other; or there is another tensor.
            TypeError: One is not of 16, 32 or 64 bits.
        """
        return cls._of(module_tensors(state_dict, _gated(""), prefix=prefix), "")

    @classmethod
    def _of(cls, found: Mapping[str, Tensor], name: str) -> "GatedFeedForward":
        return cls(*(found[f"{name}{part}.weight"] for part in _NAMES))

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
        """Experts one by one, as checkpoints store them, or fused, as transformers holds them.

        Raises:
            ValueError: A tensor is missing, unexpected or of another shape, or there are more or
                fewer experts than `config` says.
            TypeError: A tensor is not of 16, 32 or 64 bits.
        """
        fused = f"{prefix}experts.gate_up_proj" in state_dict
        names = [f"experts.{expert}." for expert in range(0 if fused else config.num_experts)]
        wanted = _gated("shared_experts.", inner="shared_inner")
        for name in names:
            wanted |= _gated(name)
        if fused:  # an expert that is not there would be left out of the sum, unseen
            wanted["experts.gate_up_proj"] = (config.num_experts, "two_inner", "hidden")
            wanted["experts.down_proj"] = (config.num_experts, "hidden", "inner")
        found = module_tensors(state_dict, wanted, prefix=prefix, skip=("gate.",))
        experts = tuple(GatedFeedForward._of(found, name) for name in names)
        if fused:
            experts = _unfused(found["experts.gate_up_proj"], found["experts.down_proj"], prefix)
        shared = GatedFeedForward._of(found, "shared_experts.")
        # Checkpoints in bfloat16 have the bias in float32.
        router = module_tensors(
            state_dict,
            {
                "weight": (config.num_experts, shared.gate.shape[1]),
                "e_score_correction_bias": (config.num_experts,),
            },
            prefix=f"{prefix}gate.",
            one_dtype=False,
        )
        return cls(config, router["weight"], router["e_score_correction_bias"], experts, shared)

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


def _gated(name: str, inner: str = "inner") -> dict[str, tuple[int | str, ...]]:
    """Names and shapes of a gated network's weights."""
    shapes = ((inner, "hidden"), (inner, "hidden"), ("hidden", inner))
    return {f"{name}{part}.weight": shape for part, shape in zip(_NAMES, shapes, strict=True)}


def _unfused(
    gate_up: Float[Tensor, "experts two_inner hidden"],
    down: Float[Tensor, "experts hidden inner"],
    prefix: str,
) -> tuple[GatedFeedForward, ...]:
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise ValueError(
            f"{prefix}experts.gate_up_proj must have size {2 * down.shape[2]} in dimension 1 "
            f"(twice the inner size of {prefix}experts.down_proj), got {describe(gate_up)}"
        )
    return tuple(
        GatedFeedForward(gate=gate, up=up, down=out)
        for (gate, up), out in zip(gate_up.unflatten(1, (2, -1)), down, strict=True)
    )
