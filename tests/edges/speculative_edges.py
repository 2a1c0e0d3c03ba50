"""Drafts, their verification, and the engine around them, each right by its rule.

The rules are written again here, row by row in float64 and token by token. An engine must give the
tokens of plain decoding whatever its sizes, so its edge runs a small model to the end.
"""

import itertools
import math
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from numpy.random import Philox
from tests.edges.batching_edges import need, need_counts, numbers
from tests.edges.edge import Arguments, Draw, Edge, floats, small, some
from tests.edges.sparse_edges import ints
from torch import Tensor

from mla_ref import engine, speculative
from mla_ref.batching import Step
from mla_ref.layers import rms_norm
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_weights import SmolLM2Config
from mla_ref.training.unroll import unroll

VOCAB = 5
SMALLEST_NORMAL = 2.0**-126  # of float32


def ids(draw: Draw, most: int = 4, below: int = VOCAB) -> list[int]:
    return draw(st.lists(st.integers(0, below - 1), max_size=most))


def is_seed(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def is_ids(value: Any, below: float = math.inf) -> bool:
    found = isinstance(value, (list, tuple))
    return found and all(type(i) is int and 0 <= i < below for i in value)


# --- the law of a token


def sampling(draw: Draw) -> Arguments:
    return {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 3])),
        "top_k": draw(st.sampled_from([None, 1, 2, 9])),
        "top_p": draw(st.sampled_from([1.0, 0.55, 1])),
        "seed": draw(st.integers(-9, 9)),
    }


def sampling_right(a: Arguments) -> Tensor:
    for name in ("temperature", "top_p"):
        need(type(a[name]) in (int, float))
    t, k = a["temperature"], a["top_k"]
    need(t == 0 or SMALLEST_NORMAL <= t <= torch.finfo(torch.float32).max)
    need(0 < a["top_p"] <= 1 and is_seed(a["seed"]))
    if k is not None:
        need_counts(k, at_least=1)
    return numbers([k, a["seed"]]).double() + 1e3 * float(t) + float(a["top_p"])


def sampling_numbers(**a: Any) -> Tensor:
    p = speculative.SamplingParams(**a)
    need(p.is_greedy == (p.temperature == 0))
    return numbers([p.top_k, p.seed]).double() + 1e3 * p.temperature + p.top_p


def law(logits: Tensor, p: speculative.SamplingParams) -> Tensor:
    """Of one row: temperature, then top-k, then top-p, the lower id first among equals."""
    x = logits.tolist()
    need(all(v < math.inf for v in x) and max(x) > -math.inf)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return torch.eye(len(x), dtype=torch.float64)[order[0]]
    kept = order[: p.top_k]
    weights = {i: math.exp((x[i] - max(x)) / p.temperature) for i in kept}
    total, before, passed = sum(weights.values()), 0.0, []
    for i in kept:
        if p.top_p >= 1 or before < p.top_p:
            passed.append(i)
        before += weights[i] / total
    result = torch.zeros(len(x), dtype=torch.float64)
    for i in passed:
        result[i] = weights[i] / sum(weights[j] for j in passed)
    return result


def all_params(a: Any, count: int) -> None:
    need(isinstance(a, (list, tuple)) and len(a) == count)
    need(all(isinstance(p, speculative.SamplingParams) for p in a))


def probs_arguments(draw: Draw) -> Arguments:
    rows = draw(some)
    params = [speculative.SamplingParams(**sampling(draw)) for _ in range(rows)]
    return {"logits": floats(draw, rows, VOCAB), "params": params}


def probs_right(a: Arguments) -> Tensor:
    all_params(a["params"], len(a["logits"]))
    need(a["logits"].is_floating_point())
    rows = [law(row.double(), p) for row, p in zip(a["logits"], a["params"], strict=True)]
    return torch.stack(rows)


# --- the rule of rejection

STARTS = torch.tensor([0, 3, 3, 4, 6])  # four requests, the second without rows; row 6 is nobody's
ROWS = 7


def judged(p: Tensor, q: Tensor | None, draft: int, u: float, e: Tensor) -> tuple[bool, int]:
    """Whether one draft stands, and the token of its row."""
    if draft >= 0:
        q_x = 1.0 if q is None else float(q[draft])
        if q_x > 0 and float(p[draft]) / q_x >= u:
            return True, draft
        rest = p.clone()
        if q is None:
            rest[draft] = 0
        else:
            rest = (p - q).clamp(min=0)
        p = rest if (rest > 0).any() else p
    ratios = [float(w) / float(x) if w > 0 else -1.0 for w, x in zip(p, e, strict=True)]
    return False, ratios.index(max(ratios))


def walked(rows: list[tuple[bool, int]]) -> tuple[list[int], int]:
    """The tokens of one request, and how many of them are drafts."""
    accepted = next((i for i, (stands, _) in enumerate(rows) if not stands), len(rows))
    return [token for _, token in rows[: accepted + 1]], accepted


def rejection_arguments(draw: Draw) -> Arguments:
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    q = torch.softmax(floats(draw, ROWS, VOCAB, dtype=dtype), dim=1)
    return {
        "target_probs": torch.softmax(floats(draw, ROWS, VOCAB, dtype=dtype), dim=1),
        "draft_ids": ints(draw, -1, VOCAB + 1, ROWS),
        "draft_probs": draw(st.sampled_from([None, q])),
        "uniform": floats(draw, ROWS, dtype=torch.float64).sigmoid(),
        # Not exp(x): p of the same seed would be as large, and all quotients equal.
        "exponential": (2 * floats(draw, ROWS, VOCAB, dtype=dtype)).exp(),
        "max_drafts": draw(some),
    }


def rejection_right(a: Arguments) -> tuple[Tensor, ...]:
    need_counts(a["max_drafts"])
    need(a["uniform"].dtype == torch.float64)
    need(all(x.shape[0] == ROWS for x in a.values() if isinstance(x, Tensor)))
    columns = a["max_drafts"] + 1
    tokens, counts = torch.full((len(STARTS) - 1, columns), -1), []
    for request, (first, end) in enumerate(itertools.pairwise(STARTS.tolist())):
        rows = []
        for row in range(first, min(end, first + columns)):
            draft = int(a["draft_ids"][row])
            if row == end - 1 or row == first + columns - 1 or not 0 <= draft < VOCAB:
                draft = -1
            q = None if a["draft_probs"] is None else a["draft_probs"][row]
            u, e = float(a["uniform"][row]), a["exponential"][row]
            rows.append(judged(a["target_probs"][row], q, draft, u, e))
        written, accepted = walked(rows)
        tokens[request, : len(written)] = torch.tensor(written, dtype=torch.int64)
        counts.append(accepted)
    return tokens, torch.tensor(counts)


def noise_right(a: Arguments) -> tuple[Tensor, ...]:
    need(is_seed(a["seed"]))
    need_counts(a["position"], a["vocab"])
    key = (a["seed"] % 2**64) | (a["position"] << 64)
    words = [int(w) for w in Philox(key=key).random_raw(1 + a["vocab"])]
    exponential = [-math.log(((w >> 12) + 0.5) / 2**52) for w in words[1:]]
    uniform = torch.tensor(((words[0] >> 11) + 1) / 2**53, dtype=torch.float64)
    return uniform, torch.tensor(exponential, dtype=torch.float64).float()


def noise_numbers(**a: Any) -> tuple[Tensor, ...]:
    noise = speculative.position_noise(**a)
    return torch.tensor(noise.uniform, dtype=torch.float64), noise.exponential


def verify_arguments(draw: Draw) -> Arguments:
    drafts = [ids(draw, 3) for _ in range(draw(some))]
    return {
        "logits": floats(draw, sum(1 + len(d) for d in drafts), VOCAB),
        "draft_ids": drafts,
        "params": [speculative.SamplingParams(**sampling(draw)) for _ in drafts],
        "positions": [draw(small) for _ in drafts],
    }


def verify_numbers(**a: Any) -> Tensor:
    found = speculative.verify(**a)
    return numbers(*found.token_ids, found.num_accepted)


def verify_right(a: Arguments) -> Tensor:
    logits, drafts, positions = a["logits"], a["draft_ids"], a["positions"]
    need(isinstance(drafts, list) and all(is_ids(d, logits.shape[1]) for d in drafts))
    all_params(a["params"], len(drafts))
    need(isinstance(positions, list) and len(positions) == len(drafts))
    need_counts(*positions)
    need(len(logits) == sum(1 + len(d) for d in drafts))
    tokens, counts, row = [], [], 0
    for own, params, position in zip(drafts, a["params"], positions, strict=True):
        rows = []
        for i, draft in enumerate((*own, -1)):
            noise = speculative.position_noise(params.seed, position + i, logits.shape[1])
            p = law(logits[row].double(), params)
            rows.append(judged(p, None, draft, noise.uniform, noise.exponential))
            row += 1
        written, accepted = walked(rows)
        tokens.append(written)
        counts.append(accepted)
    return numbers(*tokens, counts)


# --- drafters


def ngram_arguments(draw: Draw) -> Arguments:
    shortest = draw(st.integers(1, 2))
    return {
        "token_ids": ids(draw, 9, below=2),
        "num_drafts": draw(small),
        "max_ngram": shortest + draw(st.integers(0, 2)),
        "min_ngram": shortest,
    }


def ngram_right(a: Arguments) -> Tensor:
    text, n = a["token_ids"], a["num_drafts"]
    need_counts(n)
    need_counts(a["max_ngram"], a["min_ngram"], at_least=1)
    need(a["min_ngram"] <= a["max_ngram"])
    need(isinstance(text, list))
    if n == 0:
        return numbers([])
    need(all(isinstance(i, int) and abs(i) < 2**63 for i in text))
    for size in range(min(a["max_ngram"], len(text) - 1), a["min_ngram"] - 1, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                return numbers(text[end : end + n])
    return numbers([])


def stats_numbers(drafted: int, accepted: int) -> Tensor:
    stats = speculative.AcceptanceStats()
    stats.add(2, 1)
    stats.add(drafted, accepted)
    return numbers(stats.num_drafts, stats.num_drafted, stats.num_accepted, list(stats.histogram))


def stats_right(a: Arguments) -> Tensor:
    drafted, accepted = a["drafted"], a["accepted"]
    need_counts(drafted, accepted)
    need(accepted <= drafted)
    histogram = [0] * (max(drafted, 2) + 1)
    histogram[1] += 1
    histogram[accepted] += drafted > 0
    return numbers(1 + (drafted > 0), 2 + drafted, 1 + accepted, histogram)


def draft_request_arguments(draw: Draw) -> Arguments:
    computed = draw(some)
    return {
        "token_ids": [1] * (computed + 1),
        "num_drafts": draw(small),
        "computed_len": computed,
        "first_row": draw(small),
        "num_rows": draw(st.integers(1, computed)),
        "block_table_row": draw(small),
    }


def draft_request_numbers(**a: Any) -> Tensor:
    request = speculative.DraftRequest(**a)
    return numbers(len(request.token_ids), *(getattr(request, name) for name in list(a)[1:]))


def draft_request_right(a: Arguments) -> Tensor:
    text, *rest = a.values()
    need(isinstance(text, list))  # its tokens are the drafter's to look at
    need_counts(*rest)
    drafts, computed, _, rows, _ = rest
    need(rows <= computed < len(text) and (not drafts or (rows and computed == len(text) - 1)))
    return numbers(len(text), *rest)


# --- the MTP module

CONFIG = SmolLM2Config(num_layers=2, vocab_size=30, context_length=64)
DRAFT_TOKENS = torch.arange(0, 30, 3)


@cache
def model() -> SmolLM2:
    return SmolLM2.random(CONFIG, 5, attention="gqa", dtype=torch.float64)


@cache
def module() -> MTPModule:
    return MTPModule(model(), MTPWeights.random(CONFIG, DRAFT_TOKENS).to(dtype=torch.float64))


def mtp_forward(next_ids: Tensor, hidden: Tensor) -> Tensor:
    cache = module().new_cache(1, 4)
    return module().forward(next_ids, hidden, Step.one_request(0, 3, 4), cache)


def mtp_forward_right(a: Arguments) -> Tensor:
    """By the passes of the training, over one window without pages."""
    next_ids, hidden = a["next_ids"], a["hidden"]
    need(next_ids.shape == (3,) and hidden.shape == (3, CONFIG.hidden_size))
    need(bool(((next_ids >= 0) & (next_ids < CONFIG.vocab_size)).all()))
    window = torch.cat([next_ids.new_zeros(1), next_ids]).long()[None]
    states = torch.cat([hidden, hidden[:1]])[None]
    return next(unroll(model(), module().weights, window, states, 1))[0, :3]


def mtp_guess_right(a: Arguments) -> Tensor:
    hidden = a["hidden"]
    need(hidden.dtype == torch.float64 and hidden.shape[-1:] == (CONFIG.hidden_size,))
    normed = rms_norm(hidden, module().weights.head_norm, eps=CONFIG.rms_norm_eps)
    scores = (normed @ model().weights.embedding.T).reshape(-1, CONFIG.vocab_size).tolist()
    best = [max(DRAFT_TOKENS.tolist(), key=row.__getitem__) for row in scores]
    return torch.tensor(best).reshape(hidden.shape[:-1])


def mtp_hidden(draw: Draw) -> Tensor:
    return floats(draw, 3, CONFIG.hidden_size, dtype=torch.float64)


def need_tokens(tokens: Tensor) -> slice:
    """All of them, if a head can be made of them."""
    need(tokens.ndim == 1 and tokens.dtype in (torch.int32, torch.int64) and len(tokens) > 0)
    need(bool(((tokens >= 0) & (tokens < CONFIG.vocab_size)).all()))
    return slice(None)


# --- the engine


def request_arguments(draw: Draw) -> Arguments:
    return {
        "request_id": "r",
        "prompt_ids": [1, *ids(draw)],
        "max_new_tokens": draw(some),
        "eos_id": draw(st.sampled_from([None, 3])),
        "stop_ids": ids(draw),
    }


def request_numbers(**a: Any) -> Tensor:
    request = engine.Request(**a)
    return numbers(request.prompt_ids, request.max_new_tokens, request.eos_id, request.stop_ids)


def request_right(a: Arguments) -> Tensor:
    need(isinstance(a["request_id"], str))
    need(is_ids(a["prompt_ids"], 2**63) and is_ids(a["stop_ids"], 2**63))
    need(len(a["prompt_ids"]) > 0)
    need_counts(a["max_new_tokens"], at_least=1)
    if a["eos_id"] is not None:
        need_counts(a["eos_id"])
    return numbers(a["prompt_ids"], a["max_new_tokens"], a["eos_id"], a["stop_ids"])


def seed_right(a: Arguments) -> Tensor:
    """No rule but this: equal pairs have equal seeds, and neighbours have others."""
    need(is_seed(a["seed"]))
    need_counts(a["number"])
    others = [engine.request_seed(a["seed"], a["number"] + 1), engine.request_seed(7, 10**6)]
    found = engine.request_seed(a["seed"], a["number"])
    need(found not in others and is_seed(found))
    return torch.tensor([found])


def blocks_numbers(num_pages: int, page_size: int, num_tokens: int) -> Tensor:
    blocks, pages = engine.BlockManager(num_pages, page_size), []
    done = blocks.allocate(pages, num_tokens)
    return numbers(done, sorted(pages), blocks.num_free)


def blocks_right(a: Arguments) -> Tensor:
    need_counts(a["num_pages"], a["num_tokens"])
    need_counts(a["page_size"], at_least=1)
    wanted = math.ceil(a["num_tokens"] / a["page_size"])
    given = wanted if wanted <= a["num_pages"] else 0
    return numbers(wanted == given, list(range(given)), a["num_pages"] - given)


REQUESTS = [engine.Request(str(n), [n + 1] * n, 3) for n in (1, 2, 5)]  # 3, 4 and 7 rows


def pages_right(a: Arguments) -> Tensor:
    need_counts(*a.values(), at_least=1)
    lens = [min(rows, a["context_length"]) for rows in (3, 4, 7)]
    pages = sorted((math.ceil(rows / a["page_size"]) for rows in lens), reverse=True)
    return numbers(max(sum(pages[: a["max_num_seqs"]]), a["max_num_seqs"]))


def engine_arguments(draw: Draw) -> Arguments:
    pad_to = draw(st.integers(1, 2))
    size = draw(some)
    return {
        "num_drafts": draw(st.integers(0, 3)),
        "max_num_seqs": draw(some),
        "max_num_batched_tokens": pad_to * draw(st.integers(4, 9)),
        "max_chunk": draw(st.sampled_from([None, 1, 3])),
        "num_pages": draw(st.sampled_from([None, math.ceil(7 / size) + 1])),
        "page_size": size,
        "pad_to": pad_to,
        "drafter": speculative.NgramDrafter(3),
    }


def said(token_id: int, position: int) -> int:
    """What the model below says: some ids in turn, so that drafts are right and wrong."""
    return (token_id + position % 2) % 4


class Saying:
    """A model of one line, since an edge of the engine is no place for attention."""

    config = SmolLM2Config(vocab_size=VOCAB + 4, context_length=12)
    device = torch.device("cpu")
    captures = False

    def new_cache(self, num_pages: int, page_size: int, dtype: Any = None, **rest: Any) -> Tensor:
        return torch.zeros(0)

    def route(self, step: Step, cache: Tensor, *, per_request: bool = False) -> None:
        return None

    def forward(self, token_ids: Tensor, step: Step, cache: Tensor, *, route: Any = None) -> Tensor:
        pairs = zip(token_ids.tolist(), step.positions.tolist(), strict=True)
        return torch.eye(VOCAB + 4)[[said(*pair) for pair in pairs]]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@cache
def plain() -> list[list[int]]:
    """One token after the other."""
    texts = []
    for request in REQUESTS:
        text = list(request.prompt_ids)
        for _ in range(request.max_new_tokens):
            text.append(said(text[-1], len(text) - 1))
        texts.append(text[len(request.prompt_ids) :])
    return texts


def engine_numbers(**a: Any) -> Tensor:
    states = engine.Engine(Saying(), **a).run(REQUESTS)
    return numbers(*(state.output_ids for state in states))


def engine_right(a: Arguments) -> Tensor:
    need_counts(a["num_drafts"])
    sizes = [a[name] for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "pad_to")]
    need_counts(*sizes, at_least=1)
    need(a["max_num_batched_tokens"] % a["pad_to"] == 0)
    if a["max_chunk"] is not None:
        need_counts(a["max_chunk"], at_least=1)
    if a["num_pages"] is not None:
        need_counts(a["num_pages"])
        need(a["num_pages"] * a["page_size"] >= 7)
    need(isinstance(a["drafter"], speculative.NgramDrafter) or a["num_drafts"] == 0)
    need(a["drafter"] is None or isinstance(a["drafter"], speculative.NgramDrafter))
    return numbers(*plain())


SPECULATIVE = {
    "SamplingParams": Edge(sampling_numbers, sampling, sampling_right),
    "target_probs": Edge(
        speculative.target_probs, probs_arguments, probs_right, computes=torch.float32
    ),
    "rejection_sample": Edge(
        lambda **a: speculative.rejection_sample(query_start_loc=STARTS, **a),
        rejection_arguments,
        rejection_right,
    ),
    "position_noise": Edge(
        noise_numbers,
        lambda draw: {"seed": draw(small), "position": draw(small), "vocab": draw(some)},
        noise_right,
        computes=torch.float32,
    ),
    "verify": Edge(verify_numbers, verify_arguments, verify_right),
    "propose_ngram": Edge(
        lambda **a: numbers(speculative.propose_ngram(**a)), ngram_arguments, ngram_right
    ),
    "AcceptanceStats": Edge(
        stats_numbers, lambda draw: {"drafted": 3, "accepted": draw(st.integers(0, 3))}, stats_right
    ),
    "DraftRequest": Edge(draft_request_numbers, draft_request_arguments, draft_request_right),
    "MTPModule.forward": Edge(
        mtp_forward,
        lambda draw: {"next_ids": ints(draw, 0, 29, 3), "hidden": mtp_hidden(draw)},
        mtp_forward_right,
    ),
    "MTPModule.guess": Edge(
        lambda hidden: module().guess(hidden),
        lambda draw: {"hidden": mtp_hidden(draw)},
        mtp_guess_right,
    ),
    "MTPModule": Edge(
        lambda draft_tokens: MTPModule(
            model(), MTPWeights.random(CONFIG, draft_tokens)
        ).weights.draft_tokens.clone(),
        lambda draw: {"draft_tokens": DRAFT_TOKENS.clone()},
        lambda a: a["draft_tokens"][need_tokens(a["draft_tokens"])],
    ),
    "Request": Edge(request_numbers, request_arguments, request_right),
    "request_seed": Edge(
        lambda **a: torch.tensor([engine.request_seed(**a)]),
        lambda draw: {"seed": draw(small), "number": draw(small)},
        seed_right,
    ),
    "BlockManager": Edge(
        blocks_numbers,
        lambda draw: {
            "num_pages": draw(small),
            "page_size": draw(some),
            "num_tokens": draw(small),
        },
        blocks_right,
    ),
    "pages_for": Edge(
        lambda **a: numbers(engine.pages_for(REQUESTS, **a)),
        lambda draw: {
            "max_num_seqs": draw(some),
            "page_size": draw(some),
            "context_length": draw(st.integers(5, 9)),
        },
        pages_right,
    ),
    "Engine": Edge(engine_numbers, engine_arguments, engine_right),
}
