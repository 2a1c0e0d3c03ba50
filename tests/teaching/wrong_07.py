"""Wrong answers to the exercises of lesson 07, each with the case that must catch it."""

import torch


def rotary_first(q_nope, q_pe, w_uk):
    return torch.cat([q_pe, torch.einsum("shn,hnc->shc", q_nope, w_uk)], dim=-1)


def not_transposed(q_nope, q_pe, w_uk):
    """W_UK as if it mapped queries to latents: fits where both are equally wide."""
    return torch.cat([torch.einsum("shn,hcn->shc", q_nope, w_uk), q_pe], dim=-1)


def first_head_for_all(q_nope, q_pe, w_uk):
    return torch.cat([q_nope @ w_uk[0], q_pe], dim=-1)


def rows_for_heads(q_nope, q_pe, w_uk):
    """A batched product over rows and not over heads."""
    if q_nope.shape[0] != w_uk.shape[0]:
        return torch.cat([torch.einsum("shn,hnc->shc", q_nope, w_uk), q_pe], dim=-1)
    return torch.cat([q_nope @ w_uk, q_pe], dim=-1)


def written_into_the_row(q_nope, q_pe, w_uk):
    d_c, d_r = w_uk.shape[-1], q_pe.shape[-1]
    out = q_nope.new_empty(*q_nope.shape[:2], d_c + d_r)
    out[..., :d_c] = torch.einsum("shn,hnc->shc", q_nope, w_uk)
    out[..., -d_r:] = q_pe
    return out


def stacks_rows(q_nope, q_pe, w_uk):
    rows = [torch.einsum("hn,hnc->hc", q, w_uk) for q in q_nope]
    return torch.cat([torch.stack(rows), q_pe], dim=-1)


def attend(q_nope, q_pe, rows, w_uk, w_uv, scale, diagonal=None):
    d_c = w_uk.shape[-1]
    q = torch.cat([torch.einsum("shn,hnc->shc", q_nope, w_uk), q_pe], dim=-1)
    s_q, s_kv = q.shape[0], rows.shape[0]
    seen = torch.ones(s_q, s_kv, dtype=torch.bool)
    seen = seen.tril(s_kv - s_q if diagonal is None else diagonal)
    scores = (q @ rows.T * scale).masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("shc,hvc->shv", scores.softmax(-1) @ rows[:, :d_c], w_uv)


def scaled_by_the_row(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    return attend(q_nope, q_pe, rows, w_uk, w_uv, rows.shape[1] ** -0.5)


def scaled_by_the_head(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    width = q_nope.shape[-1] + q_pe.shape[-1]
    return attend(q_nope, q_pe, rows, w_uk, w_uv, width**-0.5)


def top_left(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    s_q = q_nope.shape[0]
    diagonal = rows.shape[0] if s_q == 1 else 0
    return attend(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale, diagonal)


def no_mask(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    return attend(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale, rows.shape[0])


def in_latent_space(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    """Stops before W_UV."""
    eye = torch.eye(w_uk.shape[-1], dtype=rows.dtype).expand(w_uk.shape[0], -1, -1)
    return attend(q_nope, q_pe, rows, w_uk, eye, softmax_scale)


def in_float32(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    parts = (x.float() for x in (q_nope, q_pe, rows, w_uk, w_uv))
    return attend(*parts, softmax_scale).double()


def value_as_wide_as_the_key(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    return attend(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale)[..., : q_nope.shape[-1]]


def expands(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    """Rung 5, with the right result."""
    d_c, s_q, s_kv = w_uk.shape[-1], q_nope.shape[0], rows.shape[0]
    k_nope = torch.einsum("tc,hnc->thn", rows[:, :d_c], w_uk)
    v = torch.einsum("tc,hvc->thv", rows[:, :d_c], w_uv)
    scores = torch.einsum("shn,thn->sht", q_nope, k_nope)
    scores = (scores + q_pe @ rows[:, d_c:].T) * softmax_scale
    seen = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("sht,thv->shv", weights, v)


def expands_values_only(q_nope, q_pe, rows, w_uk, w_uv, softmax_scale):
    d_c, s_q, s_kv = w_uk.shape[-1], q_nope.shape[0], rows.shape[0]
    q = torch.cat([torch.einsum("shn,hnc->shc", q_nope, w_uk), q_pe], dim=-1)
    seen = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
    scores = (q @ rows.T * softmax_scale).masked_fill(~seen[:, None], -torch.inf)
    v = torch.einsum("tc,hvc->thv", rows[:, :d_c], w_uv)
    return torch.einsum("sht,thv->shv", scores.softmax(-1), v)


WRONG_07 = [
    ("07-absorb-query", rotary_first, "one head, by hand", "is 6, expected 13"),
    ("07-absorb-query", not_transposed, "one head, by hand", "is 26, expected 6"),
    ("07-absorb-query", first_head_for_all, "three heads", "the score of head 1"),
    ("07-absorb-query", rows_for_heads, "as many heads as rows", "the score of head"),
    ("07-absorb-query", written_into_the_row, "no rotary part", "it raised"),
    ("07-absorb-query", stacks_rows, "no rows", "it raised"),
    ("07-absorbed-attention", in_latent_space, "a decode step over one row", "shape [1, 2, 8]"),
    ("07-absorbed-attention", in_float32, "a decode step over one row", "rounding of float32"),
    ("07-absorbed-attention", scaled_by_the_row, "a decode step, s_q 1, s_kv 9", "out at"),
    ("07-absorbed-attention", scaled_by_the_head, "a decode step, s_q 1, s_kv 9", "out at"),
    ("07-absorbed-attention", top_left, "a verifier's rows", "out at"),
    ("07-absorbed-attention", no_mask, "a verifier's rows", "out at"),
    ("07-absorbed-attention", value_as_wide_as_the_key, "values of another width", "[2, 2, 3]"),
    ("07-absorbed-attention", expands, "no key and no value", "300, 256] was made"),
    ("07-absorbed-attention", expands_values_only, "no key and no value", "300"),
]
