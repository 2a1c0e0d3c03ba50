"""The project's own promises: what it asks pip for, and what its test set-up does."""

import re
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jaxtyping
import pytest
import torch
from packaging.requirements import Requirement

from mla_ref.numerics import merge

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line) for line in PROJECT["dependencies"] + [r for e in EXTRAS.values() for r in e]
]
# CI has no GPU, so it installs no CuPy.
UNPINNED = {"cupy-cuda12x", "cupy-cuda13x"}


@pytest.fixture
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture
def set_up(request: pytest.FixtureRequest) -> ModuleType:
    """The loaded tests/conftest.py."""
    plugin = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert isinstance(plugin, ModuleType)
    return plugin


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_is_pinned_inside_its_range(requirement, pins) -> None:
    if requirement.name in UNPINNED:
        assert requirement.name not in pins
    else:
        assert requirement.specifier.contains(pins[requirement.name])


def test_no_base_requirement_has_an_upper_bound() -> None:
    """An upper bound on torch would let pip replace a CUDA build that works."""
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert {part.operator for part in requirement.specifier} == {">="}, requirement


def test_B128_no_extra_asks_for_two_cupy_wheels() -> None:
    for name, lines in EXTRAS.items():
        assert sum(line.startswith("cupy-") for line in lines) <= 1, name


def test_make_installs_extras_that_exist() -> None:
    sets = re.findall(r"^EXTRAS_\S+ := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(sets) == 6
    assert {extra for line in sets for extra in line.split(",")} <= set(EXTRAS)


def test_shapes_are_checked_while_tests_run() -> None:
    pytest.importorskip("beartype")
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(jaxtyping.TypeCheckError):
        merge(out, lse, out, lse[:1])


@pytest.mark.usefixtures("plain_calls")
def test_plain_calls_shows_the_error_that_a_user_sees() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"lse_a is .* but lse_b is"):
        merge(out, lse, out, lse[:1])


@pytest.mark.parametrize("marker", ["model", "peers"])
@pytest.mark.parametrize("required", [False, True])
def test_a_missing_package_skips_unless_it_is_required(
    marker: str, required: bool, set_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "find_spec", lambda name: None)
    monkeypatch.delenv("MLA_REF_GGUF", raising=False)
    monkeypatch.setenv(f"MLA_REF_REQUIRE_{marker.upper()}", "1" if required else "")
    item = SimpleNamespace(get_closest_marker=lambda name: name == marker)
    # Both kinds are caught: a skip that came through would make this test a skip too.
    with pytest.raises(
        (pytest.fail.Exception, pytest.skip.Exception), match="not installed: "
    ) as outcome:
        set_up.pytest_runtest_setup(item)
    assert outcome.type is (pytest.fail.Exception if required else pytest.skip.Exception)


@pytest.mark.parametrize("asked", [False, True])
def test_slow_tests_run_only_when_asked_for(
    asked: bool, set_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLA_REF_RUN_SLOW", raising=False)
    config = SimpleNamespace(getoption={"--run-slow": asked}.__getitem__)
    item = SimpleNamespace(get_closest_marker=lambda name: name == "slow", config=config)
    if asked:
        set_up.pytest_runtest_setup(item)
    else:
        with pytest.raises(pytest.skip.Exception, match="--run-slow"):
            set_up.pytest_runtest_setup(item)


def test_seeds_are_fixed() -> None:
    generator = torch.Generator().manual_seed(0)
    assert torch.rand(()) == torch.rand((), generator=generator)
