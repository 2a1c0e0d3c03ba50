"""The recipe by which GLM-5.2 is served, on a real model: what each format costs, and all of them.

The pull request that made decode the default was measured on such a server: experts in NVFP4, the
other linear maps in MXFP8 that is made while loading, an FP8 cache, sparse attention and three MTP
drafts. Here every part is put on alone and then all together, and held against the plain model on
text that nothing here was trained on: perplexity, how far the logits move, and how many drafts are
still accepted. Drafts come from the plain MTP module, which sees the hidden states of the recipe.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.batching import ServingLimits, Step
from mla_ref.cache import pages_needed
from mla_ref.checks import require_count
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.smollm2 import SmolLM2
from mla_ref.models.smollm2_served import MXFP8SmolLM2, served_weights
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.speculative import AcceptanceStats, Drafter
from mla_ref.validation.measure import rounded, row_differences
from mla_ref.validation.modes_acceptance import Acceptance
from mla_ref.validation.modes_texts import PAGE_SIZE, write_texts

# Tokens of the text that run in one step. Their logits are 25 MB of float32.
CHUNK = 128


@dataclass(frozen=True)
class Recipe:
    """Which parts are on.

    Attributes:
        name: For reports.
        nvfp4: Feed-forward weights in NVFP4.
        mxfp8: Attention projections in MXFP8, weights and activations.
        fp8_cache: Cached rows of 656 bytes and index keys of 132.
        sparse: Top-k keys a row, chosen by the indexers; else all keys.
    """

    name: str
    nvfp4: bool = False
    mxfp8: bool = False
    fp8_cache: bool = False
    sparse: bool = False


PLAIN, SERVED = Recipe("plain"), Recipe("all together", True, True, True, True)
RECIPES = (
    PLAIN,
    Recipe("NVFP4 feed-forward", nvfp4=True),
    Recipe("MXFP8 projections", mxfp8=True),
    Recipe("FP8 cache", fp8_cache=True),
    Recipe("sparse", sparse=True),
    SERVED,
)
MakeSparse = Callable[..., SparseSmolLM2]
"""Takes the model, `topk` and `cache_format`, as `SparseSmolLM2.trained` does."""


@dataclass(frozen=True)
class RecipeRow:
    """One recipe's numbers.

    Attributes:
        recipe: Which.
        perplexity: exp of the mean loss in nats a token.
        kl: Mean of KL(plain || recipe) over the rows of the text, in nats.
        top1: Share of the rows whose likeliest token is that of the plain model.
        tokens: Tokens scored.
        acceptance: Of drafts, on the prompts.
    """

    recipe: Recipe
    perplexity: float
    kl: float
    top1: float
    tokens: int
    acceptance: Acceptance

    @property
    def finite(self) -> bool:
        """Whether every number is one: a NaN anywhere in the model ends up here."""
        return math.isfinite(self.perplexity) and math.isfinite(self.kl)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **asdict(self.recipe),
            "perplexity": rounded(self.perplexity),
            "kl_of_plain_and_recipe": rounded(self.kl),
            "top1_as_plain": rounded(self.top1),
            "tokens": self.tokens,
            "acceptance": self.acceptance.to_json(),
        }


def trunk_of(recipe: Recipe, dense: SmolLM2) -> SmolLM2:
    """The model with its linear maps in the recipe's formats, the attention as in `dense`."""
    if not (recipe.nvfp4 or recipe.mxfp8):
        return dense
    weights = served_weights(dense.weights, nvfp4=recipe.nvfp4, mxfp8=recipe.mxfp8)
    kind = MXFP8SmolLM2 if recipe.mxfp8 else SmolLM2
    return kind(weights, attention=dense.attention, form=dense.form)


def model_of(
    recipe: Recipe,
    trunk: SmolLM2,
    *,
    topk: int,
    longest: int,
    make_sparse: MakeSparse = SparseSmolLM2.trained,
) -> LanguageModel:
    """The model that runs a recipe.

    Args:
        recipe: Which parts are on.
        trunk: From `trunk_of`.
        topk: Keys a row where attention is sparse.
        longest: Tokens of the longest text. With an FP8 cache and without sparse attention, the
            lists are as long: they name every key.
        make_sparse: Puts indexers on a trunk.
    """
    if not (recipe.fp8_cache or recipe.sparse):
        return trunk
    return make_sparse(
        trunk,
        topk=topk if recipe.sparse else longest,
        cache_format="fp8" if recipe.fp8_cache else "fp32",
    )


def measure_recipes(
    dense: SmolLM2,
    drafter: Drafter,
    text: Sequence[int],
    prompts: Mapping[str, Sequence[int]],
    *,
    score_from: int,
    recipes: Sequence[Recipe] = RECIPES,
    topk: int = 256,
    num_drafts: int = 3,
    tokens: int = 24,
    make_sparse: MakeSparse = SparseSmolLM2.trained,
    on_recipe: Callable[[str], None] | None = None,
) -> Iterator[RecipeRow]:
    """Measure each recipe on the same text and prompts.

    Args:
        dense: The plain model; "gqa" is the cheapest.
        drafter: Proposes, for every recipe the same.
        text: Held-out tokens.
        prompts: Tokens by name, which are continued with drafts.
        score_from: First position whose next token counts; rows with fewer than `topk` keys before
            them are not sparse.
        recipes: Which.
        topk: Keys a row where attention is sparse.
        num_drafts: Drafts a step, 1 at least.
        tokens: Tokens to write for each prompt.
        make_sparse: Puts indexers on a trunk.
        on_recipe: Called with the name of each recipe before it runs.

    Returns:
        An iterator over rows. A row is measured when it is asked for.

    Raises:
        ValueError: A number is out of range, or a text leaves nothing to score.
    """
    require_count("num_drafts", num_drafts, at_least=1)
    require_count("topk", topk, at_least=1)
    if not 0 <= require_count("score_from", score_from) < len(text) - 1:
        raise ValueError(
            f"score_from must leave a token to score of the {len(text)} of text, got {score_from}"
        )
    ids = torch.tensor(list(text))
    longest = max(len(text), *(len(prompt) + tokens for prompt in prompts.values()))

    def rows() -> Iterator[RecipeRow]:
        truth = text_logits(dense, ids, score_from)
        for recipe in recipes:
            if on_recipe:
                on_recipe(recipe.name)
            model = model_of(
                recipe,
                trunk_of(recipe, dense),
                topk=topk,
                longest=longest,
                make_sparse=make_sparse,
            )
            logits = truth if recipe == PLAIN else text_logits(model, ids, score_from)
            stats = AcceptanceStats()
            if logits.isfinite().all():  # the engine refuses to choose among NaN
                stats = write_texts(
                    recipe.name,
                    model,
                    prompts,
                    tokens=tokens,
                    drafter=drafter,
                    num_drafts=num_drafts,
                ).acceptance
            acceptance = Acceptance.of(recipe.name, stats)
            yield _row(recipe, truth, logits, ids[score_from + 1 :], acceptance)

    return rows()


@torch.inference_mode()
def text_logits(
    model: LanguageModel, ids: Int[Tensor, " s"], score_from: int
) -> Float[Tensor, "scored vocab"]:
    """Logits of every row from `score_from` on but the last, whose next token is not known."""
    s, parts = len(ids), []
    cache = model.new_cache(
        pages_needed(s, PAGE_SIZE), PAGE_SIZE, limits=ServingLimits(1, min(CHUNK, s), 0)
    )
    for first in range(0, s, CHUNK):
        new = ids[first : first + CHUNK]
        hidden = model.forward(new, Step.one_request(first, len(new), PAGE_SIZE), cache)
        parts.append(model.logits(hidden[max(score_from - first, 0) :]))
    return torch.cat(parts)[:-1]


def _row(
    recipe: Recipe,
    truth: Float[Tensor, "scored vocab"],
    logits: Float[Tensor, "scored vocab"],
    following: Int[Tensor, " scored"],
    acceptance: Acceptance,
) -> RecipeRow:
    losses, kls, changed = [], [], 0
    # Some rows at a time: in float64 those of a whole text would be 100 MB, several times over.
    for rows in torch.arange(len(following)).split(CHUNK):
        losses.append(
            torch.nn.functional.cross_entropy(
                logits[rows].double(), following[rows], reduction="sum"
            )
        )
        found = row_differences(truth[rows], logits[rows], rows.tolist())
        kls += [row.kl for row in found]
        changed += sum(not row.same_top1 for row in found)
    count = len(following)
    return RecipeRow(
        recipe=recipe,
        perplexity=math.exp(float(sum(losses)) / count),
        kl=math.fsum(kls) / count,
        top1=1 - changed / count,
        tokens=count,
        acceptance=acceptance,
    )
