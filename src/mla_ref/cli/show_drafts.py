"""How `mla-ref generate --show-drafts` marks which tokens were drafted, and what became of them."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

if TYPE_CHECKING:
    from mla_ref.engine import Output


class Marks(NamedTuple):
    """One way to mark text.

    Attributes:
        accepted: Marks drafts that the model would have written too.
        rejected: Marks drafts that it would not, so that they are no part of the text.
        own: Marks the token that the model itself adds in each step.
    """

    accepted: Callable[[str], str]
    rejected: Callable[[str], str]
    own: Callable[[str], str]

    @property
    def legend(self) -> str:
        """One line that explains them."""
        return (
            f"{self.accepted('drafted and accepted')}  {self.rejected('drafted and rejected')}  "
            f"{self.own('the one token that the model itself adds in each step')}"
        )


COLOURS = Marks(
    accepted=lambda text: typer.style(text, fg="green"),
    rejected=lambda text: typer.style(text, fg="red", strikethrough=True),
    own=lambda text: typer.style(text, bold=True, underline=True),
)
# As in `git diff --word-diff`.
PLAIN = Marks(
    accepted=lambda text: f"{{+{text}+}}",
    rejected=lambda text: f"[-{text}-]",
    own=lambda text: text,
)


def marks_for_stdout() -> Marks:
    """Colours on a terminal that has them, unless NO_COLOR is set; else plain marks."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return COLOURS if wanted and sys.stdout.isatty() else PLAIN


def marked(
    output: "Output", pieces: Sequence[str], token_text: Callable[[int], str], marks: Marks
) -> str:
    """What a step has done to the text of one request.

    Args:
        output: The step.
        pieces: The characters that each of its tokens has completed; fewer than tokens where the
            text ends before.
        token_text: The text of a rejected draft, by itself.
        marks: How to mark.
    """
    accepted = "".join(pieces[: output.num_accepted])
    own = "".join(pieces[output.num_accepted :])
    parts = [marks.accepted(accepted)] if accepted else []
    if len(pieces) > output.num_accepted:  # else the text has ended among the accepted drafts
        # On one line: what is not there must not break lines.
        rejected = "".join(map(token_text, output.drafts[output.num_accepted :]))
        if rejected:
            parts.append(marks.rejected(rejected.replace("\n", "\\n")))
        if own:
            parts.append(marks.own(own))
    return "".join(parts)
