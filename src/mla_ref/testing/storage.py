"""The memory of a case: a cache with poison where nobody may look, and tensors with gaps.

Each function moves the whole storage to the device first and takes the view there; moving a view
would close its gaps.
"""

import math
import os
import re
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mla_ref.cache import pack_fp8_rows
from mla_ref.checks import require_choice

POISONS = ("none", "nan", "inf", "nan in last slot", "nan in slot 0")
_MEMINFO = Path("/proc/meminfo")


def poison_rows(n: int, poison: str, like: Tensor) -> Shaped[Tensor, "n row"]:
    """Rows of NaN or infinity, as numbers or as 656 bytes."""
    width = like.shape[-1]
    if like.dtype != torch.uint8:
        return like.new_full((n, width), math.inf if poison == "inf" else math.nan)
    # 0xFF is NaN in each part of the row: E4M3 0xFF, float32 0xFFFFFFFF, bfloat16 0xFFFF.
    rows = like.new_full((n, width), 0xFF)
    if poison == "inf":  # E4M3 has no infinity: 448 times a scale of infinity
        rows[:, :512] = 0x7E
        rows[:, 512:528] = torch.full((n, 4), math.inf).view(torch.uint8)
        rows[:, 528:] = torch.full((n, 64), math.inf, dtype=torch.bfloat16).view(torch.uint8)
    return rows


def poisoned(
    rows: Shaped[Tensor, "capacity row"], unlisted: Bool[Tensor, " capacity"], poison: str
) -> Shaped[Tensor, "capacity row"]:
    """A copy with poison in slots that no list names."""
    require_choice("poison", poison, POISONS)
    where = unlisted.clone()
    if poison == "none":
        return rows
    if poison == "nan in last slot":
        where[:-1] = False
    elif poison == "nan in slot 0":
        where[1:] = False
    rows = rows.clone()
    rows[where] = poison_rows(int(where.sum()), poison, rows)
    return rows


def packed(
    rows: Float[Tensor, "capacity 576"], cache_format: str, dtype: torch.dtype, scale_rule: str
) -> Shaped[Tensor, "capacity row"]:
    """Rows as the cache holds them."""
    if cache_format == "fp8":
        return pack_fp8_rows(rows, scale_rule=scale_rule)
    return rows.to(dtype)


def in_pages(
    rows: Shaped[Tensor, "capacity row"], page_size: int, gap: bool, device: torch.device
) -> Shaped[Tensor, "pages page_size row"]:
    """The cache; with `gap` one row of NaN lies behind each page, which belongs to nobody."""
    pages = rows.unflatten(0, (-1, page_size))
    if not gap:
        return pages.to(device)
    behind = poison_rows(pages.shape[0], "nan", rows)[:, None]
    return torch.cat([pages, behind], dim=1).to(device)[:, :page_size]


def strided(q: Float[Tensor, "rows h d"], device: torch.device) -> Float[Tensor, "rows h d"]:
    """The same numbers with heads outermost in memory and NaN behind each."""
    wide = torch.cat([q, torch.full_like(q[..., :64], math.nan)], dim=-1)
    return wide.transpose(0, 1).contiguous().to(device).transpose(0, 1)[..., : q.shape[-1]]


def too_large(nbytes: int, device: torch.device) -> str | None:
    """Why a cache of so many bytes cannot be had, or None. A CPU commits only pages it touches."""
    if not nbytes or device.type != "cpu":
        return None
    there = available_bytes()
    if there is None:
        return f"needs {nbytes / 1e9:.1f} GB, and this system does not tell what it has"
    if there < nbytes:
        return f"needs {nbytes / 1e9:.1f} GB of memory, {there / 1e9:.1f} GB are available"
    return None


def available_bytes() -> int | None:
    """Memory that can be had: on Linux now, elsewhere all there is; None where nothing tells.

    Linux keeps files in what would be free otherwise and gives it back when asked: MemFree, and so
    SC_AVPHYS_PAGES, is near 0 on a machine that has read much, and MemAvailable is not.
    """
    try:
        meminfo = _MEMINFO.read_text() if _MEMINFO.exists() else ""
        if found := re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE):
            return int(found[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
