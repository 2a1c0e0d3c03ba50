"""Bugs in the softmax scale of MLA, as published libraries had them."""

from mla_ref.layers import YarnConfig, default_softmax_scale, yarn_mscale


def scale_without_mscale(
    qk_nope_head_dim: int, qk_rope_head_dim: int, yarn: YarnConfig | None
) -> float:
    """BUG: takes the stretch of the context and leaves its factor on the scale out.

    Right for models without YaRN. For DeepSeek-V3 the scale is 1.87 times too small: every softmax
    is flatter than it was trained. A row that sees one key does not notice.
    """
    del yarn
    return default_softmax_scale(qk_nope_head_dim, qk_rope_head_dim, None)


def scale_from_mscale(
    qk_nope_head_dim: int, qk_rope_head_dim: int, yarn: YarnConfig | None
) -> float:
    """BUG: takes `mscale`, which belongs to cos and sin, in place of `mscale_all_dim`.

    Right for every released DeepSeek model: their files give both the same number.
    """
    head_dim = qk_nope_head_dim + qk_rope_head_dim
    mscale = yarn_mscale(yarn.factor, yarn.mscale) if yarn else 1.0
    return head_dim**-0.5 * mscale**2
