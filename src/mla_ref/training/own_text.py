"""Text that the model writes itself: `python -m mla_ref.training.own_text --help`.

A drafter is asked to guess the model's own next tokens, and what a model writes differs from what
it reads: it repeats itself, it chooses the likely word. So half of what the MTP module learns from
is written by the model, greedily or sampled, going on from pieces of real text or as a chat whose
question the model made up too (the idea of Magpie, arXiv:2406.08464).

Windows of one length run side by side, each with its keys and values in one tensor: no pages.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor

from mla_ref.engine.prompts import ANSWER, QUESTION
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.platform import resolve_device
from mla_ref.training.corpus import Corpus, random_windows, text_files

# A row's temperature, in turn: half of all rows are greedy, as most users of a small model are.
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)
QUESTION_TOKENS = 40


@torch.inference_mode()
def continue_windows(
    model: SmolLM2,
    token_ids: Int[Tensor, "b s"],
    new_tokens: int,
    temperature: Float[Tensor, " b"],
    seed: int = 0,
) -> Int[Tensor, "b s_and_new"]:
    """Let the model go on with many windows at once.

    Args:
        model: On any device.
        token_ids: One window a row.
        new_tokens: Tokens to add to each.
        temperature: Of each row; 0 takes the likeliest token.
        seed: Of the draws.

    Raises:
        ValueError: The windows and the new tokens are longer than the model's context, or a
            temperature is negative or not finite.
    """
    if not bool((temperature.isfinite() & (temperature >= 0)).all()):
        raise ValueError(
            f"temperature must be finite and at least 0 in each row, got {temperature.tolist()}"
        )
    total, context = token_ids.shape[1] + new_tokens, model.config.context_length
    if total > context:
        raise ValueError(
            f"token_ids and new_tokens must fit into the model's context of {context}, got "
            f"{token_ids.shape[1]} + {new_tokens}"
        )
    device = model.weights.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    config, (b, s) = model.config, token_ids.shape
    shape = (config.num_layers, 2, b, config.num_kv_heads, s + new_tokens, config.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype, device=device)
    greedy = temperature.to(device) == 0
    tau = torch.where(greedy, 1.0, temperature.to(device))[:, None]  # a greedy row draws in vain
    text = token_ids.to(device)
    hidden = _run(model, text, 0, cache)
    for _ in range(new_tokens):
        logits = model.logits(hidden[:, -1])
        noise = torch.empty_like(logits).exponential_(generator=generator)
        sampled = (torch.softmax(logits / tau, dim=-1) / noise).argmax(dim=-1)
        new = torch.where(greedy, logits.argmax(dim=-1), sampled)[:, None]
        text = torch.cat([text, new], dim=1)
        hidden = _run(model, new, text.shape[1] - 1, cache)
    return text


def _run(
    model: SmolLM2, token_ids: Int[Tensor, "b s"], first: int, cache: Tensor
) -> Float[Tensor, "b s hidden"]:
    """Positions first, first + 1, ... of all windows; their keys and values go into the cache."""
    b, s = token_ids.shape
    x = model.weights.embedding[token_ids]
    positions = torch.arange(first, first + s, device=x.device).repeat(b)
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        qkv = layer.gqa.qkv(layer.attention_input(x).flatten(0, 1), positions)
        q, k, v = (t.unflatten(0, (b, s)).transpose(1, 2) for t in qkv)
        keys[:, :, first : first + s], values[:, :, first : first + s] = k, v
        out = _attend(
            q, keys[:, :, : first + s], values[:, :, : first + s], layer.gqa.softmax_scale
        )
        x = x + layer.gqa.output(out.transpose(1, 2).flatten(0, 1)).unflatten(0, (b, s))
        x = layer.feed_forward(x)
    return model.last_norm(x)


def _attend(
    q: Float[Tensor, "b h_q s d"],
    k: Float[Tensor, "b h_kv t d"],
    v: Float[Tensor, "b h_kv t d"],
    softmax_scale: float,
) -> Float[Tensor, "b h_q s d"]:
    """Causal attention; the heads of a group become rows, so that k and v are read once."""
    s, t = q.shape[2], k.shape[2]
    rows = (q * softmax_scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = rows @ k.transpose(2, 3)
    if s > 1:
        hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)
        scores = scores.unflatten(2, (-1, s)).masked_fill(hidden, -torch.inf).flatten(2, 3)
    out = torch.softmax(scores, dim=-1) @ v
    return out.unflatten(2, (-1, s)).flatten(1, 2)


def chat_windows(
    model: SmolLM2, tokenizer: Tokenizer, windows: int, new_tokens: int, seed: int
) -> Int[Tensor, "windows length"]:
    """Chats: the model makes a question up at temperature 1 and answers it."""
    opening = torch.tensor([tokenizer.encode(QUESTION)]).repeat(windows, 1)
    question = continue_windows(model, opening, QUESTION_TOKENS, torch.ones(windows), seed)
    turn = torch.tensor([tokenizer.encode(ANSWER)])
    prompt = torch.cat([question.cpu(), turn.repeat(windows, 1)], dim=1)
    return continue_windows(model, prompt, new_tokens, temperatures(windows), seed + 1)


def temperatures(windows: int) -> Float[Tensor, " windows"]:
    """`TEMPERATURES` in turn."""
    return torch.tensor(TEMPERATURES).repeat(windows // len(TEMPERATURES) + 1)[:windows]


def own_text(
    out: Annotated[Path, typer.Option(help="Where the tokens are written (safetensors).")],
    text: Annotated[list[Path], typer.Option(help="A folder of text to go on with; repeat.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    batches: Annotated[int, typer.Option(help="Batches a folder, and of chats.")] = 1,
    windows: Annotated[int, typer.Option(help="Windows a batch.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a window that are real text.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the model adds.")] = 64,
) -> None:
    """Let SmolLM2-135M write what its drafter will learn from."""
    where = resolve_device(device)
    tokenizer = Tokenizer.from_gguf()
    model = SmolLM2.from_gguf(attention="gqa").to(where)
    named: dict[str, list[Tensor]] = {}

    def keep(name: str, written: Tensor) -> None:
        named.setdefault(name, []).append(written.cpu())
        tensors = {name: torch.cat(parts).to(torch.uint16) for name, parts in named.items()}
        tensors["prompt_tokens"] = torch.tensor(prompt, dtype=torch.int32)
        save_file(tensors, out)  # each time: a run that is cut short leaves what it has
        typer.echo(f"{name}: {tensors[name].numel():,} tokens")

    if "chat" in [folder.name for folder in text]:
        raise ValueError("--text must name no folder `chat`: the model's chats are called so")
    for folder in text:
        corpus = Corpus.read(text_files([folder]), tokenizer)
        for batch in range(batches):
            source = random_windows(corpus.train, 10_000 + batch, windows=windows, length=prompt)
            written = continue_windows(model, source, new_tokens, temperatures(windows), batch)
            keep(f"train.{folder.name}", written)
        if len(corpus.held_out) >= prompt:
            rows = max(windows // 4, 1)
            source = random_windows(corpus.held_out, 10_000, windows=rows, length=prompt)
            written = continue_windows(model, source, new_tokens, torch.zeros(rows))
            keep(f"held_out.{folder.name}", written)
    for batch in range(batches):
        seed = 20_000 + 2 * batch
        keep("train.chat", chat_windows(model, tokenizer, windows, new_tokens, seed))


if __name__ == "__main__":
    typer.run(own_text)
