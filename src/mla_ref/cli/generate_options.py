"""The options of `mla-ref generate`, and what can be said about them before a model is loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mla_ref.engine import Prompt
    from mla_ref.speculative import SamplingParams

CACHE_DTYPES = ("float32", "bfloat16", "fp8")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DEFAULT_DRAFTER = "mtp"
DEFAULT_TOPK = 256


@dataclass(frozen=True)
class GenerateOptions:
    """As the user gave them; the help of the verb says what each one is."""

    prompt: str | None
    prompts: Path | None
    limit: int | None
    chat: bool
    tokens: int
    stop_at: str | None
    mtp: int
    drafter: str | None
    show_drafts: bool
    compare: bool
    temperature: float
    sample_top_k: int | None
    sample_top_p: float | None
    top_k: str | None
    seed: int | None
    attention: str
    form: str | None
    sparse: bool
    topk: int | None
    backend: str
    mode: str | None
    cache_dtype: str | None
    page_size: int
    chunk_size: int
    max_seqs: int
    device: str
    dtype: str
    graphs: bool | None
    gguf: Path | None
    as_json: bool

    @property
    def compares(self) -> bool:
        """Whether the prompts run without drafts too."""
        return self.compare or self.show_drafts

    @property
    def drafter_name(self) -> str | None:
        """Who proposes drafts; None: nobody."""
        return (self.drafter or DEFAULT_DRAFTER) if self.mtp else None

    @property
    def keys_per_row(self) -> int | None:
        """Keys that a row attends to; None: all."""
        return (self.topk or DEFAULT_TOPK) if self.sparse else None

    @property
    def cache_format(self) -> str:
        """One of `CACHE_DTYPES`."""
        return self.cache_dtype or ("fp8" if self.sparse else DTYPES[self.dtype])

    @property
    def torch_device(self) -> "torch.device":
        """Where the model runs.

        Raises:
            ValueError: There is no such device, and why.
        """
        from mla_ref.platform import resolve_device

        return resolve_device(self.device)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the attention can be recorded: it does not go from page to page on the host."""
        from mla_ref.models.smollm2_layer import reads_no_lengths

        return reads_no_lengths(self.attention, self.form)

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps are replayed from graphs."""
        if self.graphs is None:
            return self.torch_device.type == "cuda" and self.has_fixed_shapes
        return self.graphs

    def check(self) -> None:
        """Raise an error that names the option which cannot be, or not with another."""
        from mla_ref.checks import require_count

        if self.top_k is not None:
            raise ValueError(
                "--top-k is no option: --topk K is the keys that a row attends to (with --sparse), "
                "--sample-top-k K the tokens among which one is drawn (with --temperature)"
            )
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give either a PROMPT or --prompts FILE")
        if self.limit is not None:
            require_count("--limit", self.limit, at_least=1)
            if self.prompts is None:
                raise ValueError("--limit needs --prompts FILE")
        require_count("--tokens", self.tokens, at_least=1)
        if self.stop_at == "":
            raise ValueError("--stop-at must hold some text, got an empty one")
        self._check_drafts()
        if self.sample_top_k is not None:
            require_count("--sample-top-k", self.sample_top_k, at_least=1)
        _ = self.sampling  # raises for the others
        self._check_device()
        self._check_attention()
        require_count("--page-size", self.page_size, at_least=1)
        require_count("--max-seqs", self.max_seqs, at_least=1)
        require_count("--chunk-size", self.chunk_size, at_least=1)
        if self.chunk_size < 1 + self.mtp:
            raise ValueError(
                f"--chunk-size must hold the newest token and {self.mtp} drafts, got "
                f"{self.chunk_size}"
            )

    @property
    def sampling(self) -> "SamplingParams":
        """How tokens are chosen.

        Raises:
            ValueError: A number is out of range, or chance is described and not asked for.
        """
        from mla_ref.speculative import SamplingParams

        given = {
            "--sample-top-k": self.sample_top_k,
            "--sample-top-p": self.sample_top_p,
            "--seed": self.seed,
        }
        found = next((name for name, value in given.items() if value is not None), None)
        if found and self.temperature == 0:
            raise ValueError(
                f"{found} needs --temperature: without it the most likely token is taken"
            )
        top_p, seed = self.sample_top_p, self.seed
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.sample_top_k,
            top_p=1.0 if top_p is None else top_p,
            seed=0 if seed is None else seed,
        )

    def read_prompts(self) -> "list[Prompt]":
        """The prompts, from wherever they come.

        Raises:
            ValueError: One is empty, or the file cannot be used.
        """
        from mla_ref.engine import Prompt, read_prompts

        if self.prompts is not None:
            found = read_prompts(self.prompts)[: self.limit]
        else:
            text = self.prompt or ""
            if text == "-":
                text = sys.stdin.read().removesuffix("\n")
            if not text:
                raise ValueError("PROMPT must hold some text, got an empty one")
            found = [Prompt("prompt", text)]
        return [prompt._replace(chat=prompt.chat or self.chat) for prompt in found]

    def _check_drafts(self) -> None:
        from mla_ref.checks import require_choice, require_count
        from mla_ref.engine import DRAFTERS

        require_count("--mtp", self.mtp)
        if self.drafter is not None:
            require_choice("--drafter", self.drafter, DRAFTERS)
        for name, given in (
            ("--drafter", self.drafter is not None),
            ("--show-drafts", self.show_drafts),
            ("--compare", self.compare),
        ):
            if given and not self.mtp:
                raise ValueError(f"{name} needs --mtp N, the drafts a step, such as --mtp 3")

    def _check_device(self) -> None:
        from mla_ref.checks import require_choice

        require_choice("--dtype", self.dtype, tuple(DTYPES))
        _ = self.torch_device  # raises where there is none

    def _check_attention(self) -> None:
        from mla_ref.backends import find_backend
        from mla_ref.batching import read_mode
        from mla_ref.checks import require_choice, require_count
        from mla_ref.models.projections import FORMS
        from mla_ref.models.smollm2_layer import ATTENTIONS

        require_choice("--attention", self.attention, ATTENTIONS)
        if self.form is not None:
            require_choice("--form", self.form, FORMS)
            if self.attention == "gqa":
                raise ValueError("--form is for MLA: leave it out with --attention gqa")
        require_choice("--cache-dtype", self.cache_format, CACHE_DTYPES)
        if self.cache_format == "fp8" and not self.sparse:
            raise ValueError("--cache-dtype fp8 needs --sparse: dense attention reads plain rows")
        if self.sparse and (self.attention, self.form) != ("packed", None):
            raise ValueError(
                "--sparse attends on the packed form; leave --attention and --form out"
            )
        if self.topk is not None:
            require_count("--topk", self.topk, at_least=1)
            if not self.sparse:
                raise ValueError("--topk needs --sparse: dense attention reads all keys")
        if self.mode is not None and not self.sparse:
            raise ValueError("--mode needs --sparse: dense attention has one kernel for all rows")
        read_mode(self.mode)
        find_backend(self.backend)
        if self.backend != "torch" and not self.sparse:
            raise ValueError("--backend needs --sparse: dense attention is torch's alone")
        if self.graphs and not self.has_fixed_shapes:
            raise ValueError(
                "--graphs needs the absorbed form: gqa and expanded go by numbers of the host"
            )
