"""The engine on a device whose numbers nobody can read: torch's "meta", which has no memory.

What waits for a GPU fails here: an operator that hands a number to the host, or one that mixes
tensors of the host and of the device. So a machine without a GPU can tell what a step reads back.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.serving import VOCAB, small_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_ref.batching import ServingLimits, Step
from mla_ref.batching.transfer import move_together
from mla_ref.bench.speculative_gate import logits_after
from mla_ref.engine import Engine, Request, StaticStep
from mla_ref.models.language_model import LanguageModel
from mla_ref.models.mtp import MTPModule, MTPWeights
from mla_ref.models.smollm2_sparse import SparseSmolLM2
from mla_ref.speculative import SamplingParams
from mla_ref.speculative.mtp_drafter import MTPDrafter

META = torch.device("meta")
FORMATS = [("packed", torch.float32), ("sparse", torch.float32), ("sparse", torch.uint8)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the host asks a device for; it gets zeros."""
    found: list[tuple[int, ...]] = []
    tolist = Tensor.tolist

    def read(tensor: Tensor) -> Any:
        if tensor.device != META:
            return tolist(tensor)
        found.append(tuple(tensor.shape))
        return tolist(torch.zeros(tensor.shape, dtype=tensor.dtype))

    monkeypatch.setattr(Tensor, "tolist", read)
    return found


class NothingFromTheHost(TorchDispatchMode):
    """Fails where a tensor is made on the host or copied from there: no graph can hold that."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in (*args, found):
            # A number without dimensions travels as an argument of the kernel.
            if isinstance(tensor, Tensor) and tensor.ndim:
                assert tensor.device == META, f"{func} has a tensor of the host"
        return found


def on_meta(kind: str) -> LanguageModel:
    return small_model(kind).to(META)  # type: ignore[attr-defined]


def mtp_drafter(model: Any, num_drafts: int) -> MTPDrafter:
    dense = model.dense if isinstance(model, SparseSmolLM2) else model
    weights = MTPWeights.random(dense.config, torch.arange(VOCAB))
    return MTPDrafter(MTPModule(dense, weights.to(device=META, dtype=dense.dtype)), num_drafts)


@pytest.mark.parametrize(
    ("kind", "dtype", "num_drafts", "graphs"),
    [
        ("packed", torch.float32, 3, False),
        ("packed", torch.float32, 3, True),
        ("sparse", torch.float32, 0, True),
        ("sparse", torch.uint8, 0, False),
        ("sparse", torch.uint8, 3, False),
        ("sparse", torch.uint8, 3, True),
    ],
)
def test_a_step_reads_its_new_tokens_and_its_drafts_and_nothing_else(
    reads: list[tuple[int, ...]], kind: str, dtype: torch.dtype, num_drafts: int, graphs: bool
) -> None:
    model = on_meta(kind)
    engine = Engine(
        model,
        drafter=mtp_drafter(model, num_drafts) if num_drafts else None,
        num_drafts=num_drafts,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        page_size=8,
        cache_dtype=dtype,
        graphs=graphs,
    )
    for number, length in enumerate((17, 3)):
        engine.add(Request(str(number), range(length), 5))
    while engine.requests:
        reads.clear()
        outputs = engine.step()
        rows = sum(1 + len(output.drafts) for output in outputs if output.token_ids)
        # The highest logit of each row, for the check that there is one, and its token.
        drafts = sum(len(state.drafts) for state in engine.requests.values())
        assert reads == [(n,) for n in (2 * rows, drafts) if n]
    assert any(record.num_drafts for record in engine.timeline) == bool(num_drafts)
    assert any(record.graph for record in engine.timeline) == graphs


def test_sampled_tokens_come_by_one_copy_too(reads: list[tuple[int, ...]]) -> None:
    engine = Engine(on_meta("sparse"), max_num_batched_tokens=16, page_size=8)
    sampling = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=3)
    engine.run([Request("0", range(5), 3, sampling=sampling)])
    # Each time the highest logit, the number of accepted drafts and the token.
    assert reads == [(3,)] * 3


@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_what_is_recorded_makes_and_copies_nothing_of_the_host(
    kind: str, dtype: torch.dtype
) -> None:
    """Such a copy fails while a graph is captured, or is made once and never again."""
    model = on_meta(kind)
    cache = model.new_cache(8, 8, dtype, limits=ServingLimits(4, 32, 3))
    step = Step.build(
        [3, 9],
        [4, 2],
        torch.tensor([[0, 1], [3, 2]]),
        8,
        prompt_lens=[3, 9],
        num_reqs_padded=2,
        num_tokens_padded=8,
    )
    route = model.route(step, cache)
    static = StaticStep(2, 8, 8, 8, META)
    static.fill(step, torch.zeros(8, dtype=torch.int64))
    for kind_of_all in ("decode", "extend"):
        if route is not None:
            route = replace(route, segments=(route.segments[0]._replace(kind=kind_of_all),))
        model.forward(static.token_ids, static.step, cache, route=route)  # to warm up
        with NothingFromTheHost():
            hidden = model.forward(static.token_ids, static.step, cache, route=route)
        assert hidden.shape == (8, model.config.hidden_size) and hidden.device == META


def test_many_tensors_travel_in_their_order() -> None:
    given = [torch.arange(6).view(2, 3), torch.empty(0, 2, dtype=torch.int64), torch.tensor([7])]
    moved = move_together(given, META)
    assert [x.shape for x in moved] == [x.shape for x in given]
    assert all(x.device == META and x.dtype == torch.int64 for x in moved)
    assert all(
        a is b for a, b in zip(move_together(given, torch.device("cpu")), given, strict=True)
    )


def test_a_step_is_built_on_the_host_and_keeps_what_loops_need() -> None:
    table = torch.tensor([[2, 0]])
    step = Step.build([3], [2], table, 4).to(META)
    assert step.seq_lens.device == META and step.on_host.seq_lens.tolist() == [5]
    assert step.batch["block_table"] is table and not step.validates
    assert step.to(META).on_host.seq_lens.tolist() == [5]
    with pytest.raises(TypeError, match="block_table must be on the host"):
        Step.build([3], [2], table.to(META), 4)


@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_a_second_opinion_on_a_text_is_asked_where_the_model_is(kind: str) -> None:
    found = logits_after(on_meta(kind), [3, 1, 4, 1, 5], chunk=2)
    assert found.device == META and found.shape == (VOCAB,)
