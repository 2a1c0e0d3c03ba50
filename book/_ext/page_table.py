"""A table in Markdown, as MyST reads it."""


def table(rows: list[list]) -> str:
    """One line a row; the second row says how the columns are aligned."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
