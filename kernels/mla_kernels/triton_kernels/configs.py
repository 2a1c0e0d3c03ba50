"""Tuning configurations as data, and which one serves a spec.

What was tried and lost stands in kernels/LOG.md. Every configuration here is compiled for SM120
without a GPU by the audit; `launches` says with which arguments.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from mla_kernels.audit import admitted
from mla_kernels.triton_kernels.attention import sparse_attention_kernel
from mla_kernels.triton_kernels.attention_wide import sparse_attention_wide_kernel
from mla_kernels.triton_kernels.merge import BD, merge_kernel
from mla_kernels.triton_kernels.signature import Compilation
from mla_ref.backends import AttnSpec

POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


# Above it `attention_wide` takes over.
MOST_HEADS_OF_ONE_TILE = 16


@dataclass(frozen=True)
class Config:
    """How the attention kernel is cut.

    Attributes:
        tokens: Listed tokens of a tile, BN.
        heads: Heads of a program, BH.
        warps: Warps of a program.
        stages: Depth of the software pipeline.
    """

    tokens: int
    heads: int
    warps: int
    stages: int

    def __str__(self) -> str:
        """As in names of kernels: bn64-bh8-w4-s2."""
        return f"bn{self.tokens}-bh{self.heads}-w{self.warps}-s{self.stages}"

    def shared_bytes(self, cache_format: str) -> int:
        """Shared memory of a program to 2 %; the audit reads the compiler's number.

        Of FP8 rows a tile is held twice, as it was copied (640 bytes a token, without its scales)
        and as float16; and weights once for each of the four groups, or 8 KB through which the
        warps of `attention_wide` exchange. Beside it lie the queries.
        """
        if self.heads > MOST_HEADS_OF_ONE_TILE:
            return self.tokens * 1664 + 8192 + self.heads * 1152
        fp8 = cache_format == "fp8"
        token = 640 + 1024 + 8 * self.heads if fp8 else 1152 + 2 * self.heads
        return self.tokens * token + self.heads * 1152


@dataclass(frozen=True)
class Line:
    """One line of the table: the first that fits the plan and the GPU serves it.

    Attributes:
        cache_format: As in `AttnSpec`.
        wide: Whether products are in float32, which needs twice the memory and no tensor cores.
        most_heads: Query heads up to which it holds.
        most_rows: Rows of a plan up to which it holds.
        config: The configuration.
    """

    cache_format: str
    wide: bool
    most_heads: int
    most_rows: int
    config: Config


ANY = 1 << 30
# Small programs win: on SM120 one of 63 KB stands on a multiprocessor, on an H200 three. A line
# below one of its kind is for GPUs on which that one does not fit, and for `bench kernels --tune`.
TABLE = (
    Line("fp8", False, 8, 8, Config(32, 8, 4, 2)),
    Line("fp8", False, 8, ANY, Config(32, 8, 2, 2)),
    Line("fp8", False, 16, ANY, Config(32, 16, 2, 2)),
    Line("fp8", False, 16, ANY, Config(32, 16, 4, 2)),
    Line("fp8", False, ANY, ANY, Config(32, 32, 4, 2)),
    Line("fp8", False, ANY, ANY, Config(16, 32, 4, 2)),
    Line("bf16", False, 8, ANY, Config(32, 8, 4, 2)),
    Line("bf16", False, ANY, ANY, Config(32, 16, 4, 2)),
    Line("fp8", True, ANY, ANY, Config(16, 16, 4, 1)),
    Line("bf16", True, ANY, ANY, Config(16, 16, 4, 1)),
)


def kernel_of(config: Config) -> Any:
    """The kernel that a configuration is for: heads decide, see `attention_wide`."""
    wide = config.heads > MOST_HEADS_OF_ONE_TILE
    return sparse_attention_wide_kernel if wide else sparse_attention_kernel


def operand_dtypes(
    cache_format: str, q_dtype: torch.dtype, cache_dtype: torch.dtype, *, interpreted: bool = False
) -> tuple[torch.dtype, torch.dtype]:
    """What the products multiply in: the latent part, and the rotary part.

    An FP8 row's latent numbers are exact in float16 and its rotary key is bfloat16. Queries in
    float32 make everything float32. float16 beside bfloat16 has float32 as the only dtype that
    holds both.

    Triton's interpreter multiplies bfloat16 as the integers that its bits are, and cuts where it
    should round to bfloat16: there float32 takes its place. Its float16 is right. (It also reads
    the NaN of E4M3 as 480: what a NaN in a listed row does can be tested on a GPU alone.)
    """
    if torch.float32 in (q_dtype, cache_dtype):
        return torch.float32, torch.float32
    latent = rope = torch.promote_types(q_dtype, cache_dtype)
    if cache_format == "fp8":
        latent, rope = torch.float16, torch.promote_types(q_dtype, torch.bfloat16)
    if interpreted:
        latent, rope = (torch.float32 if x == torch.bfloat16 else x for x in (latent, rope))
    return latent, rope


def choose(spec: AttnSpec, max_rows: int, capability: tuple[int, int] | None = None) -> Config:
    """The configuration that serves a plan on a GPU of this compute capability.

    Raises:
        ValueError: None fits.
    """
    fits = set(map(str, fitting(spec, capability)))
    for line in _lines(spec):
        if max_rows <= line.most_rows and str(line.config) in fits:
            return line.config
    raise ValueError(f"no configuration serves {spec} with {max_rows} rows")


def fitting(spec: AttnSpec, capability: tuple[int, int] | None) -> tuple[Config, ...]:
    """Every configuration for a spec, as in the table; on SM12x those that the audit admits."""
    configs = tuple(dict.fromkeys(line.config for line in _lines(spec)))
    if capability is None:
        return configs
    dtype = torch.float32 if spec.q_dtype == torch.float32 else torch.bfloat16

    def names(config: Config) -> list[str]:
        launches = (
            attention_launch(config, spec.cache_format, dtype, final=f) for f in (True, False)
        )
        return [launch.name for launch in launches]

    return tuple(admitted(configs, capability, names))


def _lines(spec: AttnSpec) -> list[Line]:
    kind = (spec.cache_format, spec.q_dtype == torch.float32)
    return [
        line
        for line in TABLE
        if (line.cache_format, line.wide) == kind and spec.num_heads <= line.most_heads
    ]


def attention_launch(
    config: Config,
    cache_format: str,
    q_dtype: torch.dtype = torch.bfloat16,
    *,
    final: bool = True,
    page_size: int = 1,
) -> Compilation:
    """One specialisation of the attention kernel, as a served call launches it.

    Args:
        config: How it is cut.
        cache_format: As in `AttnSpec`; a cache of numbers has the dtype of the queries.
        q_dtype: Of the queries.
        final: One split, which writes results in q's dtype; else partial results in float32.
        page_size: Tokens of a page; 1 where pages follow one another.
    """
    fp8 = cache_format == "fp8"
    cache_dtype = torch.float8_e4m3fn if fp8 else q_dtype
    latent, rope = operand_dtypes(cache_format, q_dtype, q_dtype)
    out = POINTER[q_dtype if final else torch.float32]
    pointers = {
        "q_ptr": POINTER[q_dtype],
        "latent_ptr": POINTER[cache_dtype],
        "scale_ptr": "*fp32" if fp8 else POINTER[cache_dtype],
        "rope_ptr": "*bf16" if fp8 else POINTER[cache_dtype],
        "indices_ptr": "*i32",
        "counts_ptr": "*i32",
        "out_ptr": out,
        "lse_ptr": "*fp32",
    }
    numbers = {
        "heads": "i32",
        "topk": "i32",
        "split_length": "i32",
        "capacity": "i64",
        "softmax_scale": "fp32",
    }
    strides = dict.fromkeys(STRIDES, "i32")
    return Compilation(
        name=f"attention/{cache_format}/{'final' if final else 'partial'}/{config}",
        fn=kernel_of(config),
        signature=pointers | numbers | strides,
        constexprs={"sink_ptr": None}
        | constants(config, cache_format, latent, rope, page_size=page_size),
        num_warps=config.warps,
        num_stages=config.stages,
        # Strides of 576, 512 and of pages are multiples of 16; the scales and the rotary key begin
        # at bytes 512 and 528, and a row has 656.
        aligned=(*pointers, "topk", "split_length", "capacity", *STRIDES[:4], "indices_row",
                 "out_row", "out_head"),
    )  # fmt: skip


STRIDES = (
    "q_row", "q_head", "page_stride", "slot_stride", "indices_row", "sink_head",
    "out_split", "out_row", "out_head", "lse_split", "lse_row", "lse_head",
)  # fmt: skip


def constants(
    config: Config,
    cache_format: str,
    latent: torch.dtype,
    rope: torch.dtype,
    *,
    page_size: int,
    interpreted: bool = False,
    aligned: bool = True,
) -> dict[str, object]:
    """The `tl.constexpr` arguments of the attention kernel."""
    wide = kernel_of(config) is sparse_attention_wide_kernel
    return {
        **({} if wide else {"FP8": cache_format == "fp8"}),
        "PAGE_SIZE": page_size,
        "DTYPE": TRITON[latent],
        "ROPE_DTYPE": TRITON[rope],
        "CAST_BY_ASM": latent == torch.float16 and cache_format == "fp8" and not interpreted,
        "ALIGNED": aligned,
        "BN": config.tokens,
        "BH": config.heads,
    }


def merge_launch(parts: int = 16) -> Compilation:
    """The merge of a decode step's splits into bfloat16."""
    pointers = {"outs_ptr": "*fp32", "lses_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    numbers = (
        "parts", "heads", "width", "outs_part", "outs_row", "outs_head",
        "lses_part", "lses_row", "lses_head", "sink_head",
        "out_row", "out_head", "lse_row", "lse_head",
    )  # fmt: skip
    return Compilation(
        name=f"merge/{parts}-parts",
        fn=merge_kernel,
        signature=pointers | dict.fromkeys(numbers, "i32"),
        constexprs={"sink_ptr": None, "PARTS": parts, "BD": BD},
        num_warps=1,
        aligned=(*pointers, "width", "outs_part", "outs_row", "outs_head", "out_row", "out_head"),
    )


def launches() -> tuple[Compilation, ...]:
    """Every specialisation that a served call uses, for compiling without a GPU."""
    found = []
    for line in TABLE:
        dtype = torch.float32 if line.wide else torch.bfloat16
        for final in (True, False):
            found.append(attention_launch(line.config, line.cache_format, dtype, final=final))
    unique = {one.name: one for one in found}
    return (*unique.values(), merge_launch())
