"""Exercises of lesson 03: what a token costs in the cache, and how fast a decode step can be."""

import math
from collections.abc import Callable
from typing import Any

from mla_ref.cache import bytes_per_token
from mla_ref.checks import describe
from mla_ref.layers import preset
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_parts


def _bytes_case(
    name: str, args: tuple[int, int, int, str, int], expected: Callable[[], int], why: str
) -> Case:
    def check(mla_token_bytes: Function) -> None:
        found = mla_token_bytes(*args)
        if isinstance(found, bool) or not isinstance(found, int):
            raise Complaint(f"the result is {describe(found)}, expected a whole number, an int")
        if found != expected():
            layers, latent, rope, number_format, index_layers = args
            raise Complaint(
                f"for {layers} layers of {latent} + {rope} numbers in {number_format}, "
                f"{index_layers} of them with an indexer, the result is {found:,}, expected "
                f"{expected():,}"
            )

    return Case(name, why, check)


TOKEN_BYTES = Exercise(
    id="03-token-bytes",
    title="What a token costs",
    task=(
        "Write `mla_token_bytes(num_layers, latent, rope, number_format, index_layers)`: the bytes "
        "that one token holds in the caches of all layers, as an int. Each of `num_layers` layers "
        "caches a row of `latent` numbers and a rotary key of `rope` numbers. In the format "
        '`"bf16"` every number takes 2 bytes. In `"fp8"` a number of the latent takes 1 byte, and '
        "each group of 128 of them has a scale in float32 beside it; the rotary key stays in "
        "bfloat16. `latent` is a multiple of 128. `index_layers` of the layers have an indexer and "
        "cache an index key as well, always of 128 FP8 numbers and one float32 scale, whatever the "
        "format of the rows."
    ),
    signature=(
        "def mla_token_bytes(\n    num_layers: int, latent: int, rope: int, number_format: str, "
        "index_layers: int\n) -> int:"
    ),
    cases=(
        _bytes_case(
            "one layer in bfloat16",
            (1, 512, 64, "bf16", 0),
            lambda: 1152,
            "576 numbers of 2 bytes. How many heads read them does not matter.",
        ),
        _bytes_case(
            "DeepSeek-V3 in bfloat16",
            (61, 512, 64, "bf16", 0),
            lambda: bytes_per_token(preset("v3"), "bf16"),
            "A cache belongs to a layer, so a token pays once a layer.",
        ),
        _bytes_case(
            "one layer in FP8",
            (1, 512, 64, "fp8", 0),
            lambda: 656,
            "512 bytes of latent, 4 scales of 4 bytes, 64 rotary numbers of 2 bytes.",
        ),
        _bytes_case(
            "FP8 without a rotary key",
            (1, 512, 0, "fp8", 0),
            lambda: 528,
            "GLM-5.3-Flash has such rows. What is not there costs nothing.",
        ),
        _bytes_case(
            "FP8 with a latent of 256",
            (1, 256, 64, "fp8", 0),
            lambda: 256 + 2 * 4 + 128,
            "Two groups, so two scales: the number of scales follows from the latent.",
        ),
        _bytes_case(
            "DeepSeek-V3.2 in FP8",
            (61, 512, 64, "fp8", 61),
            lambda: bytes_per_token(preset("v3.2"), "fp8"),
            "Every layer has an indexer, and its keys are a fifth more (sglang#11309).",
        ),
        _bytes_case(
            "GLM-5.2 in FP8",
            (78, 512, 64, "fp8", 21),
            lambda: bytes_per_token(preset("glm-5.2"), "fp8"),
            "Only 21 of 78 layers have an indexer of their own; the others use its choice.",
        ),
        _bytes_case(
            "DeepSeek-V3.2 in bfloat16",
            (61, 512, 64, "bf16", 61),
            lambda: bytes_per_token(preset("v3.2"), "bf16"),
            "The rows are in bfloat16, the index keys are not.",
        ),
    ),
)

_PEAK, _BANDWIDTH = 1000e12, 5e12


def _floor_case(
    name: str, seq_lens: list[int], s_q: int, heads: int, row_bytes: int, why: str
) -> Case:
    def check(decode_floor: Function) -> None:
        result = decode_floor(list(seq_lens), s_q, heads, row_bytes, _PEAK, _BANDWIDTH)
        seconds, limit = expect_parts(result, ("seconds", "limit"))
        # Token by token, so that nothing here gives the formula away to the reader.
        reading = arithmetic = 0.0
        for seq_len in seq_lens:
            for _ in range(seq_len):
                reading += row_bytes / _BANDWIDTH
                arithmetic += sum(2 * 576 + 2 * 512 for _ in range(s_q * heads)) / _PEAK
        _expect_floor(seconds, limit, reading, arithmetic)

    return Case(name, why, check)


def _expect_floor(seconds: Any, limit: Any, reading: float, arithmetic: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise Complaint(f"seconds is {describe(seconds)}, expected a float")
    expected = max(reading, arithmetic)
    if not math.isclose(seconds, expected, rel_tol=1e-6, abs_tol=1e-15):
        raise Complaint(
            f"seconds is {seconds:.6g}, expected {expected:.6g}: reading takes {reading:.6g}, "
            f"arithmetic {arithmetic:.6g}"
        )
    name = "reading" if reading >= arithmetic else "arithmetic"
    if limit != name:
        raise Complaint(f"limit is {limit!r}, expected {name!r}")


DECODE_FLOOR = Exercise(
    id="03-decode-floor",
    title="The floor of a decode step",
    task=(
        "Write `decode_floor(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth)`: the "
        "least time that the absorbed MLA attention of one layer can take for a batch, as the "
        "tuple `(seconds, limit)`. Request `r` has `seq_lens[r]` cached rows of `row_bytes` bytes, "
        "read once for all its `s_q` query rows and all `heads`. Every query row takes every "
        "cached row of its request: each head multiplies and adds 576 numbers for the score and "
        '512 for the output. The peaks are in FLOP and bytes a second. `limit` is `"reading"` or '
        '`"arithmetic"`, whichever takes longer, `"reading"` if both take the same.'
    ),
    signature=(
        "def decode_floor(\n    seq_lens: list[int],\n    s_q: int,\n    heads: int,\n"
        "    row_bytes: int,\n    peak_flops: float,\n    peak_bandwidth: float,\n"
        ") -> tuple[float, str]:"
    ),
    cases=(
        _floor_case(
            "one request, 16 heads",
            [1000],
            1,
            16,
            1152,
            "A rank of eight that share DeepSeek's 128 heads. Each reads the whole cache.",
        ),
        _floor_case(
            "a batch of three",
            [1000, 10, 300],
            1,
            16,
            1152,
            "Every request has its own cache, so lengths add up. Nothing is shared.",
        ),
        _floor_case(
            "128 heads",
            [1000],
            1,
            128,
            1152,
            "All heads read the same row: eight times the arithmetic, the same bytes.",
        ),
        _floor_case(
            "a verifier of 4 rows",
            [1000, 10],
            4,
            16,
            656,
            "Four query rows of a request read its cache once. They come almost for free until "
            "arithmetic is the limit.",
        ),
        _floor_case("no requests", [], 1, 16, 656, "Warm-up and capture call with nothing."),
    ),
)
