"""The text that the ladder, the tests and the lessons run on.

The opening of "Emma" by Jane Austen (1815, public domain), exactly as in the R package
janeaustenr 1.0.0 (MIT), which took it from Project Gutenberg: about 6 kB, 1,400 SmolLM2 tokens.
"""

from importlib.resources import files


def passage() -> str:
    """Return the passage: plain ASCII, paragraphs apart by an empty line, no title."""
    return (files("mla_ref.models") / "data" / "passage.txt").read_text(encoding="utf-8")
