"""The tables of measured times, from the receipts in kernels/receipts."""

from collections.abc import Iterator
from pathlib import Path

from page_table import table

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "receipts"
OWN = ("decode", "extend")


def receipt_files() -> list[Path]:
    """One folder a device, in it a file a run."""
    return sorted(FOLDER.glob("*/*.json"))


def receipts(env) -> str:
    """Every receipt, newest first."""
    from mla_ref.bench import read_receipt

    found = [read_receipt(path) for path in receipt_files()]
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
        f"Kernels {hash_parts(receipt.kernel_hash)}. {cases} conformance cases passed in the same "
        f"run. Times: {receipt.clock}."
    )
    model = {(h.line.workload, h.line.rows, h.line.heads): h for h in _held(receipt)}
    for workload in dict.fromkeys((line.workload, line.overlap) for line in receipt.lines):
        name, overlap = workload
        words = "different slots in every row" if name == "disjoint" else f"{overlap:.0%} in common"
        yield f"**{name}**: {words}; times in µs."
        yield table(_rows([x for x in receipt.lines if (x.workload, x.overlap) == workload], model))


def hash_parts(kernel_hash: str) -> str:
    """A hash in pieces that a line can break between."""
    return " ".join(f"`{part}`" for part in (kernel_hash or "none").split("-"))


def kernels_in_words(backend: str, kernel_hash: str) -> str:
    """The hash of what was measured, and whether the kernels are still those."""
    from mla_kernels.kernel_hash import changed_since

    changed = changed_since(backend, kernel_hash)
    if changed == ():
        words = ", as they still are"
    else:
        words = f"; **changed since**: {named(changed) if changed else 'how much is not recorded'}"
    return f"Kernels {hash_parts(kernel_hash)}{words}."


def named(sources) -> str:
    """Names of sources as code."""
    return ", ".join(f"`{source}`" for source in sources)


def _held(receipt) -> list:
    """The model's times: on a device whose rates nobody measured, by the designs of the H200's."""
    from mla_ref.bench import read_receipt
    from mla_ref.bench.roofline_devices import H200, device_named
    from mla_ref.bench.roofline_receipts import design_of, hold

    device = device_named(receipt.machine.device)
    if device is None:
        return []
    if device.measured:
        return list(hold(receipt, device))
    found = map(read_receipt, sorted(FOLDER.glob("nvidia-h200/*.json"), reverse=True))
    base = next((other for other in found if other.backend == receipt.backend), None)
    if base is None:
        return []
    heads = {line.heads for line in receipt.lines}
    return list(hold(receipt, device, {count: design_of(base, count, H200) for count in heads}))


def _rows(lines, model) -> list[list]:
    rows = [
        ["heads", "rows", "decode", "model", "floor / decode", "extend", "FlashMLA"]
        + ["FlashMLA / decode"],
        ["--:"] * 8,
    ]
    for heads in sorted({line.heads for line in lines}):
        for count in sorted({line.rows for line in lines}):
            here = {x.contender: x for x in lines if (x.heads, x.rows) == (heads, count)}
            own, peer = here.get("decode"), here.get("FlashMLA")
            if own is None or own.median_us is None:
                continue
            held = model.get((own.workload, count, heads))
            ratio = peer.median_us / own.median_us if peer and peer.median_us else None
            rows.append(
                [
                    heads,
                    count,
                    f"{own.median_us:.1f}",
                    _model(held),
                    f"{own.floor_us / own.median_us:.0%}",
                    _us(here.get("extend")),
                    _us(peer),
                    f"{ratio:.2f}" if ratio else "",
                ]
            )
    return rows


def _model(held) -> str:
    """The model's time and its error; in brackets where it was taken from this very time."""
    if held is None:
        return ""
    error = f"({held.error:+.0%})" if held.calibrates else f"{held.error:+.0%}"
    return f"{held.estimate.expected_s * 1e6:.1f}, {error}"


def _us(line) -> str:
    return f"{line.median_us:.1f}" if line and line.median_us else ""


def _freshness(receipt) -> str:
    from mla_kernels.kernel_hash import changed_since

    changed = changed_since(receipt.backend, receipt.kernel_hash or "")
    if changed == ():
        return "*Fresh: the kernels, and how they are cut, are still those that were measured.*"
    if changed is None:
        return (
            "***Stale**: the kernels or how they are cut have changed since. These times are of "
            "what they were.*"
        )
    return (
        f"***Stale in part**: {named(changed)} changed since, so times that rest on these are of "
        "what they were; all other sources are as they were measured.*"
    )


FUNCTIONS = (receipts,)
