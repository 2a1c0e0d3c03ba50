"""What describes one public function to the tests of bad input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]
Arguments = dict[str, Any]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
small = st.integers(0, 5)
some = st.integers(1, 4)


@dataclass(frozen=True)
class Edge:
    """A public function, arguments that it takes, and its right result for any good arguments.

    `right` may raise: then the arguments were not good, and returning at all is the error.
    `computes` is the dtype of the computation where it is not that of the arguments.
    """

    call: Callable[..., Any]
    arguments: Callable[[Draw], Arguments]
    right: Callable[[Arguments], Any]
    computes: torch.dtype | None = None


def floats(draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers; the seed is drawn, so that a failing case can be repeated."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return numbers.to(dtype or draw(st.sampled_from(FLOATS)))
