"""The mixture of experts against a loop over tokens, and both layouts of its weights."""

from typing import Any

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.models.feed_forward import GatedFeedForward, MixtureOfExperts, MoEConfig
from mla_ref.numerics import compare

HIDDEN, INNER, EXPERTS = 6, 5, 8


def config(**changes: Any) -> MoEConfig:
    good = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    return raw(MoEConfig)(**(good | changes))


def state(prefix: str = "", seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A checkpoint's tensors, one by one for each expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    names = ["shared_experts", *(f"experts.{i}" for i in range(EXPERTS))]
    found = {
        "gate.weight": normal(EXPERTS, HIDDEN),
        "gate.e_score_correction_bias": 0.3 * normal(EXPERTS),
    }
    for name in names:
        found[f"{name}.gate_proj.weight"] = normal(INNER, HIDDEN)
        found[f"{name}.up_proj.weight"] = normal(INNER, HIDDEN)
        found[f"{name}.down_proj.weight"] = normal(HIDDEN, INNER)
    return {prefix + name: weight for name, weight in found.items()}


def fused(plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layout of transformers: all experts in one tensor, gate above up."""
    rest = {name: w for name, w in plain.items() if not name.startswith("experts.")}
    each = [f"experts.{i}." for i in range(EXPERTS)]
    rest["experts.gate_up_proj"] = torch.stack(
        [torch.cat([plain[f"{e}gate_proj.weight"], plain[f"{e}up_proj.weight"]]) for e in each]
    )
    rest["experts.down_proj"] = torch.stack([plain[f"{e}down_proj.weight"] for e in each])
    return rest


def gated_by_hand(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate = weights[f"{name}.gate_proj.weight"] @ x
    up = weights[f"{name}.up_proj.weight"] @ x
    return weights[f"{name}.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)


def chosen_by_hand(moe: MoEConfig, scores: list[float], bias: list[float]) -> list[int]:
    """The best experts by score + bias, among the groups whose two best sum highest."""
    size = EXPERTS // moe.n_group
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [range(g * size, (g + 1) * size) for g in range(moe.n_group)]
    best_two = [sum(sorted((biased[i] for i in group), reverse=True)[:2]) for group in groups]
    open_groups = sorted(range(moe.n_group), key=lambda g: -best_two[g])[: moe.topk_group]
    allowed = [i for g in open_groups for i in groups[g]]
    return sorted(allowed, key=lambda i: -biased[i])[: moe.num_experts_per_tok]


def by_hand(moe: MoEConfig, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    out = []
    for token in x:
        scores = 1 / (1 + (-(weights["gate.weight"] @ token)).exp())
        bias = weights["gate.e_score_correction_bias"].tolist()
        chosen = chosen_by_hand(moe, scores.tolist(), bias)
        total = sum(float(scores[i]) for i in chosen) if moe.norm_topk_prob else 1.0
        routed = sum(
            float(scores[i]) / total * gated_by_hand(weights, f"experts.{i}", token) for i in chosen
        )
        shared = gated_by_hand(weights, "shared_experts", token)
        out.append(shared + moe.routed_scaling_factor * routed)
    return torch.stack(out)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("n_group", "topk_group", "chosen"), [(1, 1, 2), (4, 2, 3), (4, 4, 8), (8, 3, 3), (2, 1, 1)]
)
def test_equals_a_loop_over_tokens(
    n_group: int, topk_group: int, chosen: int, normalised: bool
) -> None:
    moe = config(
        n_group=n_group,
        topk_group=topk_group,
        num_experts_per_tok=chosen,
        norm_topk_prob=normalised,
    )
    weights, x = state(), torch.randn(40, HIDDEN, dtype=torch.float64)
    got = MixtureOfExperts.from_state_dict(moe, weights, "")(x)
    found = compare(got, by_hand(moe, weights, x))
    assert found.agrees(rel_l2=1e-13), found


def test_a_gated_network_by_hand() -> None:
    weights, x = state("mlp."), torch.randn(4, HIDDEN, dtype=torch.float64)
    network = GatedFeedForward.from_state_dict(weights, "mlp.experts.3.")
    expected = torch.stack([gated_by_hand(weights, "mlp.experts.3", token) for token in x])
    assert compare(network(x), expected).agrees(rel_l2=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fused_weights_are_the_same_experts(dtype: torch.dtype) -> None:
    plain = state(dtype=dtype)
    x = torch.randn(20, HIDDEN, dtype=torch.float64).to(dtype)
    one, other = (
        MixtureOfExperts.from_state_dict(config(), w, "")(x) for w in (plain, fused(plain))
    )
    assert one.dtype == dtype and torch.equal(one, other)


def test_the_bias_decides_who_is_chosen_and_not_how_much_it_counts() -> None:
    weights, x = state(), torch.randn(20, HIDDEN, dtype=torch.float64)
    moe = config(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    weights["gate.e_score_correction_bias"] = torch.zeros(EXPERTS, dtype=torch.float64)
    weights["gate.e_score_correction_bias"][5] = 100.0
    layer = MixtureOfExperts.from_state_dict(moe, weights, "")
    found, chosen = layer.route(x)
    assert chosen[:, 0].eq(5).all()
    scores = torch.sigmoid(x @ weights["gate.weight"].T)
    assert torch.allclose(found, scores.gather(1, chosen), rtol=1e-14)
    # The same bias for all changes nothing.
    weights["gate.e_score_correction_bias"] = torch.full((EXPERTS,), 0.5, dtype=torch.float64)
    shifted = MixtureOfExperts.from_state_dict(moe, weights, "")
    weights["gate.e_score_correction_bias"] = torch.zeros(EXPERTS, dtype=torch.float64)
    plain = MixtureOfExperts.from_state_dict(moe, weights, "")
    assert torch.equal(shifted(x), plain(x))


def test_a_token_keeps_to_its_groups() -> None:
    moe = config(num_experts_per_tok=4)
    layer = MixtureOfExperts.from_state_dict(moe, state(), "")
    _, chosen = layer.route(torch.randn(50, HIDDEN, dtype=torch.float64))
    groups = [set((row // 2).tolist()) for row in chosen]
    assert all(len(group) == 2 for group in groups)
    assert len({tuple(sorted(group)) for group in groups}) > 2


def test_the_router_computes_in_float32() -> None:
    """Two experts whose scores differ by less than bfloat16 can tell."""
    moe = config(n_group=1, topk_group=1, num_experts_per_tok=1)
    weights = state(dtype=torch.bfloat16)
    weights["gate.e_score_correction_bias"].zero_()
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, 2**-12
    for best in range(EXPERTS):
        weights["gate.weight"].zero_()
        weights["gate.weight"][:, 0] = 1.0
        weights["gate.weight"][best, 1] = 1.0
        _, chosen = MixtureOfExperts.from_state_dict(moe, weights, "").route(x)
        assert chosen.tolist() == [[best]]


def test_no_tokens() -> None:
    layer = MixtureOfExperts.from_state_dict(config(), state(), "")
    assert layer(torch.empty(0, HIDDEN, dtype=torch.float64)).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 0}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1.0}, "topk_group"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], name: str) -> None:
    config()
    with pytest.raises((TypeError, ValueError), match=name):
        config(**changes)


@pytest.mark.parametrize(
    "name", ["gate.weight", "experts.7.up_proj.weight", "shared_experts.down_proj.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:
    weights = state("mlp.")
    del weights[f"mlp.{name}"]
    with pytest.raises(ValueError, match=f"missing mlp.{name}"):
        MixtureOfExperts.from_state_dict(config(), weights, "mlp.")


def test_a_missing_tensor_of_one_network_or_of_fused_experts_is_named() -> None:
    weights = state("mlp.")
    del weights["mlp.shared_experts.up_proj.weight"]
    with pytest.raises(ValueError, match="missing mlp.shared_experts.up_proj.weight"):
        GatedFeedForward.from_state_dict(weights, "mlp.shared_experts.")
    together = fused(state())
    del together["experts.down_proj"]
    with pytest.raises(ValueError, match="missing experts.down_proj"):
        MixtureOfExperts.from_state_dict(config(), together, "")


@pytest.mark.parametrize("count", [EXPERTS - 2, EXPERTS + 1])
@pytest.mark.parametrize(
    "name",
    ["gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj"],
)
def test_another_number_of_experts_is_refused(name: str, count: int) -> None:
    """Fewer fused experts than the router names would be left out of the sum, silently."""
    weights = fused(state())
    weights[name] = weights[name][torch.arange(count) % EXPERTS]
    with pytest.raises(ValueError, match=rf"{name} must .* \[{EXPERTS}\b.*, got .*\[{count}"):
        MixtureOfExperts.from_state_dict(config(), weights, "")


def test_fewer_fused_experts_in_both_tensors_are_refused() -> None:
    weights = fused(state())
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        weights[name] = weights[name][:6]
    with pytest.raises(ValueError, match=r"\[8, .*, got .*\[6, 10, 6\]"):
        MixtureOfExperts.from_state_dict(config(), weights, "")


def test_an_expert_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unexpected experts\.4\.down_proj\.weight"):
        MixtureOfExperts.from_state_dict(
            config(num_experts=4, n_group=1, topk_group=1),
            {k: v[:4] if "gate." in k else v for k, v in state().items()},
            "",
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int8], ids=str)
def test_packed_weights_are_refused_before_they_are_multiplied(dtype: torch.dtype) -> None:
    for name in ("shared_experts.up_proj.weight", "experts.3.down_proj.weight", "gate.weight"):
        weights = state()
        weights[name] = weights[name].to(dtype)
        with pytest.raises(TypeError, match=f"{name} must be a float of 16, 32 or 64 bits"):
            MixtureOfExperts.from_state_dict(config(), weights, "")
        if name.startswith("shared"):
            with pytest.raises(TypeError, match=f"{name} must be a float"):
                GatedFeedForward.from_state_dict(weights, "shared_experts.")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("experts.5.up_proj.weight", (4, 6), r"must have the shape \[5, 6\], got .*\[4, 6\]"),
        ("experts.5.gate_proj.weight", (5,), r"must have the shape \[5, 6\]"),
        ("shared_experts.down_proj.weight", (6, 4), r"must have the shape \[6, 5\]"),
        ("gate.weight", (8, 5), r"must have the shape \[8, 6\]"),
    ],
)
def test_weights_that_do_not_fit_each_other_are_named(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    weights = state() | {name: torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(ValueError, match=f"{name} {message}"):
        MixtureOfExperts.from_state_dict(config(), weights, "")


def test_fused_weights_that_do_not_fit_each_other_are_named() -> None:
    weights = fused(state())
    weights["experts.gate_up_proj"] = weights["experts.gate_up_proj"][:, 1:]
    with pytest.raises(ValueError, match=r"experts.gate_up_proj must have size 10 in dimension 1"):
        MixtureOfExperts.from_state_dict(config(), weights, "")


def test_a_scale_beside_a_weight_is_refused() -> None:
    weights = state() | {"experts.0.up_proj.weight_scale": torch.ones(5)}
    with pytest.raises(ValueError, match="unexpected experts.0.up_proj.weight_scale"):
        MixtureOfExperts.from_state_dict(config(), weights, "")


def test_the_routers_bias_may_be_float32_beside_bfloat16() -> None:
    weights = state(dtype=torch.bfloat16)
    name = "gate.e_score_correction_bias"
    weights[name] = weights[name].float()
    assert MixtureOfExperts.from_state_dict(config(), weights, "").bias.dtype == torch.float32
