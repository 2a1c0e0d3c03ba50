"""The tables and the figure of the page on SM120, made from the audit's data and the model."""

from itertools import groupby

from page_figure import inline
from page_table import table

ROWS, HEADS = (4, 16, 64, 256), (8, 64, 128)
DRAWN = 16 * 1024  # bytes: what takes less would be a hair in the figure
# What makes two specialisations differ to a reader of the page.
SHOWN = ("reasons", "shared_bytes", "shared_uses", "registers", "spills", "blocks_per_sm")


def sm120_verdicts(env) -> str:
    """A row for all specialisations of a kernel that came out alike."""
    from mla_kernels.audit import read_record, stale

    record = read_record()
    changed = {line.split(":")[0] for line in stale(record)}
    rows = [
        ["kernel and configuration", "shared, B", "registers", "spills", "blocks an SM", "SM120"],
        ["---", "--:", "--:", "--:", "---", "---"],
    ]
    for names, it in alike(record):
        verdict = "fits" if it["fits"] else "**does not fit**: " + "; ".join(it["reasons"])
        if changed & set(names):
            verdict += " (*stale: the kernel has changed since*)"
        held = f"{it['blocks_per_sm']}, by {it['limited_by']}"
        spills = f"{it['spills']}, in loops {it['spills_in_loops']}" if it["spills"] else "none"
        shown = "<br>".join(f"`{name}`" for name in names)
        rows.append([shown, f"{it['shared_bytes']:,}", it["registers"], spills, held, verdict])
    tools = ", ".join(f"{name} {version}" for name, version in record["tools"].items())
    return f"{table(rows)}\n\nCompiled with {tools}."


def sm120_cuda(env) -> str:
    """The same of the CUDA kernels."""
    from mla_kernels.audit import read_record
    from mla_kernels.audit.record import CUDA_RECORD
    from mla_kernels.kernel_hash import cuda_source_hash

    record = read_record(CUDA_RECORD)
    rows = [
        ["kernel", "shared, B", "registers", "spills", "blocks an SM", "SM120"],
        ["---", "--:", "--:", "--:", "---", "---"],
    ]
    for name, entry in record["compilations"].items():
        it = entry["targets"]["sm_120"]
        verdict = "fits" if it["fits"] else "**does not fit**: " + "; ".join(it["reasons"])
        held = f"{it['blocks_per_sm']}, by {it['limited_by']}"
        spills = f"{it['spills']}, in loops {it['spills_in_loops']}" if it["spills"] else "none"
        cells = [f"{it['shared_bytes']:,}", it["registers"], spills, held, verdict]
        rows.append([f"`{entry['file']}`: `{name}`", *cells])
    tools = ", ".join(f"{name} {version}" for name, version in record["tools"].items())
    fresh = record["source_hash"] == cuda_source_hash()
    more = "" if fresh else " ***Stale**: the sources have changed since.*"
    return f"{table(rows)}\n\nCompiled with {tools}.{more}"


def sm120_budget(env) -> str:
    """The figure, as SVG in the page."""
    from mla_kernels.audit import read_record
    from mla_kernels.audit.shared_map import USES
    from mla_ref.teaching import style
    from mla_ref.teaching.figures import shared_memory_budget

    kernels = {}
    for names, it in alike(read_record()):
        if it["shared_bytes"] >= DRAWN:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            kernels[names[0] + more] = {use: it["shared_uses"][use] for use in USES}
    if not kernels:
        return "*No kernel here takes 16 KiB.*"
    kernels = dict(sorted(kernels.items(), key=lambda item: -sum(item[1].values())))
    words = "Shared memory of a block of each kernel by use, against SM120's 101,376 bytes"
    with style.styled():
        return inline(shared_memory_budget(kernels), words)


def roofline_errors(env) -> str:
    """The model against what was measured."""
    from mla_ref.bench.roofline_measured import MEASURED

    rows = [
        ["workload", "rows", "heads", "measured, µs", "model, µs", "error", "floor, µs"],
        ["---", "--:", "--:", "--:", "--:", "--:", "--:"],
    ]
    for m in MEASURED:
        workload = "disjoint" if m.overlap is None else f"verifier, {m.overlap:.0%} in common"
        error = f"({m.error:+.0%})" if m.calibrates else f"{m.error:+.0%}"
        times = [us(m.estimate.expected_s), error, us(m.estimate.floor_s)]
        rows.append([workload, m.rows, m.heads, f"{m.microseconds:.1f}", *times])
    return table(rows)


def roofline_predictions(env) -> str:
    """What the model says of devices that nobody measured."""
    from mla_ref.bench.kernel_workload import KernelShape
    from mla_ref.bench.roofline_devices import DEVICES
    from mla_ref.bench.roofline_kernels import predict

    cards = [card for card in DEVICES if not card.measured]
    head = ["rows", "heads"]
    for card in cards:
        head += [f"{card.name}: floor", "best", "**prediction**, expected"]
    rows = [head, ["--:"] * len(head)]
    for heads in HEADS:
        for count in ROWS:
            found = [predict(KernelShape(count, heads), card) for card in cards]
            cells = [us(t) for e in found for t in (e.floor_s, e.best_s, e.expected_s)]
            rows.append([count, heads, *cells])
    return table(rows) + "\n\nMicroseconds; FP8 rows, top-k 2,048 of 262,144 slots, disjoint lists."


def roofline_kernels(env) -> str:
    """The same of the kernels themselves, with the share of the rate that their receipts show."""
    from receipts_page import FOLDER

    from mla_ref.bench import read_receipt
    from mla_ref.bench.kernel_workload import KernelShape
    from mla_ref.bench.roofline_devices import DEVICES, H200
    from mla_ref.bench.roofline_kernels import predict
    from mla_ref.bench.roofline_receipts import design_of

    newest = {}
    for path in sorted(FOLDER.glob("nvidia-h200/*.json")):
        receipt = read_receipt(path)
        newest[receipt.backend] = receipt
    cards = [card for card in DEVICES if not card.measured]
    head = ["heads", "rows"]
    for backend in newest:
        head += [f"{backend}: H200, measured", *(f"**prediction**, {c.name}" for c in cards)]
    rows = [head, ["--:"] * len(head)]
    for heads in HEADS:
        for count in ROWS:
            cells = []
            for receipt in newest.values():
                time = next(
                    line.median_us
                    for line in receipt.lines
                    if line.own
                    and (line.contender, line.workload) == ("decode", "disjoint")
                    and (line.heads, line.rows) == (heads, count)
                )
                design = design_of(receipt, heads, H200)
                found = [predict(KernelShape(count, heads), card, design) for card in cards]
                cells += [f"{time:.1f}", *(us(e.expected_s) for e in found)]
            rows.append([heads, count, *cells])
    return table(rows)


def roofline_facts(env) -> str:
    """Where each number of each device comes from."""
    from mla_ref.bench.roofline_devices import DEVICES, Fact

    units = {"bytes_s": (1e-12, "TB/s"), "flops_s": (1e-12, "TFLOP/s")}
    rows = [["device", "fact", "value", "source"], ["---", "---", "--:", "---"]]
    for card in DEVICES:
        for name, fact in vars(card).items():
            if not isinstance(fact, Fact):
                continue
            factor, unit = next((u for end, u in units.items() if name.endswith(end)), (1e6, "µs"))
            words = name.rsplit("_", 2)[0] if unit != "µs" else name.removesuffix("_s")
            value = f"{fact.value * factor:.4g} {unit}"
            rows.append([card.name, words.replace("_", " "), value, fact.source])
    return table(rows)


def alike(record) -> list[tuple[list[str], dict]]:
    """Specialisations of one kernel with the same `SHOWN` numbers on SM120, as one entry."""
    found = []
    entries = sorted(record["compilations"].items())
    for _, of_kernel in groupby(entries, key=lambda item: item[1]["function"]):
        groups: list[tuple[list[str], dict]] = []
        for name, entry in of_kernel:
            it = entry["targets"]["sm_120"]
            same = next((n for n, other in groups if all(other[k] == it[k] for k in SHOWN)), None)
            if same is None:
                groups.append(([name], it))
            else:
                same.append(name)
        found += groups
    return found


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


FUNCTIONS = (
    sm120_verdicts,
    sm120_cuda,
    sm120_budget,
    roofline_errors,
    roofline_predictions,
    roofline_kernels,
    roofline_facts,
)
