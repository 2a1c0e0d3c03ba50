"""A matplotlib figure as SVG in the page: it stays sharp, and its text can be searched."""

import html
import io
import re
from typing import Any


def inline(figure: Any, words: str) -> str:
    """A block of raw HTML for MyST.

    Args:
        figure: Drawn already, in the style that it is to have.
        words: What it shows, for readers who do not see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", '<svg style="width:100%;height:auto" ', 1)
    # Groups are numbered from 1 in each figure, and a page may hold several.
    svg = re.sub(r'<g id="\w+_\d+">', "<g>", svg)
    # A blank line would end the raw block of some parsers.
    svg = re.sub(r"\n\s*\n", "\n", svg).strip()
    label = html.escape(words, quote=True)
    return f'```{{raw}} html\n<div role="img" aria-label="{label}">\n{svg}\n</div>\n```'
