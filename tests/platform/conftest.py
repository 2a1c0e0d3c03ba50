"""A machine that has nothing, to which a test adds what it is about."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mla_ref.platform import Gpu, Probes


@pytest.fixture
def bare() -> Callable[..., Probes]:
    """Probes of a Linux machine without a GPU, its base packages installed, nothing else."""

    def build(
        imports: dict[str, object] | None = None,
        distributions: dict[str, str] | None = None,
        **more,
    ) -> Probes:
        base = {"torch": "2.6.0", "numpy": "1.26.0", "jaxtyping": "0.3.0"}
        modules = {name: SimpleNamespace(__version__=v) for name, v in base.items()}
        modules |= imports or {}

        def import_module(name: str) -> object:
            module = modules.get(name, ModuleNotFoundError(f"No module named {name!r}", name=name))
            if isinstance(module, Exception):
                raise module
            return module

        answers = {
            "python": (3, 11, 0),
            "system": "linux",
            "environ": {},
            "modules": {},
            "import_module": import_module,
            "distributions": lambda: base | (distributions or {}),
            "distribution_files": lambda name: (),
            "package_folder": lambda name: None,
            "tool_version": lambda path: None,
            "driver_cuda": lambda: None,
            "torch_cuda": lambda: None,
            "torch_archs": lambda: (),
            "count_gpus": lambda: 0,
        }
        return Probes(**(answers | more))

    return build


@pytest.fixture
def card() -> Callable[..., Gpu]:
    """A GPU of any compute capability."""

    def build(capability: tuple[int, int], **more) -> Gpu:
        answers = {
            "index": 0,
            "name": "Test Card",
            "total_memory": 96 * 2**30,
            "free_memory": 95 * 2**30,
            "num_sms": 188,
            "l2_bytes": 128 * 2**20,
            "shared_memory_per_block": 101_376,
        }
        return Gpu(capability=capability, **(answers | more))

    return build


@pytest.fixture
def fake_cupy() -> Callable[..., SimpleNamespace]:
    """A cupy as far as it is asked: its version, and its NVRTC's."""

    def build(get_version: Callable[[], object]) -> SimpleNamespace:
        nvrtc = SimpleNamespace(getVersion=get_version)
        return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(nvrtc=nvrtc))

    return build
