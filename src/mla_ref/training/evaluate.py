"""Measure the choice of keys on held-out text: `python -m mla_ref.training.evaluate --help`.

`data/smollm2_indexer.json` holds its numbers for the indexers of this package.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from mla_ref.layers import preset
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_sparse import load_indexers
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.platform import resolve_device
from mla_ref.training.corpus import Corpus, text_files, windows_of
from mla_ref.training.quality import measure


def evaluate(
    weights: Annotated[Path | None, typer.Option(help="Default: those in this package.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER, whose held-out files count. Default: Emma's first pages."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    length: Annotated[int, typer.Option(help="Tokens a window.")] = 1024,
    windows: Annotated[int, typer.Option(help="Windows of each text at most.")] = 1,
    score_from: Annotated[int, typer.Option(help="First position that counts.")] = 512,
    topks: Annotated[str, typer.Option(help="Values of k, with commas.")] = "64,128,256,512",
    out: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
) -> None:
    """Recall, attention mass and perplexity of each choice of k keys, beside dense attention."""
    where = resolve_device(device)
    tokenizer = Tokenizer.from_gguf()
    model = SmolLM2.from_gguf(attention="gqa").to(where)
    found = load_indexers(preset("smollm2-packed"), weights)
    indexers = {layer: indexer.to(where) for layer, indexer in found.items()}
    ks = tuple(int(k) for k in topks.split(","))
    rows = []
    for name, tokens in _texts(text, tokenizer).items():
        batch = windows_of(tokens, length, windows).to(where)
        if not len(batch):
            raise ValueError(
                f"text {name!r} has {len(tokens)} held-out tokens, fewer than a window"
            )
        for quality in measure(model, indexers, batch, topks=ks, score_from=score_from):
            rows.append({"text": name, **asdict(quality)})
            typer.echo(
                f"{name:10} {quality.choice:8} k={quality.topk!s:5} ppl {quality.perplexity:8.3f}"
                f"  recall {quality.recall:.3f}  mass {quality.mass:.3f}"
            )
    if out:
        settings = {"length": length, "score_from": score_from, "torch": torch.__version__}
        if weights:
            settings["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        # JSON has no NaN: a file with one is refused by other readers, so none is written.
        text_of = json.dumps({**settings, "rows": rows}, indent=1, allow_nan=False)
        out.write_text(text_of + "\n")


def _texts(named: list[str] | None, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    texts = {"emma": torch.tensor(tokenizer.encode(passage()))}
    for item in named or []:
        name, _, folder = item.partition("=")
        texts[name] = Corpus.read(text_files([Path(folder)]), tokenizer).held_out
    return texts


if __name__ == "__main__":
    typer.run(evaluate)
