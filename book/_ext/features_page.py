"""The feature table, from book/data/features.toml."""

import tomllib
from functools import cache
from pathlib import Path

from page_table import table

DATA = Path(__file__).resolve().parents[1] / "data" / "features.toml"
MARKS = {"y": "●", "p": "◐", "-": "·", "?": "?"}


@cache
def features() -> dict:
    return tomllib.loads(DATA.read_text("utf-8"))


def feature_table(env) -> str:
    """A row a feature with its page under it; a column a project, ours first."""
    projects = features()["project"]
    rows = [["what a learner or a kernel author expects", "**here**"]]
    rows[0] += [f"[{project['short']}]({project['url']})" for project in projects]
    rows.append(["---"] + [":-:"] * (1 + len(projects)))
    for row in features()["row"]:
        marks = (MARKS[mark] for mark in (row["ours"], *row["marks"]))
        rows.append([f"{row['what']}<br>{row['where']}", *marks])
    return f"::::{{container}} feature-table\n\n{table(rows)}\n\n::::"


def feature_projects(env) -> str:
    """The projects by name, as of when."""
    names = ", ".join(f"[{p['name']}]({p['url']})" for p in features()["project"])
    return f"As of {features()['as_of']}, from reading files, not every corner of each: {names}."


FUNCTIONS = (feature_table, feature_projects)
