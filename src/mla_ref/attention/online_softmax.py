"""The online softmax (arXiv:1805.02867): a softmax-weighted sum that takes its keys in pieces.

Three numbers a row and head carry everything: the highest score so far `m`, the sum of
exp(score - m) so far `l`, and the weighted sum of values `acc`. When a new tile brings a higher
score, what was summed before is scaled down by exp(m_old - m_new). Rungs 3, 4 and 6 are this state
fed from a tensor, from pages, and from pages of latents.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mla_ref.attention.masking import weighted_values
from mla_ref.numerics import AttentionResult


@dataclass(frozen=True)
class OnlineSoftmax:
    """What a row must remember of the keys that it has seen.

    Attributes:
        m: Highest score so far, -inf before the first.
        l: Sum of exp(score - m) so far.
        acc: Sum of exp(score - m) * value so far.
    """

    m: Float[Tensor, "s_q h_kv group"]
    l: Float[Tensor, "s_q h_kv group"]  # noqa: E741  (the papers' letter)
    acc: Float[Tensor, "s_q h_kv group d_v"]

    @classmethod
    def empty(cls, queries: Float[Tensor, "s_q h_kv group d_qk"], d_v: int) -> "OnlineSoftmax":
        """The state before any key, with the shape, dtype and device of `queries`."""
        rows = queries.shape[:3]
        return cls(
            m=queries.new_full(rows, -torch.inf),
            l=queries.new_zeros(rows),
            acc=queries.new_zeros(*rows, d_v),
        )

    def add(
        self,
        queries: Float[Tensor, "s_q h_kv group d_qk"],
        keys: Float[Tensor, "t h_kv d_qk"],
        values: Float[Tensor, "t h_kv d_v"],
        visible: Bool[Tensor, "s_q t"],
    ) -> "OnlineSoftmax":
        """The state after one more tile of t keys. Holds s_q * h_q * t scores, never more.

        Args:
            queries: Rows with the softmax scale already multiplied in.
            keys: The tile's keys.
            values: The tile's values.
            visible: True where a row sees a key of the tile.
        """
        if keys.shape[0] == 0:
            return self
        scores = torch.einsum("shgd,thd->shgt", queries, keys)
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        m = torch.maximum(self.m, scores.amax(dim=-1))
        # A first tile that is masked for a row leaves m at -inf, and -inf minus -inf is NaN for
        # ever after (vllm#48364). Such a row subtracts 0: exp(-inf - 0) is the right 0.
        anchor = torch.where(m == -torch.inf, 0.0, m)
        weights = torch.exp(scores - anchor[..., None])
        shrink = torch.exp(self.m - anchor)
        return OnlineSoftmax(
            m=m,
            l=self.l * shrink + weights.sum(dim=-1),
            acc=self.acc * shrink[..., None] + weighted_values(weights, values, visible),
        )

    def result(self) -> AttentionResult:
        """Normalise: out [s_q, h_q, d_v] and lse [s_q, h_q]; 0 and -inf where nothing was seen."""
        anchor = torch.where(self.m == -torch.inf, 0.0, self.m)
        # 0 / 0 in this last division is how padding rows turn into NaN (vllm#37442).
        out = self.acc / torch.where(self.l == 0, 1.0, self.l)[..., None]
        return AttentionResult(out.flatten(1, 2), (torch.log(self.l) + anchor).flatten(1, 2))
