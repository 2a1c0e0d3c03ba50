"""Drafters by name, and pages that are enough for all requests and no more."""

import pytest
from tests.engine.serving import small_model

from mla_ref.engine import Engine, Request, load_model, new_drafter, pages_for
from mla_ref.models.gguf_file import GGUFFile


def test_drafters_by_name():
    model = small_model("gqa")
    assert new_drafter("ngram", model, 2).num_drafts == 2
    with pytest.raises(ValueError, match="drafter must be one of mtp, ngram, got 'eagle'"):
        new_drafter("eagle", model, 2)
    # The packaged module is SmolLM2-135M's.
    with pytest.raises(ValueError, match=r"smollm2_mtp.safetensors: .* must be of shape"):
        new_drafter("mtp", model, 2)


def test_sparse_attention_is_of_the_packed_form_only():
    with pytest.raises(ValueError, match='attention must be "packed" with topk'):
        load_model(object.__new__(GGUFFile), attention="gqa", topk=8)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_with_these_pages_nobody_gives_way(max_num_seqs):
    model = small_model("gqa")
    requests = [Request(str(n), [1] * n, max_new_tokens=12) for n in (1, 9, 4, 20, 2)]
    pages = pages_for(requests, max_num_seqs=max_num_seqs, page_size=4, context_length=64)
    # Rows 12, 20, 15, 31, 13: of the longest ones, as many as run at once.
    assert pages == {1: 8, 2: 13, 5: 3 + 5 + 4 + 8 + 4}[max_num_seqs]
    engine = Engine(model, max_num_seqs=max_num_seqs, num_pages=pages, page_size=4)
    states = engine.run(requests)
    assert all(len(s.output_ids) == 12 and s.num_preemptions == 0 for s in states)


def test_a_request_that_is_refused_anyway_asks_for_no_memory():
    request = Request("long", [1], max_new_tokens=10**9)
    assert pages_for([request], max_num_seqs=1, page_size=4, context_length=64) == 16
