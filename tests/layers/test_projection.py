"""Projection is nn.Linear, whichever way it takes its product."""

import pytest
import torch

from mla_ref.layers import Projection
from mla_ref.layers.projection import FEW_ROWS
from mla_ref.numerics import compare


@pytest.mark.parametrize("rows", [0, 1, 2, 4, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_a_linear_layer(rows: int, dtype: torch.dtype) -> None:
    layer = Projection(24, 10, dtype=dtype)
    x = torch.randn(rows, 24, dtype=dtype)
    expected = x.double() @ layer.weight.double().T
    assert compare(layer(x), expected).agrees(rel_l2=1e-6 if dtype == torch.float32 else 1e-14)
    assert layer(x).shape == (rows, 10)


def test_batches_of_rows_are_served_too() -> None:
    layer, x = Projection(6, 4), torch.randn(2, 3, 6)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_gradients_flow() -> None:
    layer = Projection(6, 4)
    x = torch.randn(3, 6)
    layer(x).square().sum().backward()
    expected = 2 * (x @ layer.weight.T).T @ x
    assert compare(layer.weight.grad, expected.detach()).agrees(rel_l2=1e-6)
