"""`mla-ref generate` at work: from options to a model and requests, and through the engine."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_ref.backends import PARTS, find_backend
from mla_ref.batching import read_mode
from mla_ref.cli.generate_options import DTYPES, GenerateOptions
from mla_ref.cli.generate_result import Run, Writing
from mla_ref.cli.show_drafts import Marks, marked
from mla_ref.engine import (
    Engine,
    Prompt,
    Request,
    Transcript,
    load_model,
    new_drafter,
    pages_for,
    request_seed,
)
from mla_ref.models.gguf_file import GGUFFile, default_gguf
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.platform import device_name
from mla_ref.speculative import Drafter, rejection_sample

# Is shown each step of each request after it, and what that adds to the text, marked.
Display = Callable[[Engine, Writing, str], None]


@dataclass(frozen=True)
class Job:
    """All that a run needs, for as many runs as are wanted.

    Attributes:
        options: The user's.
        prompts: What is to be continued or answered.
        requests: The same for the engine, in the same order.
        tokenizer: Of the model.
        model: The model.
        drafter: Who proposes drafts, or None.
    """

    options: GenerateOptions
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    tokenizer: Tokenizer
    model: LanguageModel
    drafter: Drafter | None

    @classmethod
    def load(cls, options: GenerateOptions, prompts: Sequence[Prompt]) -> "Job":
        """Read the model."""
        file = GGUFFile(options.gguf or default_gguf())
        tokenizer = Tokenizer(file)
        requests = _requests(options, prompts, tokenizer)
        model = load_model(
            file,
            attention=options.attention,
            form=options.form,
            topk=options.keys_per_row,
            backend=find_backend(options.backend),
            device=options.torch_device,
            dtype=getattr(torch, DTYPES[options.dtype]),
        )
        name = options.drafter_name
        drafter = new_drafter(name, model, options.mtp) if name else None
        return cls(options, prompts, requests, tokenizer, model, drafter)

    @property
    def cache_dtype(self) -> torch.dtype:
        """What the cache stores."""
        name = self.options.cache_format
        return torch.uint8 if name == "fp8" else getattr(torch, name)

    @property
    def facts(self) -> dict[str, Any]:
        """What has run, for the reports."""
        options = self.options
        form = options.form or (None if options.attention == "gqa" else "absorbed")
        return {
            "attention": options.attention,
            "form": form,
            "topk": options.keys_per_row,
            "backend": options.backend if options.sparse else None,
            "kernels": self._kernels if options.sparse else None,
            "device": str(self.model.device),
            "device_name": device_name(self.model.device),
            "dtype": options.dtype,
            "graphs": options.uses_graphs,
            "mode": str(read_mode(options.mode)) if options.sparse else None,
            "cache_dtype": options.cache_format,
            "kv_bytes_per_token": self.model.new_cache(1, 1, self.cache_dtype).nbytes,
            "drafter": options.drafter_name,
            "num_speculative_tokens": options.mtp,
        }

    @property
    def _kernels(self) -> dict[str, str]:
        """Who does which step of sparse attention."""
        backend = find_backend(self.options.backend)
        used = [name for name in PARTS if name != "merge"]  # that one is for ranks
        steps = {name: backend.name if name in backend.parts else "torch" for name in used}
        return {"attention": backend.name} | steps

    def run(self, display: Display, *, drafts: bool, marks: Marks | None = None) -> Run:
        """Run all requests to the end, in an engine of their own.

        Raises:
            ValueError: One does not fit into the context; none has run then.
        """
        options, tokenizer = self.options, self.tokenizer
        engine = self._engine(self.requests, drafts)
        writings = {
            request.request_id: Writing(prompt, request, Transcript(tokenizer, options.stop_at))
            for prompt, request in zip(self.prompts, self.requests, strict=True)
        }

        def token_text(token_id: int) -> str:
            return tokenizer.decode([token_id])

        for output in engine.stream(self.requests):
            writing = writings[output.request_id]
            writing.outputs.append(output)
            pieces = writing.transcript.add(output.token_ids, output.finish_reason)
            news = marked(output, pieces, token_text, marks) if marks else "".join(pieces)
            writing.shown += news
            # The engine knows ids and no texts, so a stop text is seen here.
            if writing.transcript.finish_reason and output.request_id in engine.requests:
                engine.abort(output.request_id)
            display(engine, writing, news)
        return Run(list(writings.values()), engine.timeline, engine.acceptance)

    def warm_up(self) -> None:
        """A few tokens for nobody, so that the first run measured is not the first of the process.

        With and without drafts: torch prepares a product anew for another number of rows.
        """
        first, num_drafts = self.requests[0], self.options.mtp
        for drafts, tokens in ((False, 2), (True, 2 + num_drafts)):
            short = replace(first, prompt_ids=first.prompt_ids[:8], max_new_tokens=tokens)
            self._engine([short], drafts).run([short])

    def _engine(self, requests: Sequence[Request], drafts: bool) -> Engine:
        options = self.options
        backend_parts = find_backend(options.backend).parts if options.sparse else {}
        return Engine(
            self.model,
            drafter=self.drafter if drafts else None,
            num_drafts=options.mtp if drafts else 0,
            mode=str(read_mode(options.mode)),
            max_num_seqs=options.max_seqs,
            max_num_batched_tokens=options.chunk_size,
            num_pages=pages_for(
                requests,
                max_num_seqs=options.max_seqs,
                page_size=options.page_size,
                context_length=self.model.config.context_length,
            ),
            page_size=options.page_size,
            cache_dtype=self.cache_dtype,
            graphs=options.uses_graphs,
            sampler=backend_parts.get("sampler", rejection_sample),
        )


def _requests(
    options: GenerateOptions, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> list[Request]:
    """Each with a name of its own, and with a seed of its own: one law is not one chance."""
    names: Counter[str] = Counter()
    requests = []
    for number, prompt in enumerate(prompts):
        names[prompt.name] += 1
        again = names[prompt.name]
        requests.append(
            Request(
                prompt.name if again == 1 else f"{prompt.name} #{again}",
                tokenizer.encode(prompt.model_text),
                max_new_tokens=options.tokens,
                sampling=replace(
                    options.sampling, seed=request_seed(options.sampling.seed, number)
                ),
                eos_id=tokenizer.eos_id,
            )
        )
    return requests
