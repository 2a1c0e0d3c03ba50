"""Train SmolLM2's indexers: `python -m mla_ref.training.indexer --help`.

The run that made the weights in this package:

    python -m mla_ref.training.indexer --device cuda --steps 1354 --windows 4 --length 2048 \
        --text TEXTS --out smollm2_indexer.safetensors

with TEXTS as `python -m mla_ref.training.texts` lays them out. With the defaults it is a short run
on a CPU, on Python's standard library, to see that it learns.
"""

import json
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from mla_ref.layers import preset
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.platform import resolve_device
from mla_ref.training.corpus import Corpus, standard_library, text_files
from mla_ref.training.distill import train_indexers


def train(
    out: Annotated[Path, typer.Option(help="Where the weights are written (safetensors).")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Files or folders of text. Default: Python's library.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Batches.")] = 20,
    windows: Annotated[int, typer.Option(help="Windows a batch.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens a window.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
    log: Annotated[Path | None, typer.Option(help="Write losses here, one JSON a line.")] = None,
) -> None:
    """Distil indexers from the attention of SmolLM2-135M."""
    where = resolve_device(device)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_gguf()
    corpus = Corpus.read(text_files(text) if text else standard_library(), tokenizer)
    model = SmolLM2.from_gguf(attention="gqa").to(where)
    config = preset("smollm2-packed")
    lines, start = [], perf_counter()

    def on_step(step: int, losses: object) -> None:
        lines.append({"step": step, "seconds": round(perf_counter() - start, 2), "loss": losses})
        if step % max(steps // 50, 1) == 0 or step == steps - 1:
            mean = sum(losses.values()) / len(losses)  # type: ignore[attr-defined, arg-type]
            typer.echo(f"step {step}: mean KL {mean:.4f}, {lines[-1]['seconds']} s")

    indexers = train_indexers(
        model,
        config,
        corpus,
        steps=steps,
        windows=windows,
        length=length,
        learning_rate=learning_rate,
        on_step=on_step,
    )
    tensors = {
        f"layers.{layer}.indexer.{name}": parameter.to(torch.bfloat16).cpu()
        for layer, indexer in indexers.items()
        for name, parameter in indexer.named_parameters()
    }
    save_file(tensors, out)
    if log:
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(train)
