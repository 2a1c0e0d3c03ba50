"""SmolLM2 against transformers' Llama, both from the same GGUF file, on real text.

The peer reads the file with its own dequantiser's order of things: it undoes the permutation of q
and k that the file holds and turns half-split pairs, where ours turns interleaved ones.
"""

from typing import Any

import pytest
import torch

from mla_ref.batching import Step
from mla_ref.engine.generate import generate
from mla_ref.models.gguf_file import default_gguf
from mla_ref.models.passage import passage
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import compare

pytestmark = [
    pytest.mark.model,
    pytest.mark.peers,
    pytest.mark.slow,
    # The shape checks run in the model's own tests; here they would only cost time.
    pytest.mark.usefixtures("plain_calls"),
]

PROMPT, NEW, PAGE_SIZE = 192, 64, 64


@pytest.fixture(scope="module")
def peer() -> Any:
    """Llama in float32; its attention written out, so that no fused kernel stands between."""
    import transformers

    path = default_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def ours() -> SmolLM2:
    return SmolLM2.from_gguf()


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return torch.tensor(Tokenizer.from_gguf().encode(passage())[:PROMPT])


@pytest.fixture(scope="module")
def peer_logits(peer: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return peer(input_ids=token_ids[None]).logits[0]


@pytest.mark.parametrize("attention, form", [("gqa", None), ("packed", "absorbed")])
def test_logits_are_those_of_the_peer(ours, token_ids, peer_logits, attention, form):
    model = ours.with_attention(attention, form)
    step = Step.one_request(0, PROMPT, PAGE_SIZE)
    cache = model.new_cache(step.block_table.shape[1], PAGE_SIZE)
    logits = model.logits(model.forward(token_ids, step, cache))
    # Logits vary by about 7.
    comparison = compare(logits, peer_logits)
    assert comparison.agrees(max_abs=1e-3), str(comparison)


def test_cached_decoding_chooses_the_tokens_of_the_peer(ours, peer, token_ids):
    """One pass of the peer over our tokens checks all of its choices at once.

    A text is the peer's greedy continuation exactly if each token of it is the peer's first choice
    after those before it.
    """
    prompt = token_ids[:64]
    tokens = generate(ours, prompt.tolist(), max_new_tokens=NEW, chunk_size=48)
    ours_ids = torch.tensor(list(tokens))
    assert ours_ids.shape == (NEW,)
    with torch.no_grad():
        context = torch.cat([prompt, ours_ids[:-1]])
        logits = peer(input_ids=context[None]).logits[0, -NEW:]
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    differs = (best.indices[:, 0] != ours_ids).nonzero().flatten().tolist()
    assert not differs, (
        f"token {differs[0]} is {ours_ids[differs[0]]}, the peer's {best.indices[differs[0], 0]}; "
        f"its two best logits lie {gaps[differs[0]]:.2e} apart (a near tie below about 1e-3)"
    )
    # Not one text on which any model would agree: the choices were close now and then.
    assert gaps.min() < 1 and ours_ids.unique().numel() > NEW // 4
