"""The CUDA kernels compile for SM90 and SM120 without a GPU, and fit: where NVRTC is installed."""

import ctypes
import os
import re

import pytest

from mla_kernels.audit.cubin import find_tool
from mla_kernels.audit.cuda import KERNELS, audit_cuda
from mla_kernels.audit.record import CUDA_RECORD, differences, read_record
from mla_kernels.cuda_kernels import arguments, attention
from mla_kernels.cuda_kernels.nvrtc import compile_cubin, find_library
from mla_kernels.cuda_kernels.source import FOLDER, SHARED_LIMIT, read_source
from mla_kernels.cuda_kernels.union import UNION
from mla_kernels.kernel_hash import cuda_source_hash

FILES = sorted({kernel.file for kernel in KERNELS})
CAPABILITIES = ((9, 0), (12, 0))


def missing(reason):
    if os.environ.get("MLA_REF_REQUIRE_NVRTC") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def require_nvrtc():
    if find_library() is None:
        missing("no NVRTC is installed (nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc)")


def require_disassembler():
    require_nvrtc()
    try:
        find_tool("cuobjdump")
        find_tool("nvdisasm")
    except FileNotFoundError as error:
        missing(str(error))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", FILES)
def test_B132_every_file_compiles_without_a_gpu(file, capability):
    require_nvrtc()
    cubin = compile_cubin(file, capability)
    assert cubin.startswith(b"\x7fELF")
    for kernel in KERNELS:
        if kernel.file == file:
            assert kernel.name.encode() in cubin


@pytest.fixture(scope="module")
def audited():
    require_disassembler()
    return audit_cuda()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_B086_each_kernel_fits_sm120_or_is_not_offered_there(kernel, audited):
    found = audited["compilations"][kernel.name]["targets"]["sm_120"]
    # No plan chooses the union kernel, and there `plan_union` refuses it by this record.
    assert found["fits"] or kernel is UNION, found["reasons"]
    assert found["shared_bytes"] <= SHARED_LIMIT


def test_the_cuda_audit_comes_out_as_recorded(audited):
    record = read_record(CUDA_RECORD)
    assert differences(audited, record) == [], "run python -m mla_kernels.audit --cuda --write"


def test_no_cuda_source_has_changed_since_the_audit():
    record = read_record(CUDA_RECORD)
    assert record["source_hash"] == cuda_source_hash(), "run python -m mla_kernels.audit --cuda"
    assert set(record["compilations"]) == {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("file", FILES)
def test_a_fault_in_the_source_is_an_error_that_names_file_and_line(file, monkeypatch):
    require_nvrtc()
    broken = read_source(file) + "\nint broken = missing;\n"
    monkeypatch.setattr("mla_kernels.cuda_kernels.nvrtc.read_source", lambda _: broken)
    with pytest.raises(RuntimeError, match=rf"{file}\(\d+\): error: identifier .missing."):
        compile_cubin(file, (9, 0))


def test_a_source_holds_each_header_once_and_no_include():
    for file in FILES:
        source = read_source(file)
        assert "#include" not in source
        assert source.count('#line 1 "ptx.cuh"') == 1


def test_assembly_stands_behind_functions_of_one_header_alone():
    for path in sorted(FOLDER.glob("*.cu*")):
        code = re.sub(r"//.*", "", path.read_text())
        assert bool(re.search(r"\basm\b", code)) == (path.name == "ptx.cuh"), path.name


@pytest.mark.parametrize("word", ["wgmma", "tcgen05", "setmaxnreg", "cluster_dims", "multimem"])
def test_B087_nothing_that_sm120_lacks_is_asked_for(word):
    for file in FILES:
        assert word not in re.sub(r"//.*", "", read_source(file))


def test_B086_no_kernel_asks_for_more_shared_memory_than_sm120_has():
    assert max(kernel.shared_bytes for kernel in KERNELS) <= SHARED_LIMIT == 101_376


@pytest.mark.parametrize(
    "kernel", [*attention.FAST.values(), UNION], ids=lambda kernel: kernel.name
)
def test_a_launch_asks_for_the_shared_memory_that_the_source_states(kernel):
    stated = re.search(r"sizeof\(Shared\) == (\d+)", read_source(kernel.file))[1]
    assert int(stated) == kernel.shared_bytes


def struct_fields(source, name):
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", source, re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    names, kinds = [], []
    for statement in filter(None, map(str.strip, body.split(";"))):
        declared = re.match(r"(const )?(unsigned char|long long|void|int|float)(.*)", statement)
        for one in declared[3].split(","):
            names.append(one.strip(" *"))
            kinds.append("*" if "*" in one else declared[2])
    return names, kinds


@pytest.mark.parametrize(
    ("file", "struct"),
    [
        ("decode.cu", arguments.Call),
        ("merge.cu", arguments.Merge),
        ("cache_write.cu", arguments.Write),
    ],
    ids=["Call", "Merge", "Write"],
)
def test_the_struct_that_python_fills_is_the_struct_that_the_kernel_reads(file, struct):
    kinds = {"*": ctypes.c_void_p, "long long": ctypes.c_longlong, "int": ctypes.c_int}
    kinds["float"] = ctypes.c_float
    names, found = struct_fields(read_source(file), struct.__name__)
    assert [(name, kinds[kind]) for name, kind in zip(names, found, strict=True)] == list(
        struct._fields_
    )
