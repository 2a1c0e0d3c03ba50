"""The climb's reports as a table for people and as JSON for programs."""

from collections.abc import Sequence

from rich.table import Table

from mla_ref.ladder.climb import RungReport


def table(reports: Sequence[RungReport], title: str) -> Table:
    """One row a rung: what it was checked against, how far apart, how long, how many bytes."""
    result = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    result.add_column("rung", no_wrap=True)
    result.add_column("checked against")
    for name in ("max abs", "rel L2", "seconds", "KV bytes"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("", no_wrap=True)
    result.add_column("what was shown")
    for report in reports:
        result.add_row(
            f"{report.rung.number} {report.rung.name}",
            report.rung.checked_against,
            f"{report.out.max_abs:.1e}",
            f"{report.out.rel_l2:.1e}",
            f"{report.seconds:.2f}",
            f"{report.kv_bytes:,}",
            "[green]ok[/]" if report.ok else "[bold red]NO[/]",
            report.shown,
        )
    return result


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
        "lse_max_abs": report.lse.max_abs,
        "lse_rel_l2": report.lse.rel_l2,
        "seconds": report.seconds,
        "kv_bytes_per_token_per_layer": report.kv_bytes,
        "shown": report.shown,
    }


def disagreement(report: RungReport) -> str:
    """What to tell a person when a rung does not agree with the one below."""
    return (
        f"rung {report.rung.number} ({report.rung.name}) disagrees with "
        f"{report.rung.checked_against} in layer {report.layer}: {report.out}; allowed rel L2 "
        f"{report.limit:.0e} (LSE: {report.lse})"
    )
