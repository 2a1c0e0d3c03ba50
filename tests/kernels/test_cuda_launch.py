"""How tensors reach a CUDA kernel: by their address, on torch's stream, without toolkit headers."""

import ctypes
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mla_kernels.cuda_kernels import attention, launch
from mla_kernels.cuda_kernels.arguments import Call
from mla_kernels.cuda_kernels.backend import CupyBackend
from mla_ref.backends import AttnSpec
from mla_ref.cache import pack_fp8_rows
from mla_ref.numerics import AttentionResult
from mla_ref.platform import count_gpus

FOLDER = Path(launch.__file__).parent
SCALE = 576**-0.5


def test_B130_a_tensor_crosses_by_its_address_whatever_its_dtype():
    """An exchange by DLPack had no bfloat16 and no FP8."""
    q = torch.full((2, 8, 576), torch.nan, dtype=torch.bfloat16)
    cache = torch.full((1, 64, 656), 0xFF, dtype=torch.uint8)
    parts = AttentionResult(torch.empty(1, 2, 8, 512), torch.empty(1, 2, 8))
    lists = torch.zeros(2, 32, dtype=torch.int32)
    call = attention.make_call(q, cache, lists, None, None, SCALE, parts)
    found = [call.q, call.cache, call.indices, call.out, call.lse]
    assert found == [x.data_ptr() for x in (q, cache, lists, *parts)]
    for path in FOLDER.rglob("*.py"):
        assert not re.search(r"dlpack|asarray|cupy\.array", path.read_text("utf-8"), re.I), path


def test_B131_a_kernel_starts_on_the_stream_that_torch_works_on(monkeypatch):
    """CuPy has a current stream of its own, which knows nothing of torch's."""
    started = []

    class Driver:
        @staticmethod
        def cuLaunchKernelEx(config, function, arguments, extra):
            read = ctypes.cast(config, ctypes.POINTER(launch._Config)).contents
            started.append((read.stream, tuple(read.grid), function))
            return 0

    class Function:
        ptr = 7

    @contextmanager
    def side_stream(device):
        yield 1234

    monkeypatch.setattr(launch, "_driver", Driver)
    monkeypatch.setattr(launch, "_function", lambda kernel, device: Function)
    monkeypatch.setattr(launch, "current_stream", side_stream)
    attention.NARROW.launch(torch.device("cuda", 0), (3, 2), Call())
    assert started == [(1234, (3, 2, 1), 7)]


@pytest.mark.skipif(not count_gpus(), reason="needs a GPU")
def test_B131_on_a_side_stream_the_kernel_waits_for_what_torch_has_written_there():
    device, spec = torch.device("cuda"), AttnSpec(8, topk=64, page_size=64)
    rows = pack_fp8_rows(torch.randn(64, 576, device=device))
    q, lists = torch.randn(4, 8, 576, device=device).bfloat16(), torch.arange(64, device=device)
    lists = lists.int().expand(4, 64).contiguous()
    plan = CupyBackend().plan(spec, max_rows=4, max_requests=4, device=device)
    expected = plan.decode(q, rows.view(1, 64, 656), lists, softmax_scale=SCALE)
    large = torch.randn(4096, 4096, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(100):
            late = torch.full_like(rows, 0xFF)
            large @ large  # keeps the stream busy until the rows are written
            late.copy_(rows)
            found = plan.decode(q, late.view(1, 64, 656), lists, softmax_scale=SCALE)
            assert all(map(torch.equal, found, expected))


def test_B133_the_sources_include_no_header_of_the_toolkit():
    """What CuPy finds of CUDA's headers depends on how it was installed."""
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        for name in re.findall(r"#include\s+(\S+)", path.read_text("utf-8")):
            assert name[0] == '"' and (FOLDER / name.strip('"')).is_file(), (path.name, name)


def test_B060_queries_that_lie_2_31_numbers_apart():
    """Address space alone: what nobody touches of the 4.3 GB takes no memory."""
    apart = torch.empty(2**31 + 8 + 8 * 576, dtype=torch.bfloat16)
    q = apart.as_strided((2, 8, 576), (2**31 + 8, 576, 1))
    near = torch.randn(2, 8, 576).bfloat16()
    q.copy_(near)
    cache = pack_fp8_rows(torch.randn(64, 576)).view(1, 64, 656)
    lists = torch.arange(64, dtype=torch.int32).expand(2, 64).contiguous()
    spec = AttnSpec(8, topk=64, page_size=64)
    plan = CupyBackend().plan(spec, max_rows=2, max_requests=2, device=torch.device("cpu"))
    assert attention.is_fast(q, cache)
    found = plan.extend(q, cache, lists, softmax_scale=SCALE)
    assert all(map(torch.equal, found, plan.extend(near, cache, lists, softmax_scale=SCALE)))
