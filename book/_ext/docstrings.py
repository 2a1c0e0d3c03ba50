"""Docstrings as they are written here: Google sections, plain text, and Markdown's marks for code.

autodoc and napoleon take reStructuredText, in which `sm_` is a link, `*rows` begins an emphasis
and the property docstring "Bytes of a row: latent, then key" declares a type. So this extension
rewrites a docstring before napoleon sees it. A single backtick is code through `default_role`.
A module's docstring is left to `from_data`, which gives it to MyST as the Markdown that it is.
"""

import re

CODE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"[\\*|]|_(?!\w)")
COLON = "\N{RATIO}"


def before_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Escape what reStructuredText would take for a mark; turn fences into code blocks."""
    if what == "module":
        lines.clear()
        return
    rewritten, inside = [], False
    for line in lines:
        if line.lstrip().startswith("```"):
            inside = not inside
            indent = line[: len(line) - len(line.lstrip())]
            language = line.strip("` ") or "python"
            rewritten += ["", f"{indent}.. code-block:: {language}", ""] if inside else [""]
        elif inside:
            rewritten.append(f"   {line}" if line else line)
        else:
            parts = CODE.split(line)
            parts[::2] = [SPECIAL.sub(r"\\\g<0>", text) for text in parts[::2]]
            rewritten.append("".join(parts))
    if what in ("attribute", "data", "property") and rewritten:
        rewritten[0] = rewritten[0].replace(":", COLON)
    lines[:] = rewritten


def after_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Give a property its colon back."""
    if what in ("attribute", "data", "property") and lines:
        lines[:] = [line.replace(COLON, ":") for line in lines]


def signature(app, what, name, obj, options, shown: str | None, returns: str | None):
    """A default that a dataclass makes anew is no expression, and Sphinx then sets raw text."""
    if shown is None:
        return None
    return shown.replace("<factory>", "..."), returns


def setup(app):
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    return {"parallel_read_safe": True}
