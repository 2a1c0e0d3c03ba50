"""Wrong answers to the exercises of lesson 03, each with the case that must catch it."""

import importlib.util
from pathlib import Path

SOLUTIONS = Path(__file__).parents[2] / "lessons" / "solutions" / "lesson_03.py"


def solutions():
    spec = importlib.util.spec_from_file_location("lesson_03", SOLUTIONS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_heads(num_layers, latent, rope, number_format, index_layers):
    return 128 * solutions().mla_token_bytes(num_layers, latent, rope, number_format, index_layers)


def one_layer(num_layers, latent, rope, number_format, index_layers):
    return solutions().mla_token_bytes(1, latent, rope, number_format, min(index_layers, 1))


def no_scales(num_layers, latent, rope, number_format, index_layers):
    width = 1 if number_format == "fp8" else 2
    return num_layers * (width * latent + 2 * rope) + 132 * index_layers


def rope_always_64(num_layers, latent, rope, number_format, index_layers):
    return solutions().mla_token_bytes(num_layers, latent, 64, number_format, index_layers)


def four_scales(num_layers, latent, rope, number_format, index_layers):
    row = latent + 16 if number_format == "fp8" else 2 * latent
    return num_layers * (row + 2 * rope) + 132 * index_layers


def no_index_keys(num_layers, latent, rope, number_format, index_layers):
    return solutions().mla_token_bytes(num_layers, latent, rope, number_format, 0)


def index_key_in_every_layer(num_layers, latent, rope, number_format, index_layers):
    every = num_layers if index_layers else 0
    return solutions().mla_token_bytes(num_layers, latent, rope, number_format, every)


def index_keys_in_the_rows_format(num_layers, latent, rope, number_format, index_layers):
    key = 132 if number_format == "fp8" else 256
    rows = solutions().mla_token_bytes(num_layers, latent, rope, number_format, 0)
    return rows + key * index_layers


def a_float(*args):
    return float(solutions().mla_token_bytes(*args))


def sum_of_both(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth):
    tokens = sum(seq_lens)
    reading = tokens * row_bytes / peak_bandwidth
    return reading + tokens * s_q * heads * 2176 / peak_flops, "reading"


def longest_only(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth):
    longest = [max(seq_lens, default=0)]
    return solutions().decode_floor(longest, s_q, heads, row_bytes, peak_flops, peak_bandwidth)


def always_reading(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth):
    return sum(seq_lens) * row_bytes / peak_bandwidth, "reading"


def reads_again_for_every_row(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth):
    again = row_bytes * s_q
    return solutions().decode_floor(seq_lens, s_q, heads, again, peak_flops, peak_bandwidth)


def by_intensity(seq_lens, s_q, heads, row_bytes, peak_flops, peak_bandwidth):
    flops, bytes_read = sum(seq_lens) * s_q * heads * 2176, sum(seq_lens) * row_bytes
    if flops / bytes_read > peak_flops / peak_bandwidth:
        return flops / peak_flops, "arithmetic"
    return bytes_read / peak_bandwidth, "reading"


WRONG_03 = [
    ("03-token-bytes", with_heads, "one layer in bfloat16", "expected 1,152"),
    ("03-token-bytes", a_float, "one layer in bfloat16", "expected a whole number"),
    ("03-token-bytes", one_layer, "DeepSeek-V3 in bfloat16", "expected 70,272"),
    ("03-token-bytes", no_scales, "one layer in FP8", "is 640, expected 656"),
    ("03-token-bytes", rope_always_64, "FP8 without a rotary key", "expected 528"),
    ("03-token-bytes", four_scales, "FP8 with a latent of 256", "is 400, expected 392"),
    ("03-token-bytes", no_index_keys, "DeepSeek-V3.2 in FP8", "is 40,016, expected 48,068"),
    ("03-token-bytes", index_key_in_every_layer, "GLM-5.2 in FP8", "expected 53,940"),
    ("03-token-bytes", index_keys_in_the_rows_format, "DeepSeek-V3.2 in bf", "expected 78,324"),
    ("03-decode-floor", sum_of_both, "one request, 16 heads", "seconds is"),
    ("03-decode-floor", longest_only, "a batch of three", "seconds is"),
    ("03-decode-floor", always_reading, "128 heads", "arithmetic"),
    ("03-decode-floor", reads_again_for_every_row, "a verifier of 4 rows", "seconds is"),
    ("03-decode-floor", by_intensity, "no requests", "it raised ZeroDivisionError"),
]
