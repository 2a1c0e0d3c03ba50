"""NVFP4 and MXFP8 linear layers against float64 products, and what loading must not lose."""

import math
from typing import Any

import pytest
import torch
from tests.support import raw
from torch import Tensor, nn

from mla_ref.layers import OnlineMXFP8Linear, QuantisedLinear, W4A16Linear
from mla_ref.numerics import (
    MXFP8Tensor,
    NVFP4Tensor,
    dequantise_mxfp8,
    dequantise_nvfp4,
    quantise_mxfp8,
    quantise_nvfp4,
)

LAYERS = [W4A16Linear, OnlineMXFP8Linear]
both = pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)


def plain(in_features: int = 128, out_features: int = 24, *, bias: bool = True) -> nn.Linear:
    """A layer with one input column of large weights, as trained layers have them."""
    linear = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        linear.weight[:, 5] *= 20
    return linear


def tokens(dtype: torch.dtype = torch.float32, n: int = 7, in_features: int = 128) -> Tensor:
    """Activations with outliers in one feature; the same in every call."""
    x = torch.randn(n, in_features, generator=torch.Generator().manual_seed(1))
    x[:, 9] *= 50
    return x.to(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of any dtypes are the same, bit for bit."""
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def operands(layer: QuantisedLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the product multiplies, in float64, from the format's own functions."""
    if isinstance(layer, OnlineMXFP8Linear):
        quantised = quantise_mxfp8(x)
        weight = dequantise_mxfp8(MXFP8Tensor(layer.weight, layer.weight_scale), torch.float64)
        return dequantise_mxfp8(quantised, torch.float64), weight
    assert isinstance(layer, W4A16Linear)
    scales = layer.weight_scale.view(torch.uint8)
    stored = NVFP4Tensor(layer.weight, scales, layer.weight_scale_2)
    return x.double(), dequantise_nvfp4(stored, torch.float64)


def modelopt(weight: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of one weight as a ModelOpt checkpoint has them."""
    data, scales, factor = quantise_nvfp4(weight)
    return {
        f"{prefix}weight": data,
        f"{prefix}weight_scale": scales.view(torch.float8_e4m3fn),
        f"{prefix}weight_scale_2": factor,
    }


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_product_of_the_dequantised_operands(kind: Any, dtype: torch.dtype) -> None:
    """To float32 rounding of a sum of 128 products, and half a unit of the output's dtype."""
    layer, x = kind.from_linear(plain()), tokens(dtype)
    got = layer(x)
    assert got.dtype == dtype and got.shape == (7, 24)
    a, w = operands(layer, x)
    expected = a @ w.T + layer.bias.double()
    sizes = a.abs() @ w.abs().T + layer.bias.double().abs()
    bound = 130 * 2.0**-24 * sizes
    if dtype != torch.float32:
        bound += torch.finfo(dtype).eps / 2 * (expected.abs() + bound)
    assert ((got.double() - expected).abs() <= bound).all()


@both
def test_float64_input_is_multiplied_in_float64(kind: Any) -> None:
    layer, x = kind.from_linear(plain(bias=False)), tokens(torch.float64)
    a, w = operands(layer, x)
    got = layer(x)
    assert got.dtype == torch.float64
    assert torch.allclose(got, a @ w.T, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "low", "high"), [(W4A16Linear, 0.05, 0.12), (OnlineMXFP8Linear, 0.02, 0.05)]
)
def test_what_quantisation_costs(kind: Any, low: float, high: float) -> None:
    """Relative to the unquantised product: about 9 % for 4-bit weights, 4 % for 8 and 8 bits."""
    linear, x = nn.Linear(512, 256, bias=False), torch.randn(32, 512)
    exact = x.double() @ linear.weight.detach().double().T
    error = (kind.from_linear(linear)(x).double() - exact).norm() / exact.norm()
    assert low < error < high


def test_a_checkpoint_by_hand() -> None:
    """Two rows of 16: codes, scale bytes and the factor written out."""
    state = {
        "weight": torch.tensor([[0x21] + [0] * 7, [0] * 7 + [0xF0]], dtype=torch.uint8),
        "weight_scale": torch.tensor([[0x38], [0x40]], dtype=torch.uint8),  # 1 and 2
        "weight_scale_2": torch.tensor(0.25),
    }
    layer = W4A16Linear.from_state_dict(state)
    expected = torch.zeros(2, 16)
    expected[0, 0], expected[0, 1] = 0.5 * 0.25, 1.0 * 0.25
    expected[1, 15] = -6.0 * 2 * 0.25
    assert torch.equal(layer.dequantised_weight(), expected)
    assert torch.equal(layer(torch.eye(16)), expected.T)


def test_modelopt_keys_in_and_out() -> None:
    linear = plain()
    prefix = "model.layers.3.mlp.experts.0.gate_proj."
    state = modelopt(linear.weight.detach(), prefix)
    state |= {"model.layers.3.mlp.experts.1.gate_proj.weight": torch.zeros(1)}
    layer = W4A16Linear.from_state_dict(state, prefix)
    made = W4A16Linear.from_weight(linear.weight)
    assert torch.equal(layer(tokens()), made(tokens()))
    again = {prefix + name: tensor for name, tensor in layer.state_dict().items()}
    assert again.keys() == state.keys() - {"model.layers.3.mlp.experts.1.gate_proj.weight"}
    for name, tensor in again.items():
        assert same_bytes(tensor, state[name])
    # A factor of shape [1] is found as well.
    state[f"{prefix}weight_scale_2"] = state[f"{prefix}weight_scale_2"].reshape(1)
    assert torch.equal(W4A16Linear.from_state_dict(state, prefix)(tokens()), made(tokens()))


def test_B052_an_activation_scale_is_not_applied_to_bfloat16_activations() -> None:
    state = modelopt(plain().weight.detach()) | {"bias": torch.randn(24)}
    without = W4A16Linear.from_state_dict(state)
    with_scale = W4A16Linear.from_state_dict(state | {"input_scale": torch.tensor(0.5)})
    x = tokens(torch.bfloat16)
    assert torch.equal(with_scale(x), without(x))
    assert with_scale.state_dict().keys() == without.state_dict().keys()


def test_B062_the_factor_of_the_tensor_reaches_the_result() -> None:
    """Written with one factor or a factor 4 times as large: other bytes, the same product."""
    weight, x = plain().weight.detach(), tokens()
    small = W4A16Linear.from_weight(weight, global_scale=2.0**-9)
    large = W4A16Linear.from_weight(weight, global_scale=2.0**-7)
    assert not same_bytes(small.weight_scale, large.weight_scale)
    assert torch.equal(small(x), large(x))
    # A reader that leaves it out is wrong by that factor.
    small.weight_scale_2.mul_(4)
    assert torch.allclose(small(x), 4 * large(x))


def test_compressed_tensors_stores_one_over_the_factor() -> None:
    state = modelopt(plain().weight.detach())
    layer = W4A16Linear.from_state_dict(state)
    other = {
        "weight_packed": state["weight"],
        "weight_scale": state["weight_scale"],
        "weight_global_scale": state["weight_scale_2"].reciprocal().reshape(1),
        "input_global_scale": torch.tensor([3.0]),
    }
    same = W4A16Linear.from_state_dict(other, layout="compressed-tensors")
    assert torch.allclose(same(tokens()), layer(tokens()), rtol=1e-6, atol=1e-5)
    with pytest.raises(
        ValueError, match="missing weight, weight_scale_2; unexpected weight_global"
    ):
        W4A16Linear.from_state_dict(other)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -0.5, 0.0])
def test_a_global_scale_that_is_none_is_refused_by_its_name(wrong: float) -> None:
    state = modelopt(plain().weight.detach())
    factor = torch.tensor([wrong])
    packed = {
        "up.weight_packed": state["weight"],
        "up.weight_scale": state["weight_scale"],
        "up.weight_global_scale": factor,
    }
    with pytest.raises(ValueError, match=r"^up\.weight_global_scale must be finite and greater"):
        raw(W4A16Linear.from_state_dict)(packed, "up.", layout="compressed-tensors")
    if wrong == 0:  # ModelOpt's factor of a weight of zeros
        layer = W4A16Linear.from_state_dict(state | {"weight_scale_2": factor})
        assert layer.dequantised_weight().eq(0).all()
        return
    with pytest.raises(ValueError, match=r"^weight_scale_2 must be finite and at least 0, got"):
        raw(W4A16Linear.from_state_dict)(state | {"weight_scale_2": factor})


def test_a_checkpoints_tensors_are_shared_but_for_the_bias() -> None:
    state = modelopt(plain().weight.detach()) | {"bias": torch.ones(24)}
    layer = W4A16Linear.from_state_dict(state)
    assert layer.weight.data_ptr() == state["weight"].data_ptr()
    assert layer.weight_scale.data_ptr() == state["weight_scale"].data_ptr()
    assert layer.weight_scale_2.data_ptr() == state["weight_scale_2"].data_ptr()
    assert layer.bias is not None and layer.bias.data_ptr() != state["bias"].data_ptr()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": None}, ValueError, "missing weight;"),
        ({"weight_scale": None}, ValueError, "missing weight_scale;"),
        ({"weight_scale_2": None}, ValueError, "missing weight_scale_2;"),
        ({"weight_zero_point": torch.zeros(1)}, ValueError, "unexpected weight_zero_point"),
        ({"weight": torch.zeros(24, 64)}, TypeError, "weight must be a uint8 tensor"),
        ({"weight_scale": torch.zeros(24, 8)}, TypeError, "float8_e4m3fn or uint8"),
        ({"weight_scale": torch.zeros(24, 7, dtype=torch.uint8)}, ValueError, "scales must have"),
        ({"weight_scale_2": torch.zeros(24)}, ValueError, "weight_scale_2 must be one number"),
        ({"weight_scale_2": torch.ones((), dtype=torch.bfloat16)}, TypeError, "float32"),
        ({"weight": torch.zeros(24, dtype=torch.uint8)}, ValueError, "scales must have"),
        ({"bias": torch.zeros(23)}, ValueError, "bias must have size 24"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_a_checkpoint_that_does_not_fit(change, error, message) -> None:
    state = modelopt(plain().weight.detach()) | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(error, match=message):
        raw(W4A16Linear.from_state_dict)(state)
    with pytest.raises(ValueError, match="layout must be one of modelopt, compressed-tensors"):
        raw(W4A16Linear.from_state_dict)(state, layout="gguf")


def test_the_bytes_of_the_state() -> None:
    """4.5 and 8.25 bits a number; the expert of GLM-5.2 that the module's text speaks of."""
    weight = torch.randn(48, 256)
    assert W4A16Linear.from_weight(weight).nbytes == 48 * 256 * 4.5 / 8 + 4
    assert OnlineMXFP8Linear.from_weight(weight).nbytes == 48 * 256 * 8.25 / 8
    assert W4A16Linear.from_weight(weight, torch.zeros(48)).nbytes == 48 * 256 * 4.5 / 8 + 4 + 192
    numbers = 3 * 2048 * 6144
    assert (round(numbers * 2 / 1e6, 1), round(numbers * 4.5 / 8e6, 1)) == (75.5, 21.2)


def test_groups_lie_along_the_summed_dimension() -> None:
    """A large weight coarsens the 31 beside it in its row, and no other row or group."""
    weight = torch.rand(3, 96) + 1
    before = OnlineMXFP8Linear.from_weight(weight).dequantised_weight()
    weight[1, 40] = 1e5
    after = OnlineMXFP8Linear.from_weight(weight).dequantised_weight()
    changed = (before != after).nonzero()
    assert set(changed[:, 0].tolist()) == {1}
    assert set(changed[:, 1].tolist()) <= set(range(32, 64)) and len(changed) > 16


def test_each_token_is_quantised_by_itself() -> None:
    layer, x = OnlineMXFP8Linear.from_linear(plain()), tokens()
    together = layer.activations(x, torch.float32)
    alone = torch.cat([layer.activations(row[None], torch.float32) for row in x])
    assert torch.equal(together, alone)
    x[3] *= 1000
    changed = layer.activations(x, torch.float32) != together
    assert changed.any(dim=1).tolist() == [row == 3 for row in range(7)]


def test_the_scale_rule_is_of_weight_and_activations() -> None:
    linear = nn.Linear(32, 4, bias=False)
    nn.init.constant_(linear.weight, 511.0)
    x = torch.full((1, 32), 511.0)
    assert OnlineMXFP8Linear.from_linear(linear)(x).eq(32 * 512.0**2).all()
    assert OnlineMXFP8Linear.from_linear(linear, scale_rule="floor")(x).eq(32 * 448.0**2).all()
    with pytest.raises(ValueError, match="rule must be one of ceil, floor"):
        raw(OnlineMXFP8Linear.from_linear)(linear, scale_rule="nearest")


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_does_not_reach_the_others(kind: Any, bad: float) -> None:
    layer, x = kind.from_linear(plain()), tokens()
    before = layer(x)
    x[2, 17] = bad
    after = layer(x)
    assert not after[2].isfinite().any()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(after[others], before[others])


@both
def test_a_bad_weight_reaches_its_own_output_only(kind: Any) -> None:
    linear = plain()
    with torch.no_grad():
        linear.weight[4, 100] = math.inf
    out = kind.from_linear(linear)(tokens())
    assert out[:, 4].isnan().all()
    assert out[:, [i for i in range(24) if i != 4]].isfinite().all()


@both
def test_zeros_everywhere(kind: Any) -> None:
    linear = nn.Linear(64, 8, bias=False)
    assert kind.from_linear(linear)(torch.zeros(3, 64)).eq(0).all()
    nn.init.zeros_(linear.weight)
    assert kind.from_linear(linear)(torch.randn(3, 64)).eq(0).all()


@both
@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 0, 128), (2, 3, 128)])
def test_any_leading_dimensions(kind: Any, shape: tuple[int, ...]) -> None:
    layer, x = kind.from_linear(plain()), torch.randn(shape)
    got = layer(x)
    assert got.shape == (*shape[:-1], 24)
    assert torch.allclose(got.reshape(-1, 24), layer(x.reshape(-1, 128)), rtol=1e-5, atol=1e-5)


@both
def test_strided_weights_and_activations(kind: Any) -> None:
    weight, x = torch.randn(128, 24).T, torch.randn(128, 7).T
    assert torch.equal(
        kind.from_weight(weight).dequantised_weight(),
        kind.from_weight(weight.contiguous()).dequantised_weight(),
    )
    layer = kind.from_weight(weight)
    assert torch.allclose(layer(x), layer(x.contiguous()), rtol=1e-5, atol=1e-5)


@both
def test_a_plain_layer_is_left_alone(kind: Any) -> None:
    linear = plain()
    before = {name: p.detach().clone() for name, p in linear.named_parameters()}
    layer = kind.from_linear(linear)
    with torch.no_grad():
        linear.bias.add_(1)
    assert torch.equal(layer.bias, before["bias"])
    assert torch.equal(linear.weight, before["weight"]) and linear.weight.requires_grad
    assert list(layer.parameters()) == []
    assert not layer(tokens()).requires_grad


@both
@pytest.mark.parametrize("cast", ["bfloat16", "half", "float", "double"])
def test_casting_a_model_keeps_the_bytes(kind: Any, cast: str) -> None:
    """`model.bfloat16()` would round the factor to 8 bits and recode E4M3 scales."""
    model = nn.Sequential(kind.from_linear(plain()), nn.LayerNorm(24))
    before = {name: t.clone() for name, t in model[0].state_dict().items()}
    getattr(model, cast)()
    for name, tensor in model[0].state_dict().items():
        assert same_bytes(tensor, before[name])
    assert model[1].weight.dtype == getattr(torch.zeros(1), cast)().dtype
    assert model[0].to("meta").weight.device.type == "meta"


@both
def test_a_state_dict_goes_round_and_an_unquantised_one_is_refused(kind: Any) -> None:
    linear = plain()
    layer, other = kind.from_linear(linear), kind.from_linear(plain())
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(tokens()), layer(tokens()))
    # torch would cast: a weight of 0.02 becomes the byte 0.
    with pytest.raises(TypeError, match="weight must be a uint8 tensor, got a float32"):
        other.load_state_dict({"weight": linear.weight.detach()}, strict=False)


@both
def test_bad_input_is_named(kind: Any) -> None:
    for wrong in (torch.zeros(4, 40), torch.zeros(4, 8)):
        with pytest.raises(ValueError, match="must have a multiple of"):
            raw(kind.from_weight)(wrong)
    with pytest.raises(ValueError, match=r"weight must have the shape \[out in\]"):
        raw(kind.from_weight)(torch.zeros(64))
    with pytest.raises(TypeError, match="weight must hold floating-point"):
        raw(kind.from_weight)(torch.zeros(4, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bias must have size 4"):
        raw(kind.from_weight)(torch.zeros(4, 64), torch.zeros(5))
    layer = kind.from_linear(plain())
    for x in (torch.zeros(2, 64), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="x must have the layer's 128 numbers"):
            raw(layer.forward)(x)
    for kinds in (torch.zeros(2, 128, dtype=torch.int32), None):
        with pytest.raises(TypeError, match="x must be a floating-point tensor"):
            raw(layer.forward)(kinds)


def test_print_shows_the_sizes() -> None:
    layer = W4A16Linear.from_weight(torch.zeros(4, 64))
    assert repr(layer) == "W4A16Linear(in_features=64, out_features=4, bias=False)"
