"""The SM120 audit: what it reads out of machine code, its verdicts, and whether its data is fresh.

The planted kernels and the audit itself are compiled in processes of their own: in this one
Triton's interpreter may be on.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_kernels.audit import LIMITS, CubinFacts, admitted, judge, occupancy, read_record, stale
from mla_kernels.audit.cubin import facts_of, read_resources
from mla_kernels.audit.record import differences, write_record
from mla_kernels.audit.record import read_record as read_file
from mla_kernels.audit.sass import count_classes, find_forbidden, read_instructions
from mla_kernels.audit.shared_map import OPERANDS, RING, SCRATCH, shared_uses
from mla_kernels.triton_kernels.signature import Compilation

SM90, SM120 = (9, 0), (12, 0)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


# -- Occupancy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, threads, registers, shared, blocks, limited_by",
    [
        # Kernels that were run on an H200, and what the driver held of them.
        (SM90, 128, 253, 92_496, 2, "shared memory"),
        (SM90, 256, 248, 92_752, 1, "registers"),
        (SM90, 384, 168, 101_200, 1, "registers"),
        (SM90, 128, 244, 35_072, 2, "registers"),
        (SM120, 128, 240, 92_496, 1, "shared memory"),
        (SM120, 128, 234, 35_072, 2, "shared memory"),
        # 101,376 bytes and the driver's 1,024 are all that a multiprocessor has.
        (SM120, 128, 32, 101_376, 1, "shared memory"),
        (SM120, 128, 32, 101_377, 0, "shared memory"),
        # 48 warps, 24 blocks.
        (SM120, 1024, 32, 0, 1, "warps"),
        (SM120, 32, 32, 0, 24, "blocks"),
        # 184 registers of 9 warps are 52,992 of 65,536, but a sub-partition holds only 2 warps.
        (SM120, 8 * 32, 184, 0, 1, "registers"),
        (SM120, 9 * 32, 184, 0, 0, "registers"),
        # 33 registers are handed out as 40.
        (SM120, 256, 40, 0, 6, "registers"),
        (SM120, 256, 33, 0, 6, "registers"),
    ],
)
def test_occupancy_by_hand(capability, threads, registers, shared, blocks, limited_by):
    held = occupancy(LIMITS[capability], threads=threads, registers=registers, shared=shared)
    assert (held.blocks, held.limited_by) == (blocks, limited_by)


def test_a_kernel_without_threads_is_refused():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        occupancy(LIMITS[SM120], threads=0, registers=1, shared=0)


# -- Machine code --------------------------------------------------------------------------------

SASS = """
	.section	.text.k,"ax",@progbits
k:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   S2UR UR5, SR_CgaCtaId ;
        /*0020*/                   STL [R1], R2 ;
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R5+UR5], desc[UR8][R2.64] ;
.L_x_1:
        /*0040*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0050*/              @!P0 LDSM.16.MT88.4 R4, [R8] ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   BRA.U !UP0, `(.L_x_1) ;
.L_x_2:
        /*0080*/                   F2FP.F16.E4M3.UNPACK_B R7, R8 ;
        /*0090*/              @!P1 BRA `(.L_x_0) ;
        /*00a0*/                   STG.E desc[UR8][R2.64], R4 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
"""


def test_loops_are_what_a_branch_back_closes():
    depth = {i.name: i.depth for i in read_instructions(SASS)[:-2]}
    assert depth["STL"] == 0
    assert depth["LDGSTS"] == depth["F2FP"] == 1
    assert depth["HMMA"] == depth["LDSM"] == 2
    assert depth["STG"] == depth["EXIT"] == 0
    # The branch to itself behind the end is padding, no loop.
    assert [i.depth for i in read_instructions(SASS)[-2:]] == [0, 0]


def test_classes_are_counted_by_opcode():
    instructions = read_instructions(SASS)
    assert count_classes(instructions) == {
        "tensor core 16 bit": 1,
        "load matrix": 1,
        "global to shared": 1,
        "global store": 1,
        "conversion": 1,
        "local store": 1,
    }
    assert "local store" not in count_classes(instructions, in_loops=True)


def test_code_that_sm120_has_is_not_forbidden():
    fine = [
        "UBLKCP.S.G [UR8], [UR4], UR6 ;",
        "QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4 ;",
        "CGAERRBAR ;",
        "MOVM.16.MT88 R1, R2 ;",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ ;",
    ]
    text = SASS + "\n".join(f"        /*0100*/                   {line}" for line in fine)
    assert find_forbidden(text) == {}


@pytest.mark.parametrize(
    "feature, line",
    [
        ("wgmma", "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;"),
        ("wgmma", "WARPGROUP.ARRIVE ;"),
        ("tcgen05", "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0 ;"),
        ("tcgen05", "LDTM.x32 R4, tmem[UR4] ;"),
        ("setmaxnreg", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa8 ;"),
        ("clusters", "UCGABAR_ARV ;"),
        ("clusters", "@P0 UTMALDG.2D.MULTICAST [UR8], [UR4] ;"),
        ("clusters", "MAPA R3, R4, UR5 ;"),
    ],
)
def test_a_planted_instruction_that_sm120_lacks_is_found(feature, line):
    found = find_forbidden(SASS + f"        /*0100*/                   {line}")
    opcode = line.removeprefix("@P0 ").split()[0]
    assert found == {feature: (opcode,)}


CUOBJDUMP = """
Resource usage:
 Common:
  GLOBAL:0
 Function k:
  REG:80 STACK:16 SHARED:3072 LOCAL:0 CONSTANT[0]:960 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
ATTRIBUTES = """
//--------------------- .nv.info.k               --------------------------
	//----- nvinfo : EIATTR_REGCOUNT
//--------------------- .text.k                   --------------------------
"""


def test_the_two_tools_together_give_the_facts_of_a_function():
    facts = facts_of(CUOBJDUMP, ATTRIBUTES + SASS)["k"]
    # The driver's 1 KiB is not the kernel's.
    assert (facts.registers, facts.stack_bytes, facts.static_shared_bytes) == (80, 16, 2048)
    assert (facts.spills, facts.spills_in_loops) == (1, 0)
    assert (facts.instructions, facts.instructions_in_loops) == (14, 7)
    assert facts.forbidden == {}


def test_a_kernel_that_must_be_launched_as_a_cluster_is_found_by_its_attribute():
    attribute = "\t//----- nvinfo : EIATTR_CTA_PER_CLUSTER\n"
    planted = ATTRIBUTES.replace("\t//----- nvinfo : EIATTR_REGCOUNT\n", attribute)
    facts = facts_of(CUOBJDUMP, planted + SASS)["k"]
    assert facts.forbidden == {"clusters": ("EIATTR_CTA_PER_CLUSTER",)}


@pytest.mark.parametrize(
    "resources, code, message",
    [
        ("Resource usage:", "", "cuobjdump found no function"),
        (" Function k:\n  REG:8 STACK:0\n", "", "no SHARED for the function 'k'"),
        (CUOBJDUMP, "", "no code for the function 'k'"),
    ],
)
def test_what_the_tools_do_not_say_is_an_error_and_no_zero(resources, code, message):
    with pytest.raises(ValueError, match=message):
        facts_of(resources, code)


def test_each_function_of_a_cubin_has_its_own_numbers():
    two = CUOBJDUMP + " Function other:\n  REG:24 STACK:0 SHARED:0 LOCAL:0\n"
    assert {name: it["REG"] for name, it in read_resources(two).items()} == {"k": 80, "other": 24}


# -- Verdicts ------------------------------------------------------------------------------------


def facts(**changed):
    fine = {
        "registers": 128,
        "stack_bytes": 0,
        "static_shared_bytes": 0,
        "spills": 0,
        "spills_in_loops": 0,
        "instructions": 100,
        "instructions_in_loops": 50,
        "classes": {},
        "classes_in_loops": {},
        "forbidden": {},
    }
    return CubinFacts(**(fine | changed))


def reasons(shared=1000, threads=128, capability=SM120, **changed):
    return judge(facts(**changed), capability, threads=threads, dynamic_shared_bytes=shared).reasons


def test_a_kernel_without_fault_fits():
    assert reasons() == ()
    assert reasons(shared=101_376) == ()
    # Outside all loops a spill costs a few loads of a thread's life.
    assert reasons(spills=4, stack_bytes=16) == ()


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"shared": 101_377}, "shared memory: 101,377 B a block, at most 101,376"),
        (
            {"shared": 100_000, "static_shared_bytes": 1377},
            "shared memory: 101,377 B a block, at most 101,376",
        ),
        (
            {"spills": 9, "spills_in_loops": 2},
            "spills: 2 in loops",
        ),
        ({"forbidden": {"wgmma": ("HGMMA", "WARPGROUP.ARRIVE")}}, "wgmma: HGMMA, WARPGROUP.ARRIVE"),
        (
            {"threads": 512, "registers": 255},
            "registers: not one block stands on a multiprocessor",
        ),
        ({"threads": 1056, "registers": 16}, "threads: 1,056 a block, at most 1,024"),
    ],
)
def test_each_fault_is_a_reason(changed, reason):
    assert reasons(**changed) == (reason,)


def test_a_gpu_without_limits_here_is_refused():
    with pytest.raises(ValueError, match="capability must be one of sm_90, sm_120, got sm_80"):
        reasons(capability=(8, 0))


# -- Shared memory by use ------------------------------------------------------------------------


def test_each_byte_of_shared_memory_counts_for_one_use():
    text = """
    module attributes {"ttg.num-warps" = 4 : i32, ttg.shared = 5000 : i32} {
    %t = ttg.local_alloc {allocation.offset = 0 : i32} : () -> !ttg.memdesc<2x16x64xf8E4M3FN, #s>
    %k_1 = ttg.local_alloc %k {allocation.offset = 1024 : i32} : (t) -> !ttg.memdesc<32x32xbf16, #s>
    %c = ttg.convert_layout %t {allocation.offset = 3072 : i32} : tensor<1x2xi8> -> tensor<1x2xi8>
    """
    # The ring has bytes 0 to 2047, the operand 1024 to 3071; they share 1024.
    assert shared_uses(text) == {RING: 2048, OPERANDS: 1024, SCRATCH: 1928}


# -- Compiled kernels with a planted fault -------------------------------------------------------


def compiled(*arguments, cache):
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    script = Path(__file__).with_name("planted_kernels.py")
    return json.loads(compiled(script, cache=tmp_path_factory.mktemp("triton")))


@needs_triton
@pytest.mark.thorough
class TestPlantedKernels:
    def test_a_small_product_fits(self, planted):
        found = planted["audit"]["small"]
        assert found["fits"] and found["reasons"] == []
        assert found["classes_in_loops"]["tensor core 16 bit"] > 0
        assert 0 < found["registers"] <= 255 and found["blocks_per_sm"] > 0
        assert sum(found["shared_uses"].values()) == found["shared_bytes"]

    def test_too_much_shared_memory_is_caught_where_it_is_too_much(self, planted):
        (reason,) = planted["audit"]["large"]["reasons"]
        assert reason == "shared memory: 196,608 B a block, at most 101,376"
        assert planted["audit"]["large on sm_90"]["fits"]

    def test_spills_in_a_loop_are_caught(self, planted):
        found = planted["audit"]["spilling"]
        assert not found["fits"]
        assert found["reasons"] == [f"spills: {found['spills_in_loops']} in loops"]
        assert 0 < found["spills_in_loops"] < found["spills"]
        assert found["stack_bytes"] > 0

    def test_wgmma_is_caught(self, planted):
        (reason,) = planted["audit"]["wgmma"]["reasons"]
        assert reason.startswith("wgmma: HGMMA.64x64x16.F32")

    def test_the_source_is_named_by_file_function_and_hash(self, planted):
        source = planted["source"]
        assert (source["file"], source["function"]) == ("planted_kernels.py", "multiply")
        assert len(source["source_hash"]) == 16
        assert source["specialisation"]["constexprs"] == {"ROWS": 64, "COLS": 64, "K": 32}


# -- The data ------------------------------------------------------------------------------------


def test_no_kernel_has_changed_since_the_audit():
    assert stale(read_record()) == [], "run python -m mla_kernels.audit --write"


@needs_triton
def test_the_audit_covers_all_that_is_launched_and_nothing_else():
    from mla_kernels.audit.listing import list_compilations
    from mla_kernels.audit.run import source_of

    record = read_record()
    now = {c.name: source_of(c) for c in list_compilations()}
    only_sources = {"tools": None, "compilations": now}
    assert differences(only_sources, record) == [], "run python -m mla_kernels.audit --write"


@needs_triton
@pytest.mark.slow
def test_the_whole_audit_comes_out_as_recorded(tmp_path):
    out = compiled("-m", "mla_kernels.audit", "--check", cache=tmp_path)
    assert "is up to date" in out


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """`audit` over two kernels in a file, with the compiler replaced by a list of its calls."""
    from mla_kernels.audit import run

    calls = []
    monkeypatch.setattr(run, "audit_one", lambda c, target: calls.append(c.name) or {"fits": True})
    monkeypatch.setattr(run, "tools", lambda: {"triton": "0"})
    source = tmp_path / "file.py"
    source.write_text("def a(x):\n    return x\ndef b(x):\n    return -x\n")

    def one(name):
        namespace = {}
        exec(compile(source.read_text(), source, "exec"), namespace)
        return Compilation(name, SimpleNamespace(fn=namespace[name]), {"x": "i32"})

    return source, calls, lambda known: run.audit([one("a"), one("b")], known=known, root=tmp_path)


def test_an_audit_compiles_again_only_what_changed(counted):
    source, calls, audit = counted
    first = audit(None)
    assert calls == ["a", "a", "b", "b"]
    calls.clear()
    assert audit(first) == first and calls == []
    source.write_text(source.read_text().replace("-x", "+x"))
    os.utime(source, ns=(0, 0))
    second = audit(first)
    assert calls == ["b", "b"]
    assert [line.split(" is ")[0] for line in differences(second, first)] == ["b: source_hash"]
    calls.clear()
    audit(second | {"tools": {"triton": "1"}})
    assert calls == ["a", "a", "b", "b"]


def record_of(**fits):
    return {
        "tools": {"triton": "3.7.1"},
        "compilations": {
            name: {"source_hash": "a", "targets": {"sm_120": {"fits": it}, "sm_90": {"fits": True}}}
            for name, it in fits.items()
        },
    }


def test_what_does_not_fit_is_not_offered_on_sm12x():
    record = record_of(a=True, b=False, c=True)
    for capability in ((12, 0), (12, 1)):
        assert admitted("cba", capability, tuple, record) == ["c", "a"]
    assert admitted("cba", (9, 0), tuple, record) == ["c", "b", "a"]


def test_a_configuration_fits_if_all_its_compilations_do():
    record = record_of(a=True, b=False)
    assert admitted(["aa", "ab"], (12, 0), tuple, record) == ["aa"]


def test_what_was_never_audited_is_not_guessed():
    with pytest.raises(ValueError, match=r"configs: 'z' was never audited"):
        admitted("z", (12, 0), tuple, record_of(a=True))


def test_a_record_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "record.json"
    write_record(record_of(a=True), path)
    assert read_file(path) == record_of(a=True)
    with pytest.raises(FileNotFoundError, match="--write makes it"):
        read_file(tmp_path / "none.json")


def test_differences_name_entry_and_field():
    then, now = record_of(a=True, b=True), record_of(a=True, c=True)
    now["compilations"]["a"]["source_hash"] = "changed"
    assert differences(now, then) == [
        "c: not in the record",
        "b: in the record, but no kernel's",
        "a: source_hash is changed, the record has a",
    ]


def test_numbers_of_other_tools_are_not_compared():
    then, now = record_of(a=True), record_of(a=False)
    assert len(differences(now, then)) == 1
    now["tools"] = {"triton": "3.9.0"}
    assert differences(now, then) == []
