"""Bad input at every public edge: an error that names an argument, or the right result.

Each edge says how good arguments are drawn and what the result must be, from the definition and
not from this library. Then one or two arguments are spoiled at random: another type, dtype, shape
or value. What happens next must be one of two things. The call raises a ValueError or a TypeError
whose message holds the name of an argument, and has changed nothing. Or it returns, and then the
result is the right one for those arguments, with no NaN from finite input.
"""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.edges.attention_edges import ATTENTION
from tests.edges.batching_edges import BATCHING
from tests.edges.cache_edges import CACHE
from tests.edges.edge import FLOATS, Arguments, Draw, Edge
from tests.edges.number_edges import NUMBERS
from tests.edges.parallel_edges import PARALLEL
from tests.edges.sparse_edges import SPARSE
from tests.edges.speculative_edges import SPECULATIVE
from tests.edges.sweep import spoilt
from tests.support import bits

from mla_ref import numerics
from mla_ref.numerics import AttentionResult

# As a user calls, without the shape checks that only the tests install.
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("plain_calls")]

DENSE = ATTENTION | NUMBERS | CACHE
SERVING = BATCHING | PARALLEL | SPECULATIVE
EDGES = DENSE | SPARSE | SERVING

NOT_A_TENSOR = st.sampled_from([None, "q", 3, 0.5, [1.0], (), math.nan])
SCALARS = st.sampled_from(
    [None, "1", True, 0, -1, 0.0, -0.5, 2, 7, 1e-50, 1e300, 10**400, math.nan, math.inf, 1.5]
)
DTYPES = st.sampled_from(
    [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64]
)


def spoiled_tensor(draw: Draw, x: Any) -> Any:
    if not isinstance(x, Tensor) or x.is_complex():
        return x  # spoiled enough
    integers = not x.is_floating_point()
    kind = draw(
        st.sampled_from(
            ["type", "dtype", "shorter", "longer", "more dims", "fewer dims", "strides"]
            + (["value"] if integers else ["device"])
        )
    )
    dim = draw(st.integers(0, max(x.ndim - 1, 0)))
    if kind == "type":
        return draw(NOT_A_TENSOR)
    if kind == "dtype":
        return x.to(draw(DTYPES))
    if kind == "device":
        return x.to("meta")
    if kind == "more dims":
        return x.unsqueeze(dim)
    if kind == "strides" and x.ndim:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.ndim == 0 or x.shape[dim] == 0:
        return None
    if kind == "shorter":
        return x.narrow(dim, 0, x.shape[dim] - 1)
    if kind == "longer":
        return torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if kind == "fewer dims":
        return x.select(dim, 0)
    changed = x.clone(memory_format=torch.contiguous_format)
    if x.dtype in (torch.int32, torch.int64) and x.numel():
        value = draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 5, 100, 2**31 - 1]))
        changed.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    return changed


def spoiled(draw: Draw, value: Any) -> Any:
    if isinstance(value, AttentionResult):
        out, lse = value
        if draw(st.booleans()):
            return AttentionResult(spoiled_tensor(draw, out), lse)
        return AttentionResult(out, spoiled_tensor(draw, lse))
    if isinstance(value, Tensor):
        return spoiled_tensor(draw, value)
    if isinstance(value, list):
        return draw(
            st.sampled_from([None, 3, [], [*value, 1], value[:-1], [-1] * len(value), [0.5]])
        )
    return draw(SCALARS)


def tolerance(edge: Edge, arguments: Arguments) -> float:
    """By the narrowest float among the arguments, what they hold, and what is computed in."""
    dtypes = [x.dtype for x in flat(arguments.values()) if x.is_floating_point()]
    dtypes += [edge.computes] if edge.computes else []
    eps = max([torch.finfo(d).eps for d in dtypes], default=2**-52)
    return 8 * eps


def flat(values: Any) -> list[Tensor]:
    """All tensors among the values and inside their tuples."""
    found = []
    for value in values:
        found += flat(value) if isinstance(value, tuple) else []
        found += [value] if isinstance(value, Tensor) else []
    return found


def check(edge: Edge, arguments: Arguments) -> tuple[Tensor, ...]:
    """The promise of this file for one call; what it returned, or nothing if it raised."""
    tensors = [x for x in flat(arguments.values()) if x.device.type != "meta"]
    before = [bits(x).clone() for x in tensors]
    try:
        result = edge.call(**arguments)
    except (ValueError, TypeError) as error:
        names = "|".join(re.escape(name) for name in arguments)
        assert re.search(rf"\b({names})\b", str(error)), f"names no argument: {error}"
        result = None
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(x), old), "an argument has been changed"
    if result is None:
        return ()
    results = result if isinstance(result, tuple) else (result,)
    right = edge.right(arguments)
    rights = right if isinstance(right, tuple) else (right,)
    for actual, expected in zip(results, rights, strict=True):
        if actual.is_complex():  # rows of a cache may be anything
            actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
        comparison = numerics.compare(actual, expected)
        largest = max(1.0, float(torch.where(expected.isfinite(), expected, 0).double().norm()))
        assert comparison.agrees(max_abs=tolerance(edge, arguments) * largest), comparison
    return results


@pytest.mark.parametrize("name", EDGES)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_good_arguments_give_the_right_result(name: str, data: st.DataObject) -> None:
    edge = EDGES[name]
    arguments = edge.arguments(data.draw)
    results = check(edge, arguments)
    assert results, "good arguments were refused"
    assert not any(x.isnan().any() for x in results), "NaN from finite input"


def spoiled_call(edge: Edge, draw: Draw) -> bool:
    """Hold the promise for one call with one or two arguments spoiled; whether it was refused."""
    arguments = edge.arguments(draw)
    for _ in range(draw(st.integers(1, 2))):
        target = draw(st.sampled_from(sorted(arguments)))
        arguments[target] = spoiled(draw, arguments[target])
    # A tensor without memory stands for one on another device: there must be two devices.
    devices = {x.device.type for x in flat(arguments.values()) if x.is_floating_point()}
    assume(devices != {"meta"})
    return not check(edge, arguments)


@pytest.mark.parametrize("name", DENSE)
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bad_arguments_are_named_or_harmless(name: str, data: st.DataObject) -> None:
    spoiled_call(DENSE[name], data.draw)


@pytest.mark.parametrize("name", SERVING)
def test_each_argument_of_the_serving_side_spoilt_in_every_way(name: str) -> None:
    edge, drawn, refused = SERVING[name], [], 0

    @settings(max_examples=3, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def draw_good(data: st.DataObject) -> None:
        drawn.append(edge.arguments(data.draw))

    draw_good()
    good = drawn[-1]  # the first that is drawn is the smallest, where most lists are empty
    for target, value in good.items():
        for spoilt_value in spoilt(value):
            arguments = good | {target: spoilt_value}
            floats = [x for x in flat(arguments.values()) if x.is_floating_point()]
            if {x.device.type for x in floats} != {"meta"}:
                refused += not check(edge, arguments)
    # A spoiler that spoils nothing finds nothing.
    assert refused >= 5 * len(good), f"{refused} refused"


# A spoiler that spoils nothing finds nothing: at least so many of the calls must be refused, over
# the whole stack. One argument is harder to spoil than many, so more is drawn for it.
REFUSED = 5000
DRAWN = {1: 600, 2: 360}


@pytest.mark.parametrize("name", SPARSE)
def test_bad_arguments_of_the_sparse_stack_are_named_or_harmless(name: str) -> None:
    edge, refused, sizes = SPARSE[name], 0, []

    @settings(max_examples=1)
    @given(data=st.data())
    def count_arguments(data: st.DataObject) -> None:
        sizes.append(len(edge.arguments(data.draw)))

    count_arguments()

    @settings(max_examples=DRAWN.get(sizes[0], 250), suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def draw_many(data: st.DataObject) -> None:
        nonlocal refused
        refused += spoiled_call(edge, data.draw)

    draw_many()
    assert refused * len(SPARSE) >= REFUSED, f"{refused} refused"
