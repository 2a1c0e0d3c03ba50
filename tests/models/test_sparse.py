"""One layer's sparse attention over a step: against dense attention, and against itself."""

import dataclasses

import pytest
import torch
from tests.support import raw
from torch import Tensor

from mla_ref.backends import AttnSpec, Plan, TorchBackend
from mla_ref.batching import Step
from mla_ref.cache import bytes_per_token, unpack_fp8_rows
from mla_ref.layers import IndexerConfig, MLAConfig, RopeConfig, default_softmax_scale
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.mla_layer import MLALayer
from mla_ref.models.projections import attend_latent
from mla_ref.models.sparse import SparseCache, attend_sparse
from mla_ref.numerics import compare

HIDDEN, PAGE = 20, 4
ROUTES = ("decode", "extend")


def small_config(topk: int = 5, served: bool = False) -> MLAConfig:
    """Rows of 14 + 8 numbers; `served`: of 512 + 64, with index keys of 128, as FP8 asks for."""
    d_c, d_r, d_i = (512, 64, 128) if served else (14, 8, 16)
    return MLAConfig(
        name="small",
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=3,
        q_lora_rank=12,
        kv_lora_rank=d_c,
        qk_nope_head_dim=6,
        qk_rope_head_dim=d_r,
        v_head_dim=5,
        rope=RopeConfig(d_r, 100.0, interleaved=True),
        rms_norm_eps=1e-5,
        softmax_scale=default_softmax_scale(6, d_r, None),
        indexer=IndexerConfig(8, (0,), head_dim=d_i, topk=topk),
    )


def plan_for(config: MLAConfig, cache: SparseCache, dtype: torch.dtype, rows: int = 64) -> Plan:
    assert config.indexer is not None
    spec = AttnSpec(
        num_heads=config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        topk=config.indexer.topk,
        page_size=cache.kv.shape[1],
        cache_format="fp8" if cache.kv.dtype == torch.uint8 else "bf16",
        q_dtype=dtype,
    )
    device = torch.device("cpu")
    return TorchBackend().plan(spec, max_rows=rows, max_requests=8, device=device)


class Layer:
    """A layer with its cache and plan, and its steps: pages in a random order, poison elsewhere."""

    def __init__(
        self,
        config: MLAConfig,
        dtype: torch.dtype = torch.float64,
        cache_dtype: torch.dtype | None = None,
        pages: int = 40,
    ):
        self.attention = MLALayer.random(config, 1, dtype)
        self.indexer = IndexerLayer.random(config, 2, dtype)
        self.cache = SparseCache.new(config, 0, pages, PAGE, cache_dtype or dtype)
        poison = 0xFF if cache_dtype == torch.uint8 else torch.nan
        for part in (self.cache.kv, self.cache.index):
            assert part is not None
            part.fill_(poison)
        self.plan = plan_for(config, self.cache, dtype)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
        self.table = order[: pages - pages % 4].view(4, -1)

    def step(self, x: Tensor, done: list[int], new: list[int], **more: object):
        """One step of the first len(new) requests; x holds their new tokens."""
        padding = {n: more.pop(n) for n in ("num_reqs_padded", "num_tokens_padded") if n in more}
        step = Step.build(done, new, self.table[: len(new)], PAGE, **padding)
        arguments = {"route": "extend", "indexer": self.indexer, "cache": self.cache} | more
        indexer, cache = arguments.pop("indexer"), arguments.pop("cache")
        attend = getattr(self.plan, arguments.pop("route"))
        return raw(attend_sparse)(self.attention, indexer, x, cache, step, attend, **arguments)


def tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=dtype)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("route", ROUTES)
def test_a_list_of_all_keys_is_dense_attention(
    dtype: torch.dtype, limit: float, route: str
) -> None:
    """Rung 6. In one step, and in a second one behind it."""
    config = small_config(topk=30)
    layer, x = Layer(config, dtype), tokens(23, dtype)
    dense_cache = torch.full_like(layer.cache.kv, torch.nan)
    for done, new in ((0, 17), (17, 6)):
        rows = x[done : done + new]
        got, positions = layer.step(rows, [done], [new], route=route)
        step = Step.build([done], [new], layer.table[:1], PAGE)
        dense = attend_latent(layer.attention, rows, dense_cache, step, form="absorbed")
        found = compare(got, dense)
        assert found.agrees(rel_l2=limit), found
        for i, row in enumerate(positions.sort(dim=1).values.tolist()):
            seen = done + i + 1
            assert row == [-1] * (30 - seen) + list(range(seen))


def test_a_short_list_is_dense_attention_over_the_listed_keys_alone() -> None:
    """Rung 6 with a mask, from the cached rows: what is not listed has no part in the result."""
    config = small_config()
    layer, x = Layer(config), tokens(23)
    got, positions = layer.step(x, [0], [23])
    assert positions.shape == (23, 5) and positions.dtype == torch.int32
    slots = Step.build([0], [23], layer.table[:1], PAGE).slot_mapping
    rows = layer.cache.kv.flatten(0, 1)[slots]
    attention, steps = layer.attention, torch.arange(23)
    q_nope, q_pe = attention.queries(attention.query_latent(x), steps)
    for i, listed in enumerate(positions.tolist()):
        keys = rows[[p for p in listed if p >= 0]]
        heads = []
        for h in range(3):
            k_nope, v = keys[:, :14] @ attention.w_uk[h].T, keys[:, :14] @ attention.w_uv[h].T
            scores = k_nope @ q_nope[i, h] + keys[:, 14:] @ q_pe[i, h]
            heads.append((scores * config.softmax_scale).softmax(0) @ v)
        found = compare(got[i], attention.output(torch.stack(heads)[None])[0])
        assert found.agrees(rel_l2=1e-12), found
    full = Layer(small_config(topk=30)).step(x, [0], [23])[0]
    assert compare(got, full).rel_l2 > 0.05


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.uint8], ids=str)
def test_decode_equals_extend(cache_dtype: torch.dtype) -> None:
    config = small_config(served=True, topk=200)
    x = tokens(30, torch.float32)
    outs, lists = [], []
    for route in ROUTES:
        layer = Layer(config, torch.float32, cache_dtype)
        layer.plan = plan_for(config, layer.cache, torch.float32, rows=4)
        assert layer.plan.num_splits == 4
        parts = [layer.step(x[i : i + 3], [i], [3], route=route) for i in range(0, 30, 3)]
        outs.append(torch.cat([out for out, _ in parts]))
        lists.append(torch.cat([positions for _, positions in parts]))
    assert torch.equal(lists[0], lists[1])
    assert compare(outs[0], outs[1]).agrees(rel_l2=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_an_fp8_cache_gives_what_its_dequantised_rows_give(route: str) -> None:
    """Rung 7. The list is handed over, since index keys in FP8 may choose other keys."""
    config = small_config(served=True)
    x = tokens(19, torch.float32)
    packed = Layer(config, torch.float32, torch.uint8)
    packed.step(x[:18], [0], [18])
    got, positions = packed.step(x[18:], [18], [1], route=route)
    plain = Layer(config, torch.float32)
    plain.cache.kv.copy_(unpack_fp8_rows(packed.cache.kv))
    # Without its new row, which attend_sparse writes as it is: given here by its packed numbers.
    step = Step.build([18], [1], plain.table[:1], PAGE)
    exact = plain.cache.kv.flatten(0, 1)[step.slot_mapping].clone()
    plain.attention.kv_rows = lambda x, positions: exact  # type: ignore[method-assign]
    expected, _ = plain.step(x[18:], [18], [1], route=route, indexer=None, selected=positions)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("scale_rule", ["fp32", "pow2"])
def test_the_scale_rule_is_the_one_of_the_rows(scale_rule: str) -> None:
    layer = Layer(small_config(served=True), torch.float32, torch.uint8)
    layer.step(tokens(8, torch.float32), [0], [8], scale_rule=scale_rule)
    slots = Step.build([0], [8], layer.table[:1], PAGE).slot_mapping
    rows = layer.cache.kv.flatten(0, 1)[slots]
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert bool((torch.frexp(scales).mantissa == 0.5).all()) is (scale_rule == "pow2")


# --- lists of another layer


def test_B045_a_layer_without_an_indexer_takes_the_list_that_it_is_given() -> None:
    layer, x = Layer(small_config()), tokens(15)
    expected, positions = layer.step(x, [0], [15])
    other = Layer(small_config())
    cache = SparseCache(other.cache.kv, None)
    got, used = other.step(x, [0], [15], indexer=None, cache=cache, selected=positions)
    assert torch.equal(got, expected) and torch.equal(used, positions)
    reversed_list = positions.flip(1)
    got, _ = other.step(x, [0], [15], indexer=None, cache=cache, selected=reversed_list)
    assert compare(got, expected).agrees(rel_l2=1e-12)


def test_an_indexer_of_its_own_wins_over_a_given_list() -> None:
    layer, x = Layer(small_config()), tokens(15)
    expected, positions = layer.step(x, [0], [15])
    got, used = layer.step(x, [0], [15], selected=torch.zeros_like(positions))
    assert torch.equal(got, expected) and torch.equal(used, positions)


@pytest.mark.parametrize("without", ["list", "place", "rows"])
def test_B045_neither_an_indexer_nor_a_list_is_refused_and_nothing_written(without: str) -> None:
    layer, x = Layer(small_config()), tokens(15)
    more, message = {
        "list": ({"indexer": None}, "selected must hold an earlier layer's list"),
        "place": ({"cache": SparseCache(layer.cache.kv, None)}, "cache.index must be there"),
        "rows": (
            {"indexer": None, "selected": torch.zeros(14, 5, dtype=torch.int32)},
            "selected must have size 15",
        ),
    }[without]
    with pytest.raises(ValueError, match=message):
        layer.step(x, [0], [15], **more)
    assert layer.cache.kv.isnan().all()
    assert layer.cache.index is not None and layer.cache.index.isnan().all()


def test_a_shared_list_wider_than_the_plan_is_refused() -> None:
    layer, x = Layer(small_config()), tokens(2)
    wide = torch.full((2, 6), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="6 columns, but the plan is for topk 5"):
        layer.step(x, [0], [2], indexer=None, selected=wide)


def test_attend_must_be_callable() -> None:
    layer, step = Layer(small_config()), Step.one_request(0, 2, PAGE)
    with pytest.raises(TypeError, match="attend must be a plan's decode or extend, got 'extend'"):
        raw(attend_sparse)(layer.attention, layer.indexer, tokens(2), layer.cache, step, "extend")
    assert layer.cache.kv.isnan().all()


# --- batches


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cache_dtype", [torch.float64, torch.uint8], ids=str)
def test_verifier_rows_equal_one_token_steps(route: str, cache_dtype: torch.dtype) -> None:
    """Four new tokens of one request at once: each sees the ones before it and none behind."""
    served = cache_dtype == torch.uint8
    dtype = torch.float32 if served else torch.float64
    config, x = small_config(served=served), tokens(24, dtype)
    together, one_by_one = (Layer(config, dtype, cache_dtype) for _ in range(2))
    for layer in (together, one_by_one):
        layer.step(x[:20], [0], [20])
    got, positions = together.step(x[20:], [20], [4], route=route)
    steps = [one_by_one.step(x[i : i + 1], [i], [1], route=route) for i in range(20, 24)]
    assert torch.equal(positions, torch.cat([p for _, p in steps]))
    found = compare(got, torch.cat([out for out, _ in steps]))
    assert found.agrees(rel_l2=1e-6 if served else 1e-12), found
    # The last may look at the candidates before it, the first at none of them.
    assert positions[0].max() <= 20


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("new", [[9, 1, 4], [0, 3, 12], [1, 1, 1]], ids=str)
def test_B145_a_ragged_batch_equals_its_requests_alone(route: str, new: list[int]) -> None:
    """Positions are each request's own; so are the rows of the cache."""
    config, done = small_config(), [6, 0, 11]
    x = [tokens(d + n) for d, n in zip(done, new, strict=True)]
    batch = Layer(config)
    batch.step(torch.cat([r[:d] for r, d in zip(x, done, strict=True)]), [0, 0, 0], done)
    rows = [r[d:] for r, d in zip(x, done, strict=True)]
    got, positions = batch.step(torch.cat(rows), done, new, route=route)
    lists = positions.split(new)
    for request, part in enumerate(got.split(new)):
        alone = Layer(config)
        alone.table = batch.table[request : request + 1]
        alone.step(x[request][: done[request]], [0], [done[request]])
        expected, chosen = alone.step(rows[request], [done[request]], [new[request]], route=route)
        assert torch.equal(chosen, lists[request])
        assert compare(part, expected).agrees(rel_l2=1e-12)
        written = ~alone.cache.kv.isnan()
        assert int(written.sum()) == 22 * len(x[request])
        assert compare(batch.cache.kv[written], alone.cache.kv[written]).agrees(rel_l2=1e-12)


@pytest.mark.parametrize("route", ROUTES)
def test_padded_rows_change_nothing_and_are_written_nowhere(route: str) -> None:
    """Whatever they hold: the input of a padded row is NaN here."""
    config, done, new = small_config(), [6, 0], [4, 1]
    x = tokens(11)
    plain, padded = Layer(config), Layer(config)
    for layer in (plain, padded):
        layer.step(x[:6], [0], [6])
    expected, lists = plain.step(x[6:], done, new, route=route)
    filled = torch.cat([x[6:], torch.full((3, HIDDEN), torch.nan, dtype=x.dtype)])
    got, positions = padded.step(
        filled, done, new, route=route, num_reqs_padded=3, num_tokens_padded=8
    )
    assert torch.equal(positions[:5], lists) and bool((positions[5:] == -1).all())
    assert compare(got[:5], expected).agrees(rel_l2=1e-12)
    assert got.shape == (8, HIDDEN) and bool((got[5:] == 0).all())
    assert plain.cache.index is not None and padded.cache.index is not None
    assert compare(padded.cache.kv, plain.cache.kv).agrees(rel_l2=1e-12)
    assert compare(padded.cache.index, plain.cache.index).agrees(rel_l2=1e-12)


def test_B042_chunks_of_a_prompt_attend_to_what_the_whole_prompt_attends_to() -> None:
    config, x = small_config(topk=4), tokens(40)
    whole, lists = Layer(config).step(x, [0], [40])
    for cut in (1, 21, 36, 39):
        layer = Layer(config)
        parts = [layer.step(x[:cut], [0], [cut]), layer.step(x[cut:], [cut], [40 - cut])]
        assert torch.equal(torch.cat([p for _, p in parts]), lists)
        assert compare(torch.cat([out for out, _ in parts]), whole).agrees(rel_l2=1e-12)


# --- the state of a request


def test_the_cache_of_a_layer_costs_what_the_budget_says() -> None:
    config = small_config(served=True)
    caches = [SparseCache.new(config, layer, 3, PAGE, torch.uint8) for layer in range(2)]
    assert caches[1].index is None
    parts = [part for cache in caches for part in (cache.kv, cache.index) if part is not None]
    assert sum(part.nbytes for part in parts) == 12 * bytes_per_token(config)
    assert SparseCache.new(config, 0, 3, PAGE, torch.float16).kv.shape == (3, PAGE, 576)
    dense = dataclasses.replace(config, indexer=None)
    assert SparseCache.new(dense, 0, 3, PAGE, torch.uint8).index is None


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.uint8], ids=str)
def test_B046_a_prefix_is_restored_with_both_parts_of_its_state(cache_dtype: torch.dtype) -> None:
    """Rows alone are not a request's state: without its index keys the wrong rows are chosen."""
    config = small_config(served=True)
    x = tokens(30, torch.float32)
    first = Layer(config, torch.float32, cache_dtype)
    first.step(x[:29], [0], [29])
    expected, positions = first.step(x[29:], [29], [1], route="decode")
    assert first.cache.index is not None

    def resumed(*parts: str) -> tuple[Tensor, Tensor]:
        layer = Layer(config, torch.float32, cache_dtype)
        for part in ("kv", "index"):
            if part in parts:
                getattr(layer.cache, part).copy_(getattr(first.cache, part))
            else:
                getattr(layer.cache, part).zero_()
        return layer.step(x[29:], [29], [1], route="decode")

    both = resumed("kv", "index")
    assert torch.equal(both[0], expected) and torch.equal(both[1], positions)
    assert not torch.equal(resumed("kv")[1], positions)
    assert compare(resumed("kv")[0], expected).rel_l2 > 0.05
    assert compare(resumed("index")[0], expected).rel_l2 > 0.05
