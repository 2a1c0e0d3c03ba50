"""Projection is nn.Linear, whichever way it takes its product."""

import pytest
import torch

from mla_ref.layers import Projection
from mla_ref.layers.projection import FEW_ROWS
from mla_ref.numerics import compare


@pytest.mark.parametrize("rows", [0, 1, 2, 4, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_a_linear_layer(rows: int, dtype: torch.dtype) -> None:
    layer = Projection(24, 10, bias=False, dtype=dtype)
    x = torch.randn(rows, 24, dtype=dtype)
    expected = x.double() @ layer.weight.double().T
    assert compare(layer(x), expected).agrees(rel_l2=1e-6 if dtype == torch.float32 else 1e-14)
    assert layer(x).shape == (rows, 10)


def test_other_shapes_and_a_bias_are_served_too() -> None:
    plain, biased = Projection(6, 4, bias=False), Projection(6, 4)
    x = torch.randn(2, 3, 6)
    assert torch.equal(plain(x), torch.nn.functional.linear(x, plain.weight))
    assert torch.equal(biased(x[0]), torch.nn.functional.linear(x[0], biased.weight, biased.bias))


def test_gradients_flow() -> None:
    layer = Projection(6, 4, bias=False)
    x = torch.randn(3, 6)
    layer(x).square().sum().backward()
    expected = 2 * (x @ layer.weight.T).T @ x
    assert compare(layer.weight.grad, expected.detach()).agrees(rel_l2=1e-6)
