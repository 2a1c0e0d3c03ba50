"""What lesson 07 says of the two forms of MLA, and the bug that it plants."""

import pytest
import torch

from mla_ref.attention import (
    absorb_query,
    latent_attention,
    mla_expanded_attention,
    paged_attention,
    project_values,
)
from mla_ref.batching import Step
from mla_ref.numerics import compare
from mla_ref.teaching import figures, planted


def problem(s, d_c=16, d_r=8, d_n=8, d_v=6, heads=3):
    """A step of one request, its absorbed query, its cache and the maps, in float64."""
    generator = torch.Generator().manual_seed(s)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    step = Step.one_request(0, s, s)
    q_nope, q_pe = draw(s, heads, d_n), draw(s, heads, d_r)
    cache = draw(1, s, d_c + d_r)
    w_uk, w_uv = draw(heads, d_n, d_c) / d_c**0.5, draw(heads, d_v, d_c) / d_c**0.5
    batch = {
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "block_table": step.block_table,
    }
    return q_nope, q_pe, cache, w_uk, w_uv, batch


def test_B079_the_scale_of_the_row_is_right_for_one_key_only():
    q_nope, q_pe, cache, w_uk, w_uv, batch = problem(9)
    scale = (8 + 8) ** -0.5
    right = mla_expanded_attention(q_nope, q_pe, cache, w_uk, w_uv, **batch, softmax_scale=scale)
    q = absorb_query(q_nope, q_pe, w_uk)
    latent = planted.latent_attention_scaled_by_its_row(
        q, cache, **batch, softmax_scale=scale, kv_lora_rank=16
    )
    wrong = project_values(latent.out, w_uv)
    assert compare(wrong[0], right.out[0]).agrees(rel_l2=1e-13)
    for row in range(1, 9):
        assert not compare(wrong[row], right.out[row]).agrees(rel_l2=0.01)
    cured = latent_attention(q, cache, **batch, softmax_scale=scale, kv_lora_rank=16)
    assert compare(project_values(cured.out, w_uv), right.out).agrees(rel_l2=1e-13)


def test_B079_the_scale_of_the_row_does_not_change_with_the_one_that_is_passed():
    q_nope, q_pe, cache, w_uk, _, batch = problem(5)
    q = absorb_query(q_nope, q_pe, w_uk)
    one, other = (
        planted.latent_attention_scaled_by_its_row(
            q, cache, **batch, softmax_scale=scale, kv_lora_rank=16
        )
        for scale in (0.1, 10.0)
    )
    assert torch.equal(one.out, other.out)
    # Where the head happens to be as wide as the row, nobody would notice.
    honest = latent_attention(q, cache, **batch, softmax_scale=24**-0.5, kv_lora_rank=16)
    assert torch.equal(one.out, honest.out)


def test_rung_4_on_one_key_head_is_the_latent_attention_bit_for_bit():
    q_nope, q_pe, cache, w_uk, _, batch = problem(11)
    q = absorb_query(q_nope, q_pe, w_uk)
    key, value = cache[:, :, None], cache[:, :, None, :16]
    assert value.data_ptr() == cache.data_ptr()
    mqa = paged_attention(q, key, value, **batch, softmax_scale=0.3)
    latent = latent_attention(q, cache, **batch, softmax_scale=0.3, kv_lora_rank=16)
    assert torch.equal(mqa.out, latent.out)
    assert torch.equal(mqa.lse, latent.lse)


def curves(flops):
    rows = torch.tensor([1, 10, 100, 1000])
    return rows, flops, {name: torch.ones(4) for name in flops}


@pytest.mark.thorough
def test_forms_by_rows_finds_the_crossing():
    pytest.importorskip("matplotlib")
    rows = torch.tensor([1, 10, 100, 1000])
    flops = {"flat": torch.full((4,), 50.0), "steep": rows.float()}
    figure = figures.forms_by_rows(*curves(flops))
    assert [text.get_text() for text in figure.axes[0].texts] == ["equal at 50 rows"]
    never = {"flat": torch.full((4,), 5000.0), "steep": rows.float()}
    assert not figures.forms_by_rows(*curves(never)).axes[0].texts


@pytest.mark.thorough
@pytest.mark.usefixtures("plain_calls")
def test_what_cannot_be_drawn_is_an_error_that_names_the_argument():
    pytest.importorskip("matplotlib")
    one = {"a": torch.ones(4)}
    with pytest.raises(ValueError, match="flops and nbytes must hold the same two forms"):
        figures.forms_by_rows(*curves(one))
    rows, flops, nbytes = curves({"a": torch.ones(4), "b": torch.ones(4)})
    with pytest.raises(ValueError, match=r"nbytes\['b'\] must hold one number a row count, 4"):
        figures.forms_by_rows(rows, flops, {**nbytes, "b": torch.ones(3)})
