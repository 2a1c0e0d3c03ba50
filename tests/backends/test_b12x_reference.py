"""The pure-torch reference of the package b12x as an independent peer of its profile.

It is one file without imports of its own package, so it is loaded by path: the package itself needs
a CUDA toolchain. Where it is looked for: the environment variable MLA_REF_B12X, the folder of an
unpacked wheel, then an installed distribution, whose file list is read and which is not imported.

    pip download --no-deps b12x==1.5.1 && unzip -d b12x-wheel b12x-1.5.1-*.whl
    MLA_REF_B12X=b12x-wheel pytest tests/backends/test_b12x_reference.py
"""

import importlib.util
import math
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.backends.served_batches import BATCHES, ROUTES, SCALE, Batch, batch
from tests.support import bits
from torch import Tensor

from mla_ref.backends.served import PROFILES, Arithmetic, ServedBackend, served_backend
from mla_ref.cache import pack_fp8_rows, unpack_fp8_rows
from mla_ref.numerics import AttentionResult, compare, to_natural_lse

FILE = Path("b12x/attention/_shared/mla/reference.py")


def find_file() -> Path | None:
    if folder := os.environ.get("MLA_REF_B12X"):
        found = Path(folder) / FILE
        if not found.is_file():
            raise FileNotFoundError(f"MLA_REF_B12X is {folder!r}, which has no {FILE}")
        return found
    try:
        listed = [f for f in files("b12x") or () if Path(str(f)) == FILE]
    except PackageNotFoundError:
        return None
    return Path(str(listed[0].locate())) if listed else None


@pytest.fixture(scope="module")
def b12x() -> ModuleType:
    found = find_file()
    if found is None:
        pytest.skip("no b12x: set MLA_REF_B12X to an unpacked wheel of b12x 1.5.1")
    spec = importlib.util.spec_from_file_location("b12x_mla_reference", found)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attend(b12x: ModuleType, given: Batch, counts: Tensor | None = None) -> AttentionResult:
    """Its sparse attention, in our conventions.

    Slots that no token occupies hold NaN in our batches. It masks scores and not values, so that
    0 * NaN would reach its output from the slot that it reads for a -1; it gets zeros there.
    """
    rows = given.kv_cache.flatten(0, 1).clone()
    rows[rows[:, 512:528].eq(255).all(dim=1)] = 0
    out, lse = b12x.sparse_mla_reference(
        q_all=given.q,
        kv_cache=rows[:, None],
        page_table_1=given.indices,
        active_token_counts=counts,
        sm_scale=SCALE,
        v_head_dim=512,
        return_lse=True,
    )
    return AttentionResult(out, to_natural_lse(lse, base="2"))


@pytest.mark.parametrize("case", ["normal", "wide", "zeros"])
def test_it_writes_the_same_bytes(b12x: ModuleType, case: str) -> None:
    rows = torch.randn(40, 576).to(torch.bfloat16)
    if case == "wide":
        rows = rows * torch.logspace(-30, 30, 40)[:, None].to(torch.bfloat16)
    if case == "zeros":
        rows[::2, :128] = 0
        rows[1, :512] = 0
    theirs = b12x.pack_mla_kv_cache_reference(rows[:, :512], rows[:, 512:])[:, 0]
    ours = pack_fp8_rows(rows, scale_rule=PROFILES["b12x"].scale_rule)
    assert torch.equal(ours, theirs)
    numbers = b12x.unpack_mla_kv_cache_reference(theirs)[:, 0]
    assert torch.equal(bits(unpack_fp8_rows(ours)), bits(numbers))


@pytest.mark.parametrize("shape", BATCHES)
def test_without_rounding_both_are_the_same(b12x: ModuleType, shape: str) -> None:
    """Its reference multiplies in float32 and rounds the output alone."""
    given = batch(shape, "fp8", data="randn")
    theirs = attend(b12x, given)
    exact = ServedBackend(replace(PROFILES["b12x"], arithmetic=Arithmetic()))
    for route in ROUTES:
        ours = given.run(exact, route)
        # One bfloat16 rounding of the same number, now and then to the other side.
        assert compare(ours.out, theirs.out).agrees(rel_l2=1e-4)
        assert compare(ours.lse, theirs.lse).agrees(max_abs=2e-6)


@pytest.mark.parametrize("data", ["rand", "randn"])
@pytest.mark.parametrize("route", ROUTES)
def test_the_profile_is_within_its_own_bar(b12x: ModuleType, data: str, route: str) -> None:
    given = batch("spec_decode_small", "fp8", data=data, scale_rule="fp32-one")
    theirs = attend(b12x, given)
    ours = given.run(served_backend("b12x"), route)
    tolerance = PROFILES["b12x"].tolerance
    if data == "randn":  # its absolute bar is for its own data, outputs near 0.1; the cosine holds
        tolerance = replace(tolerance, out_abs=0.25, lse_abs=0.1)
    assert tolerance.violations(ours, theirs) == ()


def test_counts_and_empty_rows(b12x: ModuleType) -> None:
    given = batch("mixed_small", "fp8", data="randn")
    counts = torch.arange(12, dtype=torch.int32) * 6
    theirs = attend(b12x, given, counts)
    plan = given.plan(served_backend("b12x"))
    ours = plan.decode(given.q, given.kv_cache, given.indices, counts, softmax_scale=SCALE)
    assert theirs.lse[0].eq(-math.inf).all() and ours.lse[0].eq(-math.inf).all()
    assert compare(ours.out, theirs.out).agrees(rel_l2=0.04)
    assert compare(ours.lse, theirs.lse).agrees(max_abs=0.1)
