"""Example: one command line that a verb's help shows and that the tests run."""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One way to call a verb, as it stands at the end of ``mla-ref VERB --help``.

    An example in a help text is a promise, so the tests run each one as it is printed.

    Attributes:
        args: what follows ``mla-ref``, the verb included: ``"doctor --json"``. A tuple of words
            is taken as it is; a string is split as a POSIX shell would split it.
        note: what the reader sees when it runs, in a few words.
        needs_model: whether it needs the model wheel; the tests then mark it ``model``.
    """

    args: str | tuple[str, ...]
    note: str
    needs_model: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        """The words of the command line after ``mla-ref``."""
        return tuple(shlex.split(self.args)) if isinstance(self.args, str) else self.args

    @property
    def line(self) -> str:
        """The command line as a reader types it, with the author's own quotes."""
        return f"mla-ref {self.args if isinstance(self.args, str) else shlex.join(self.args)}"
