"""The tables of measured times, from the receipts in kernels/receipts."""

from collections.abc import Iterator
from pathlib import Path

from page_table import table

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "receipts"
OWN = ("decode", "extend")


def receipts(env) -> str:
    """Every receipt, newest first."""
    from mla_ref.bench import read_receipt

    found = [read_receipt(path) for path in sorted(FOLDER.glob("*/*.json"))]
    if not found:
        return "*There is no receipt yet.*"
    found.sort(key=lambda receipt: (receipt.day, receipt.backend), reverse=True)
    return "\n\n".join(part for receipt in found for part in _receipt(receipt))


def _receipt(receipt) -> Iterator[str]:
    machine = receipt.machine
    yield f"## {receipt.backend} on {machine.device}, {receipt.day}"
    yield _freshness(receipt)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    settings = ", ".join(f"{name}={value}" for name, value in machine.settings.items()) or "none"
    cases = sum(kinds.get("passed", 0) for kinds in receipt.check.values())
    yield (
        f"{machine.num_sms} multiprocessors ({machine.sm}), driver {machine.state.driver}, power "
        f"limit {machine.state.power_limit_w:.0f} W, copy "
        f"{receipt.ceilings.copy_bytes_s / 1e12:.2f} TB/s; {versions}; settings: {settings}. "
        f"Kernels `{receipt.kernel_hash}`. {cases} conformance cases passed in the same "
        f"run. Times: {receipt.clock}."
    )
    for workload in dict.fromkeys((line.workload, line.overlap) for line in receipt.lines):
        name, overlap = workload
        words = "different slots in every row" if name == "disjoint" else f"{overlap:.0%} in common"
        yield f"**{name}**: {words}."
        yield table(_rows([x for x in receipt.lines if (x.workload, x.overlap) == workload]))


def _rows(lines) -> list[list]:
    rows = [
        ["heads", "rows", "decode, µs", "floor / decode", "extend, µs", "FlashMLA, µs"]
        + ["FlashMLA / decode"],
        ["--:"] * 7,
    ]
    for heads in sorted({line.heads for line in lines}):
        for count in sorted({line.rows for line in lines}):
            here = {x.contender: x for x in lines if (x.heads, x.rows) == (heads, count)}
            own, peer = here.get("decode"), here.get("FlashMLA")
            if own is None or own.median_us is None:
                continue
            ratio = peer.median_us / own.median_us if peer and peer.median_us else None
            rows.append(
                [
                    heads,
                    count,
                    f"{own.median_us:.1f}",
                    f"{own.floor_us / own.median_us:.0%}",
                    _us(here.get("extend")),
                    _us(peer),
                    f"{ratio:.2f}" if ratio else "",
                ]
            )
    return rows


def _us(line) -> str:
    return f"{line.median_us:.1f}" if line and line.median_us else ""


def _freshness(receipt) -> str:
    from mla_kernels.kernel_hash import KERNEL_HASHES
    from mla_ref.bench import is_fresh

    if is_fresh(receipt, KERNEL_HASHES[receipt.backend]()):
        return "*Fresh: the kernels, and how they are cut, are still those that were measured.*"
    return (
        "***Stale**: the kernels or how they are cut have changed since. These times are of what "
        "they were.*"
    )


FUNCTIONS = (receipts,)
