"""A grouped-query attention layer written as multi-head latent attention, exactly, in two ways.

GQA caches h_kv keys and h_kv values of d numbers for each token. MLA caches one row for all heads,
from which each head takes its key and value by a matrix of its own; a matrix that picks the right d
numbers is such a matrix. Nothing is trained or approximated. With SmolLM2-135M's h_kv = 3, d = 64:

    gqa      k [3, 64] and v [3, 64]                            384 numbers a token and layer
    split    [ v 192 | k 192 ]                                  384: latent = v, rotary key = k
    packed   [ R (v 192, 0 64, k 192, 0 64) | 0 64 ]            576: latent 512, rotary key unused

where every k has been turned to its position. *Split* is there to explain: W_UV picks a head's
values, and no key lies in the latent (d_n = 0). *Packed* has the row of DeepSeek-V3.2 and GLM-5.2,
so that every cache format and kernel made for them runs on real activations.

R is orthogonal: a Hadamard matrix over the values, another over the keys. In exact arithmetic it
changes nothing. In FP8, where 128 numbers of a row share one scale, it spreads large numbers over
many. One matrix over keys and values together would do the opposite for the smaller values.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_ref.models.smollm2_attention import GQAProjections
from mla_ref.numerics import hadamard


def group_selectors(layer: GQAProjections, width: int, offset: int) -> Float[Tensor, "h_q d width"]:
    """Matrices S[h] that pick the d numbers of head h's group out of a row of `width` numbers.

    The groups stand side by side from `offset` on; head h belongs to group h // (h_q / h_kv). S[h]
    times a row gives the numbers, S[h] transposed puts numbers into that place of a row of zeros.
    """
    dtype, device = layer.w_q.dtype, layer.w_q.device
    groups = torch.arange(layer.num_heads, device=device) // (layer.num_heads // layer.num_kv_heads)
    first = offset + groups * layer.head_dim
    columns = first[:, None] + torch.arange(layer.head_dim, device=device)
    return torch.eye(width, dtype=dtype, device=device)[columns]


class SplitMLA:
    """MLA with the values as latent and all keys side by side as rotary key: row [v | k].

    A `LatentProjections`. DeepSeek's rotary key is one for all heads; here it holds a key for each
    group, and a query is zero outside its own group's place.

    Attributes:
        gqa: The layer as trained.
        softmax_scale: The layer's own.
        w_uk: Empty (d_n = 0): no key comes from the latent.
        w_uv: Picks the values of each head's group.
    """

    def __init__(self, gqa: GQAProjections) -> None:
        self.gqa = gqa
        self.softmax_scale = gqa.softmax_scale
        self._width = gqa.num_kv_heads * gqa.head_dim
        self.w_uv = group_selectors(gqa, self._width, 0)
        self.w_uk = self.w_uv[:, :0]

    def query_latent(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s hidden"]:
        """The input itself: queries are not compressed."""
        return x

    def queries(
        self, latent: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, "s h_q d_n"], Float[Tensor, "s h_q d_r"]]:
        """An empty q_nope, and as q_pe the query in its group's place."""
        q = self.gqa.queries(latent, positions)
        # Keys lie in the rotary part as values lie in the latent, so W_UV knows the places.
        return q[..., :0], torch.einsum("shd,hdr->shr", q, self.w_uv)

    def kv_rows(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s d_row"]:
        """[v | k] of each token."""
        return torch.cat([self.gqa.values(x), self.gqa.keys(x, positions)], dim=1).flatten(1)

    def output(self, heads: Float[Tensor, "s h_q d"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream."""
        return self.gqa.output(heads)

    def cache_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of this layer's cache."""
        return num_pages, page_size, 2 * self._width


@dataclass(frozen=True)
class Packing:
    """What the packed form of every layer of a model shares: 2.6 MB in float32 for SmolLM2-135M.

    Attributes:
        rotation: The Hadamard block, applied to values and keys apart.
        w_uk: S_k[h] R^T, dense: 1.2 MB.
        w_uv: S_v[h] R^T, dense.
    """

    rotation: Float[Tensor, "block block"]
    w_uk: Float[Tensor, "h_q d latent"]
    w_uv: Float[Tensor, "h_q d latent"]

    @classmethod
    def of(cls, layer: GQAProjections) -> "Packing":
        """The packing for layers of these dimensions, dtype and device."""
        width = layer.num_kv_heads * layer.head_dim
        block = 1 << (width - 1).bit_length()
        rotation = hadamard(block).to(layer.w_q)

        def rotated(offset: int) -> Tensor:
            selectors = group_selectors(layer, 2 * block, offset)
            return (selectors.unflatten(-1, (2, block)) @ rotation.T).flatten(-2)

        return cls(rotation, w_uk=rotated(block), w_uv=rotated(0))


class PackedMLA:
    """MLA in the served geometry: latent R (v, k), an unused rotary key of d zeros.

    A `LatentProjections`. Positions are in the keys before they are packed, so q_nope carries the
    turned query and q_pe is zero.

    Attributes:
        gqa: The layer as trained.
        softmax_scale: The layer's own.
        w_uk: Takes a head's key from the latent.
        w_uv: Takes a head's value from the latent.
    """

    def __init__(self, gqa: GQAProjections, packing: Packing | None = None) -> None:
        self.gqa = gqa
        self.softmax_scale = gqa.softmax_scale
        packing = packing or Packing.of(gqa)
        self._rotation, self.w_uk, self.w_uv = packing.rotation, packing.w_uk, packing.w_uv

    def query_latent(self, x: Float[Tensor, "s hidden"]) -> Float[Tensor, "s hidden"]:
        """The input itself: queries are not compressed."""
        return x

    def queries(
        self, latent: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, "s h_q d_n"], Float[Tensor, "s h_q d_r"]]:
        """The turned query as q_nope, and zeros as q_pe."""
        q = self.gqa.queries(latent, positions)
        return q, torch.zeros_like(q)

    def kv_rows(
        self, x: Float[Tensor, "s hidden"], positions: Int[Tensor, " s"]
    ) -> Float[Tensor, "s d_row"]:
        """[R (v, k) | 0] of each token."""
        block = self._rotation.shape[0]
        v, k = self.gqa.values(x).flatten(1), self.gqa.keys(x, positions).flatten(1)
        rows = x.new_zeros(x.shape[0], 2 * block + self.gqa.head_dim)
        # Only the first numbers of a block are not 0, so only the first columns of R count.
        columns = self._rotation[:, : v.shape[1]]
        rows[:, :block] = v @ columns.T
        rows[:, block : 2 * block] = k @ columns.T
        return rows

    def output(self, heads: Float[Tensor, "s h_q d"]) -> Float[Tensor, "s hidden"]:
        """Back to the residual stream."""
        return self.gqa.output(heads)

    def cache_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of this layer's cache."""
        return num_pages, page_size, 2 * self._rotation.shape[0] + self.gqa.head_dim
