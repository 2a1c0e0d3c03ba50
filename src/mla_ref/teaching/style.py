"""One look for all figures: colours that everyone can tell apart, text as large as the page's.

The colours are those of Okabe and Ito (2008), which stay apart in all common kinds of colour
blindness; where colour says something, a shape or a word says it too. Figures have a white ground
of their own, so they read the same on a dark page, and are drawn as SVG, so they stay sharp.
"""

import io
from typing import Any

from mla_ref.platform import require

INK = "#1b1f24"
MUTED = "#5f6873"
FAINT = "#dfe3e8"
PAPER = "#ffffff"
BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
VERMILLION = "#d55e00"

# Inches; 72 points each. It fills the text column of the book, about 720 pixels.
WIDTH = 7.2

_RC = {
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "font.size": 9.5,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    "svg.hashsalt": "mla_ref",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


def styled() -> Any:
    """A context in which matplotlib draws in this look."""
    return require("matplotlib").rc_context(_RC)


def new_figure(height: float) -> Any:
    """An empty figure of the page's width; a notebook that ends a cell with it shows it.

    Made without pyplot, which would keep it open, show it twice and choose a window system.

    Args:
        height: In inches.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure_class = require("matplotlib.figure").Figure

    class PageFigure(figure_class):  # type: ignore[valid-type,misc]
        def _repr_svg_(self) -> str:
            buffer = io.StringIO()
            with styled():
                self.savefig(buffer, format="svg", metadata={"Date": None})
            return buffer.getvalue()

    with styled():
        return PageFigure(figsize=(WIDTH, height), layout="constrained")
