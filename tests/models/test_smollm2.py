"""SmolLM2: against a forward pass written once more, with attention in all its forms and steps."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mla_ref.attention import causal_attention
from mla_ref.batching import Step
from mla_ref.layers import preset
from mla_ref.models.passage import passage
from mla_ref.models.projections import attend_latent
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_attention import attend_grouped
from mla_ref.models.smollm2_weights import SmolLM2Config, SmolLM2Weights
from mla_ref.models.tokenizer import Tokenizer
from mla_ref.numerics import compare, hadamard

VARIANTS = [
    ("gqa", None),
    ("split", "expanded"),
    ("split", "absorbed"),
    ("packed", "expanded"),
    ("packed", "absorbed"),
]
# 3 groups of 3 heads and a head of 12: no dimension is a power of two, so packing must pad.
CONFIG = SmolLM2Config(
    num_layers=3,
    hidden_size=40,
    num_heads=9,
    num_kv_heads=3,
    head_dim=12,
    intermediate_size=56,
    vocab_size=97,
    context_length=64,
)


def tokens(n: int, vocab: int = CONFIG.vocab_size) -> Tensor:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(3))


def run(model: SmolLM2, ids: Tensor, lengths: list[int], page_size: int = 8) -> Tensor:
    """Logits of one request that runs in steps of these lengths, in a cache full of NaN."""
    cache = model.new_cache(-(-len(ids) // page_size), page_size).fill_(torch.nan)
    logits, done = [], 0
    for length in lengths:
        step = Step.one_request(done, length, page_size)
        logits.append(model.logits(model.forward(ids[done : done + length], step, cache)))
        done += length
    return torch.cat(logits)


def slow_forward(weights: SmolLM2Weights, ids: Tensor) -> Tensor:
    """The model once more, one token and head at a time: rotation by complex numbers, no cache."""
    config, d = weights.config, weights.config.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / ((x @ x) / len(x) + config.rms_norm_eps).sqrt() * weight

    def rotate(x: Tensor, position: int) -> Tensor:
        pairs = torch.view_as_complex(x.view(-1, 2).contiguous())
        angles = position * config.rope_theta ** (-torch.arange(d // 2).double() * 2 / d)
        return torch.view_as_real(pairs * torch.polar(torch.ones(d // 2).double(), angles)).view(-1)

    xs = [weights.embedding[token] for token in ids]
    for layer in weights.layers:
        keys, values, new = [], [], []
        for position, x in enumerate(xs):
            h = norm(x, layer.attn_norm)
            keys.append([rotate(k, position) for k in (layer.attn_k @ h).split(d)])
            values.append((layer.attn_v @ h).split(d))
            heads = []
            for head, q in enumerate((layer.attn_q @ h).split(d)):
                group = head // (config.num_heads // config.num_kv_heads)
                q = rotate(q, position)
                scores = torch.stack([q @ k[group] for k in keys]) / d**0.5
                weighted = zip(scores.softmax(0), values, strict=True)
                heads.append(sum(weight * v[group] for weight, v in weighted))
            x = x + layer.attn_output @ torch.cat(heads)
            h = norm(x, layer.ffn_norm)
            gate = layer.ffn_gate @ h
            new.append(x + layer.ffn_down @ (gate / (1 + (-gate).exp()) * (layer.ffn_up @ h)))
        xs = new
    return torch.stack([weights.embedding @ norm(x, weights.output_norm) for x in xs])


@pytest.fixture(scope="module")
def weights() -> SmolLM2Weights:
    return SmolLM2Weights.random(CONFIG, 5, torch.float64)


@pytest.fixture(scope="module")
def expected(weights) -> Tensor:
    return slow_forward(weights, tokens(13))


@pytest.mark.parametrize("attention, form", VARIANTS)
@pytest.mark.parametrize("lengths", [[13], [1] * 13, [8, 5], [3, 1, 8, 1]], ids=str)
def test_every_form_and_every_chunking_is_the_slow_forward(
    weights, expected, attention, form, lengths
):
    model = SmolLM2(weights, attention=attention, form=form)
    result = compare(run(model, tokens(13), lengths), expected)
    assert result.agrees(rel_l2=1e-12), result


@pytest.mark.parametrize("attention, form", VARIANTS)
def test_a_batch_of_requests_in_scattered_pages(weights, expected, attention, form):
    """Two requests of one text, the second one a chunk behind, pages in disorder."""
    model, ids, page_size = SmolLM2(weights, attention=attention, form=form), tokens(13), 4
    table = torch.tensor([[6, 1, 7, 0], [3, 8, 2, 5]])
    cache = model.new_cache(9, page_size).fill_(torch.nan)
    first = Step.build([0, 0], [9, 2], table, page_size)
    second = Step.build([9, 2], [4, 11], table, page_size)
    a = model.forward(torch.cat([ids[:9], ids[:2]]), first, cache)
    b = model.forward(torch.cat([ids[9:], ids[2:]]), second, cache)
    for request in (torch.cat([a[:9], b[:4]]), torch.cat([a[9:], b[4:]])):
        result = compare(model.logits(request), expected)
        assert result.agrees(rel_l2=1e-12), result


def test_attention_inputs_are_those_of_the_forward(weights):
    """The input of layer 2 gives, through the rest of the model, the forward's own output."""
    model, ids = SmolLM2(weights), tokens(21)
    inputs = model.attention_inputs(ids.tolist(), (2, 0))
    assert sorted(inputs) == [0, 2]
    first = weights.embedding[ids]
    eps = CONFIG.rms_norm_eps
    scaled = first / (first.square().mean(-1, keepdim=True) + eps).sqrt()
    assert compare(inputs[0], scaled * weights.layers[0].attn_norm).agrees(rel_l2=1e-14)
    # The first two layers alone, and a last norm with the weights of layer 2's.
    cut = dataclasses.replace(
        weights,
        config=dataclasses.replace(CONFIG, num_layers=2),
        layers=weights.layers[:2],
        output_norm=weights.layers[2].attn_norm,
    )
    hidden = SmolLM2(cut).forward(ids, Step.one_request(0, 21, 8), SmolLM2(cut).new_cache(3, 8))
    assert compare(inputs[2], hidden).agrees(rel_l2=1e-12)


def views_agree(model: SmolLM2, layer: int, x: Tensor) -> None:
    """All views of a layer against rung 1 on its q, k and v, in float64 to 1e-12."""
    x, gqa = x.double(), model.gqa(layer).to(torch.float64)
    step = Step.one_request(0, len(x), 16)
    pages = step.block_table.shape[1]
    direct = causal_attention(*gqa.qkv(x, step.positions), softmax_scale=gqa.softmax_scale)
    expected = gqa.output(direct.out)
    grouped = torch.zeros(gqa.cache_shape(pages, 16), dtype=torch.float64)
    results = {"gqa": attend_grouped(gqa, x, grouped, step)}
    for view in (type(model.split(layer))(gqa), type(model.packed(layer))(gqa)):
        for form in ("expanded", "absorbed"):
            rows = torch.zeros(view.cache_shape(pages, 16), dtype=torch.float64)
            name = f"{type(view).__name__} {form}"
            results[name] = attend_latent(view, x, rows, step, form=form)
    for name, result in results.items():
        assert compare(result, expected).agrees(rel_l2=1e-12), (name, compare(result, expected))


def test_views_of_a_layer_agree(weights):
    views_agree(SmolLM2(weights), 1, torch.randn(21, CONFIG.hidden_size))


def test_rows_of_the_packed_form(weights):
    """Dense latents, a rotary key of zeros, and W_UK and W_UV that give keys and values back."""
    layer = SmolLM2(weights).packed(1)
    x, positions = torch.randn(5, CONFIG.hidden_size).double(), torch.arange(7, 12)
    rows = layer.kv_rows(x, positions)
    # 3 heads of 12 are 36 numbers, which a block of 64 holds.
    assert rows.shape == (5, 2 * 64 + 12)
    assert (rows[:, :128] != 0).all() and (rows[:, 128:] == 0).all()
    _, k, v = layer.gqa.qkv(x, positions)
    rebuilt_k = torch.einsum("hdc,sc->shd", layer.w_uk, rows[:, :128])
    rebuilt_v = torch.einsum("hdc,sc->shd", layer.w_uv, rows[:, :128])
    assert compare(rebuilt_k, k.repeat_interleave(3, dim=1)).agrees(max_abs=1e-13)
    assert compare(rebuilt_v, v.repeat_interleave(3, dim=1)).agrees(max_abs=1e-13)


def test_the_packed_form_has_the_served_geometry():
    config, served = SmolLM2Config(), preset("smollm2-packed")
    config = dataclasses.replace(
        config, num_layers=1, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64
    )
    layer = SmolLM2.random(config).packed(0)
    assert layer.cache_shape(2, 16) == (2, 16, served.kv_row_dim) == (2, 16, 576)
    assert layer.w_uk.shape == (served.num_heads, served.qk_nope_head_dim, served.kv_lora_rank)
    assert layer.w_uv.shape == (served.num_heads, served.v_head_dim, served.kv_lora_rank)
    assert layer.softmax_scale == served.softmax_scale


def test_hadamard_is_orthogonal(plain_calls):
    for size in (1, 2, 64):
        matrix = hadamard(size)
        assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-15)
        assert matrix.abs().max() == matrix.abs().min()
    with pytest.raises(ValueError, match="size must be a power of two, got 48"):
        hadamard(48)


def test_the_cache_may_store_bfloat16(weights, expected):
    model, ids = SmolLM2(weights), tokens(13)
    cache = model.new_cache(2, 8, torch.bfloat16)
    logits = model.logits(model.forward(ids, Step.one_request(0, 13, 8), cache))
    error = compare(logits, expected).rel_l2
    # bfloat16 has 8 significant bits: 0.2 % a row, and not a rounding error of float64.
    assert 1e-4 < error < 2e-2


def test_random_weights_depend_on_the_seed_alone():
    one, same, other = (SmolLM2.random(CONFIG, seed).weights for seed in (1, 1, 2))
    assert torch.equal(one.embedding, same.embedding)
    assert not torch.equal(one.embedding, other.embedding)
    assert SmolLM2.random(CONFIG, 1, dtype=torch.float64).dtype == torch.float64


def test_input_that_does_not_fit(weights, plain_calls):
    model = SmolLM2(weights)
    step, cache = Step.one_request(0, 4, 8), model.new_cache(1, 8)
    for wrong in (-1, 97):
        with pytest.raises(ValueError, match=rf"token_ids must lie in 0 \.\. 96, got .*{wrong}"):
            model.forward(torch.tensor([0, wrong, 1, 2]), step, cache)
    with pytest.raises(TypeError, match="token_ids must hold int32 or int64"):
        model.forward(torch.ones(4), step, cache)
    with pytest.raises(ValueError, match=r"token_ids must have size 4 .*tokens of the step"):
        model.forward(tokens(3), step, cache)
    with pytest.raises(ValueError, match=r"page_size 8 and for this attention"):
        model.forward(tokens(4), step, model.new_cache(1, 16))
    with pytest.raises(ValueError, match=r"such as \[3, 1, 8, 140\], got .*\[3, 2, 2, 8, 3, 12\]"):
        model.forward(tokens(4), step, model.with_attention("gqa").new_cache(2, 8))
    with pytest.raises(ValueError, match=r"positions must lie in 0 \.\. 63, got 60 \.\. 64"):
        model.forward(tokens(5), Step.one_request(60, 5, 8), model.new_cache(9, 8))
    with pytest.raises(ValueError, match=r"positions must lie in 0 \.\. 63, got -1 \.\. 0"):
        model.gqa(0).queries(torch.randn(2, 40).double(), torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="layer must be below 3, got 3"):
        model.packed(3)
    with pytest.raises(ValueError, match="layer must be at least 0, got -1"):
        model.attention_inputs([1, 2], [-1])
    with pytest.raises(ValueError, match="layers must name a layer"):
        model.attention_inputs([1, 2], [])


def test_a_choice_that_does_not_exist(weights, plain_calls):
    with pytest.raises(ValueError, match="attention must be one of gqa, split, packed, got 'mla'"):
        SmolLM2(weights, attention="mla")
    with pytest.raises(ValueError, match="form must be one of expanded, absorbed, got 'fast'"):
        SmolLM2(weights, form="fast")
    with pytest.raises(ValueError, match='form must be left out for attention "gqa"'):
        SmolLM2(weights, attention="gqa", form="absorbed")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_heads": 4}, "num_heads must be a multiple of num_kv_heads = 3, got 4"),
        ({"head_dim": 7}, "rope dim must be even"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be finite and greater than 0"),
    ],
)
def test_dimensions_that_cannot_be(wrong, message, plain_calls):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **wrong)


def test_a_gguf_file_gives_the_model_that_was_written(write_gguf):
    from_file = SmolLM2.from_gguf(write_gguf(seed=4))
    written = SmolLM2.random(from_file.config, 4)
    assert from_file.config == written.config
    assert from_file.config.num_kv_heads == 2 and from_file.config.rope_theta == 1e4
    ids = tokens(9, 264)
    assert torch.equal(run(from_file, ids, [9]), run(written, ids, [9]))
    assert SmolLM2.from_gguf(write_gguf(), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    "metadata, tensors, message",
    [
        ({"general.architecture": "qwen2"}, {}, "the architecture is 'qwen2', expected 'llama'"),
        ({"llama.block_count": None}, {}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, {}, r"has no tensor blk\.2\.attn_norm\.weight"),
        ({"llama.block_count": 1}, {}, r"tensor blk\.1\.attn_k\.weight has no place"),
        ({"llama.attention.head_count_kv": 4}, {}, r"attn_k\.weight has the shape \[32, 64\]"),
        ({"llama.rope.dimension_count": 8}, {}, "rope.dimension_count is 8, expected 16"),
        ({"llama.rope.scaling.type": "linear"}, {}, "rotary scaling is not known here"),
        ({}, {"blk.1.ffn_up.weight": None}, r"has no tensor blk\.1\.ffn_up\.weight"),
        ({}, {"output_norm.weight": torch.ones(63)}, r"shape \[63\], expected \[64\]"),
        ({}, {"blk.0.attn_q.bias": torch.ones(64)}, r"blk\.0\.attn_q\.bias has no place"),
        ({}, {"rope_freqs.weight": torch.ones(8)}, r"rope_freqs\.weight has no place"),
    ],
)
def test_a_gguf_file_of_another_model_is_refused(write_gguf, metadata, tensors, message):
    # As it is, other files of the llama family would run and be wrong.
    with pytest.raises(ValueError, match=rf"tiny\d\.gguf.*{message}"):
        SmolLM2.from_gguf(write_gguf(metadata=metadata, tensors=tensors))


@pytest.fixture(scope="module")
def real_ids() -> Tensor:
    return torch.tensor(Tokenizer.from_gguf().encode(passage()))


@pytest.mark.model
def test_views_agree_on_real_activations(smollm2, real_ids):
    inputs = smollm2.attention_inputs(real_ids[:64], (0, 7, 29))
    for layer, x in inputs.items():
        views_agree(smollm2, layer, x)


@pytest.mark.model
def test_the_real_model_in_all_forms(smollm2, real_ids):
    """Logits within 1e-4 in float32, as they reach 40; and a text that it finds likely."""
    ids = real_ids[:64]
    expected = run(smollm2, ids, [64], page_size=32)
    loss = torch.nn.functional.cross_entropy(expected[31:-1], ids[32:])
    assert loss < 3.5, loss
    for attention, form in VARIANTS[1:]:
        model = smollm2.with_attention(attention, form)
        result = compare(run(model, ids, [64], page_size=32), expected)
        assert result.agrees(max_abs=1e-4), (attention, form, result)
