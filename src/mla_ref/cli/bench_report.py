"""What the measurements of `mla-ref bench` share: their options, the machine, a progress bar."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from mla_ref.platform import require


@dataclass(frozen=True)
class SpeculativeOptions:
    """Those that only `bench speculative` takes; None where they were left to it.

    Attributes:
        prompts: A file of prompts.
        limit: Prompts of it at most.
        tokens: Tokens to write.
        mtp: Drafts a step.
        drafter: "mtp", "ngram" or "both".
        attention: How the model's attention is computed.
        sparse: Attend to chosen keys; True or None.
    """

    prompts: Path | None = None
    limit: int | None = None
    tokens: int | None = None
    mtp: int | None = None
    drafter: str | None = None
    attention: str | None = None
    sparse: bool | None = None

    def require_none(self, what: str) -> None:
        """Raise if one was given to another measurement."""
        for option in fields(self):
            if getattr(self, option.name) is not None:
                raise ValueError(f"--{option.name} is for speculative, not for {what}")


@dataclass(frozen=True)
class BenchOptions:
    """What the user asked for; None where it was left to the measurement.

    Attributes:
        lengths: Lengths in tokens.
        heads: Query heads.
        head_dim: Width of a head.
        peer_length: The longest length for the peer.
        requests: Verifier requests of a batch.
        repeats: Timed runs.
        as_json: Print one JSON object and nothing else.
        figure: Where to save a figure.
        speculative: What only speculative takes.
    """

    lengths: list[int] | None
    heads: int | None
    head_dim: int | None
    peer_length: int | None
    requests: int | None
    repeats: int | None
    as_json: bool
    figure: Path | None
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)


def check_figure(figure: Path, lengths: Sequence[int] | None = None) -> None:
    """Raise now what would otherwise be raised after all has been measured.

    Args:
        figure: Where it shall go.
        lengths: Where these are its axis.
    """
    from mla_ref.checks import require_choice

    require_choice("the ending of --plot", figure.suffix, (".png", ".svg", ".pdf"))
    if lengths is not None and len(set(lengths)) < 2:
        raise ValueError(f"--plot needs two lengths at least, got --lengths {lengths[0]}")
    if not figure.parent.is_dir():
        raise FileNotFoundError(f"--plot {figure}: there is no folder {figure.parent}")
    require("matplotlib.figure")


def machine() -> dict[str, Any]:
    """What the times were taken on."""
    import torch

    return {
        "device": "cpu",
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def machine_in_words() -> str:
    """The same in a line."""
    facts = machine()
    return (
        f"CPU only: {facts['architecture']}, torch {facts['torch']}, threads: {facts['threads']}."
    )


def progress() -> Progress:
    """A bar on stderr that vanishes when it is done, and is not there in a pipe."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
