"""The climb's reports as a table for people and as JSON for programs."""

from collections.abc import Sequence

from rich.text import Text

from mla_ref.ladder.climb import RungReport

HEADINGS = ("max abs", "rel L2", "seconds", "KV bytes")
WIDTHS = (9, 8, 8, 9)
LEGEND = "KV bytes: cached for one token in one layer. seconds: the attention alone, all layers."


def table(reports: Sequence[RungReport], title: str) -> Text:
    """Two lines a rung: how far it is from the one below it, and what that shows.

    80 columns hold it, so that it looks the same in a terminal, a log and a README.
    """
    rows = [
        (
            f"{r.rung.number} {r.rung.name}",
            r.rung.checked_against,
            (f"{r.out.max_abs:.1e}", f"{r.out.rel_l2:.1e}", f"{r.seconds:.2f}", f"{r.kv_bytes:,}"),
        )
        for r in reports
    ]
    left = max(len(name) for name, _, _ in rows)
    middle = max(len("checked against"), *(len(against) for _, against, _ in rows))
    text = Text(f"{title}\n\n", style="")
    text.append(f"{'rung':<{left}}  {'checked against':<{middle}}", style="bold")
    text.append(_columns(HEADINGS) + "\n", style="bold")
    for report, (name, against, figures) in zip(reports, rows, strict=True):
        text.append(f"{name:<{left}}  {against:<{middle}}")
        text.append(_columns(figures))
        text.append(
            "   ok\n" if report.ok else "   NO\n", style="green" if report.ok else "bold red"
        )
        text.append(f"    {report.shown}\n", style="dim")
    return text.append(f"\n{LEGEND}\n", style="dim")


def _columns(words: Sequence[str]) -> str:
    return "".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True))


def to_json(report: RungReport) -> dict[str, object]:
    """One report as plain data."""
    return {
        "rung": report.rung.number,
        "name": report.rung.name,
        "checked_against": report.rung.checked_against,
        "ok": report.ok,
        "max_abs": report.out.max_abs,
        "rel_l2": report.out.rel_l2,
        "rel_l2_limit": report.limit,
        "nan_mismatches": report.out.nan_mismatches,
        "inf_mismatches": report.out.inf_mismatches,
        "worst_layer": report.layer,
        "worst_index": list(report.out.worst_index),
        "lse_max_abs": report.lse.max_abs if report.lse else None,
        "lse_rel_l2": report.lse.rel_l2 if report.lse else None,
        "seconds": report.seconds,
        "kv_bytes_per_token_per_layer": report.kv_bytes,
        "shown": report.shown,
    }


def disagreement(report: RungReport) -> str:
    """What to tell a person when a rung does not agree with the one below."""
    layer, name, check = report.wrong[0]
    return (
        f"rung {report.rung.number} ({report.rung.name}) disagrees with "
        f"{report.rung.checked_against} in layer {layer}, {name}: {check}; allowed rel L2 "
        f"{report.limit:.0e}"
    )
