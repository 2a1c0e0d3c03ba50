"""Wrong answers to the exercises of lesson 05, each with the case that must catch it."""

import torch


def leaves_it(x):
    return x.clone()


def the_way_back(x):
    """From halves to pairs: with four numbers the same permutation."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def moves_everything(x):
    """Right for a single row only."""
    return x.flatten().unflatten(0, (-1, 2)).T.reshape(x.shape)


def needs_two_dimensions(x):
    flat = x.flatten(0, -2)
    return torch.cat([flat[:, 0::2], flat[:, 1::2]], dim=1).reshape(x.shape)


def widens(x):
    """A cast to compute in, and none back."""
    wide = x.float()
    return torch.cat([wide[..., 0::2], wide[..., 1::2]], dim=-1)


def in_place(x):
    x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :] = (
        x[..., 0::2].clone(),
        x[..., 1::2].clone(),
    )
    return x


def halves_of_rows(weight):
    return torch.cat([weight[0::2], weight[1::2]])


def columns(weight, num_heads, nope_dim):
    """A weight maps its columns to its rows; the output's numbers are the rows."""
    return needs_two_dimensions(weight)


def all_heads_at_once(weight, num_heads, nope_dim):
    return halves_of_rows(weight)


def forgets_the_part_without_positions(weight, num_heads, nope_dim):
    heads = weight.unflatten(0, (num_heads, -1))
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)


def one_head_only(weight, num_heads, nope_dim):
    """Takes the rows after `nope_dim` for the rotary part, once for all heads."""
    if nope_dim == 0:
        return forgets_the_part_without_positions(weight, num_heads, 0)
    return torch.cat([weight[:nope_dim], halves_of_rows(weight[nope_dim:])])


def by_negative_index(weight, num_heads, nope_dim):
    """A width of 0 counted from the end is the whole."""
    heads = weight.unflatten(0, (num_heads, -1)).clone()
    width = heads.shape[1] - nope_dim
    heads[:, -width:] = torch.cat([heads[:, -width::2], heads[:, -width + 1 :: 2]], dim=1)
    return heads.flatten(0, 1)


WRONG_05 = [
    ("05-to-halves", leaves_it, "four numbers", "the result at [0, 1] is 11, expected 20"),
    ("05-to-halves", in_place, "four numbers", "changed its argument x"),
    ("05-to-halves", the_way_back, "eight numbers", "the result at"),
    ("05-to-halves", moves_everything, "five rows of three heads", "the result at"),
    ("05-to-halves", needs_two_dimensions, "a single row", "it raised"),
    ("05-to-halves", widens, "bfloat16", "a float32 tensor"),
    ("05-convert-weight", columns, "one head", "the weight"),
    ("05-convert-weight", all_heads_at_once, "three heads that turn whole", "the weight"),
    ("05-convert-weight", forgets_the_part_without_positions, "a latent of 6", "the weight"),
    ("05-convert-weight", one_head_only, "three heads of 4 + 8", "the weight"),
    ("05-convert-weight", by_negative_index, "nothing is turned", ""),
]

# Cases that repeat what others prove, in the words of attention.
REPEATS_05 = {
    ("05-to-halves", "scores are equal"),
    ("05-convert-weight", "scores through both projections are equal"),
}
