"""Train SmolLM2's MTP module: `python -m mla_ref.training.mtp --help`.

The model stays as it is; the module learns to give its distribution of the tokens to come. With
the defaults it is a short run on a CPU, on Python's standard library, to see that it learns. What
made the weights in this package stands in `data/smollm2_mtp.json`.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_ref.checks import require_count
from mla_ref.layers import project
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.platform import resolve_device
from mla_ref.training.corpus import Corpus, standard_library, text_files
from mla_ref.training.distill import warm_up_and_fall
from mla_ref.training.trunk import run_trunk
from mla_ref.training.unroll import draft_loss, matches, unroll

# Of each pass's loss: a later guess counts only where the earlier ones were right.
PASS_WEIGHTS = (1.0, 0.7, 0.5)


def frequent_tokens(texts: list[Int[Tensor, "*n"]], number: int, vocab: int) -> Int[Tensor, " n"]:
    """The most frequent tokens of some texts, each text counting alike, rising.

    Raises:
        ValueError: `number` is less than 1 or more than the vocabulary.
    """
    if require_count("number", number, at_least=1) > vocab:
        raise ValueError(f"number must be at most the vocabulary of {vocab}, got {number}")
    share = torch.zeros(vocab, dtype=torch.float64)
    for text in texts:
        counts = torch.bincount(text.flatten().long(), minlength=vocab)
        share += counts / counts.sum().clamp(min=1)  # a text without a token has no say
    found = share.sort(descending=True, stable=True).indices[:number]
    return found.sort().values.to(torch.int32)


def train_mtp(
    model: SmolLM2,
    weights: MTPWeights,
    batches: Iterator[Int[Tensor, "b s"]],
    *,
    steps: int,
    learning_rate: float,
) -> Iterator[tuple[MTPWeights, list[float]]]:
    """Train the module's weights; yields them and each pass's loss after every step.

    Args:
        model: Frozen, on the device to train on, with attention "gqa".
        weights: To start from, on the same device.
        batches: Windows of text.
        steps: Batches to take.
        learning_rate: Highest of a schedule that warms up and falls as a cosine to a twentieth.
    """
    named = {
        name: tensor.clone().requires_grad_(name != "draft_tokens")
        for name, tensor in weights.named().items()
    }
    weights = MTPWeights.from_named(named)
    parameters = [tensor for tensor in named.values() if tensor.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: warm_up_and_fall(step, steps, max(steps // 30, 1))
    )
    module = MTPModule(model, weights)
    for _ in range(steps):
        tokens = next(batches)
        s = tokens.shape[1]
        with torch.no_grad():
            hidden = run_trunk(model, tokens)
            target = project(hidden, module.head)
        losses = []
        passes = unroll(model, weights, tokens, hidden, len(PASS_WEIGHTS))
        for number, state in enumerate(passes, start=1):
            logits = module.logits(state[:, : s - number])
            losses.append(draft_loss(logits, target[:, number:]))
        loss = sum((w * x for w, x in zip(PASS_WEIGHTS, losses, strict=True)), torch.zeros(()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        yield weights, [float(x.detach()) for x in losses]


@torch.no_grad()
def acceptance(
    model: SmolLM2, weights: MTPWeights, tokens: Int[Tensor, "b s"], first_anchor: int
) -> list[float]:
    """Acceptance by position on text that the model wrote greedily; see `matches`."""
    module = MTPModule(model, weights)
    states = unroll(model, weights, tokens, run_trunk(model, tokens), len(PASS_WEIGHTS))
    return matches([module.guess(state) for state in states], tokens, first_anchor).tolist()


def mixed_batches(
    corpus: Corpus, own: list[Int[Tensor, "n s"]], windows: int, length: int, device: torch.device
) -> Iterator[Int[Tensor, "windows length"]]:
    """Windows of real text and of the model's own in turn; the same on every run."""
    for step in count():
        if own and step % 2 == 0:
            text = own[(step // 2) % len(own)]
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(len(text), (windows,), generator=generator)
            yield text[rows, :length].long().to(device)
        else:
            yield corpus.batch(step, windows=windows, length=length).to(device)


def train(
    out: Annotated[Path, typer.Option(help="Where the weights are written (safetensors).")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Files or folders of text. Default: Python's library.")
    ] = None,
    own: Annotated[
        Path | None, typer.Option(help="The model's own text, from mla_ref.training.own_text.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Batches.")] = 20,
    windows: Annotated[int, typer.Option(help="Windows a batch.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens a window.")] = 64,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be guessed.")] = 8192,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 2e-3,
    log: Annotated[Path | None, typer.Option(help="Write losses here, one JSON a line.")] = None,
) -> None:
    """Train the MTP module on a frozen SmolLM2-135M."""
    for name, value in {"--steps": steps, "--windows": windows}.items():
        require_count(name, value, at_least=1)
    # The last pass needs an anchor, as many tokens behind it, and one that is guessed.
    require_count("--length", length, at_least=len(PASS_WEIGHTS) + 2)
    where = resolve_device(device)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_gguf()
    corpus = Corpus.read(text_files(text) if text else standard_library(), tokenizer)
    model = SmolLM2.from_gguf(attention="gqa").to(where)
    written = load_file(own) if own else {}
    own_train = [tokens for name, tokens in written.items() if name.startswith("train.")]
    frequent = frequent_tokens([corpus.train, *own_train], draft_vocab, model.config.vocab_size)
    batches = mixed_batches(corpus, own_train, windows, length, where)
    lines: list[dict[str, object]] = []
    start = perf_counter()
    weights = MTPWeights.random(model.config, frequent).to(device=where)
    training = train_mtp(model, weights, batches, steps=steps, learning_rate=learning_rate)
    for step, (trained, losses) in enumerate(training):
        weights = trained
        seconds = round(perf_counter() - start, 2)
        lines.append({"step": step, "seconds": seconds, "loss": losses})
        if step % max(steps // 50, 1) == 0 or step == steps - 1:
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            typer.echo(f"step {step}: KL by pass {shown}, {seconds} s")
    tensors = {
        name: (tensor if name == "draft_tokens" else tensor.detach().to(torch.bfloat16)).cpu()
        for name, tensor in weights.named().items()
    }
    save_file(tensors, out)
    rounded = MTPWeights.read(model.config, out).to(device=where)
    # Where the real beginning is behind an anchor, the text is the model's own.
    first = max(int(written.get("prompt_tokens", torch.tensor(0))), length // 4)
    for name, tokens in written.items():
        if name.startswith("held_out."):
            rates = acceptance(model, rounded, tokens[:64].long().to(where), first)
            shown = " ".join(f"{rate:.3f}" for rate in rates)
            typer.echo(f"{name}: accepted by position {shown}, length {1 + sum(rates):.3f}")
            lines.append({"held_out": name, "accepted": rates})
    if log:
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(train)
