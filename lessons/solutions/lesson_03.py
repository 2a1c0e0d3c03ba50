"""Answers to the exercises of lesson 03. Write your own first."""


def mla_token_bytes(
    num_layers: int, latent: int, rope: int, number_format: str, index_layers: int
) -> int:
    """Bytes that one token holds in the caches of all layers."""
    row = latent + 4 * (latent // 128) if number_format == "fp8" else 2 * latent
    return num_layers * (row + 2 * rope) + index_layers * (128 + 4)


def decode_floor(
    seq_lens: list[int],
    s_q: int,
    heads: int,
    row_bytes: int,
    peak_flops: float,
    peak_bandwidth: float,
) -> tuple[float, str]:
    """The least time of one layer's absorbed MLA decode, and what sets it."""
    tokens = sum(seq_lens)
    reading = tokens * row_bytes / peak_bandwidth
    arithmetic = tokens * s_q * heads * 2 * (576 + 512) / peak_flops
    return max(reading, arithmetic), "reading" if reading >= arithmetic else "arithmetic"
