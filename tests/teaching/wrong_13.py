"""Wrong answers to the exercises of lesson 13, each with the case that must catch it."""

import torch

from mla_ref.numerics import AttentionResult, apply_sink, merge_many
from mla_ref.parallel import local_lens
from mla_ref.teaching import planted


def share(lens, rank, world, interleave):
    """The right answer, for its callers to spoil."""
    return local_lens(lens, rank=rank, world=world, interleave=interleave)


def counts_chunks(lens, rank, world, interleave):
    return share((lens + interleave - 1) // interleave, rank, world, 1)


def everything(lens, rank, world, interleave):
    """As if the cache were replicated."""
    return lens


def rounds_down(lens, rank, world, interleave):
    return lens // world


def rounds_up(lens, rank, world, interleave):
    return (lens + world - 1) // world


def the_last_round_may_be_negative(lens, rank, world, interleave):
    rest = lens % (world * interleave) - rank * interleave
    return lens // (world * interleave) * interleave + rest.clamp(max=interleave)


def a_token_each_at_least(lens, rank, world, interleave):
    return torch.where(lens > 0, share(lens, rank, world, interleave).clamp(min=1), 0)


def dealt_one_by_one(lens, rank, world, interleave):
    return share(lens, rank, world, 1)


def counts_down(lens, rank, world, interleave):
    return planted.local_lens_counted_down(lens, rank=rank, world=world, interleave=interleave)


def new_tokens_stay_together(lens, rank, world, interleave):
    """Gives all of a verifier's new tokens to the rank that gets the first of them."""
    if interleave == 1 or len(lens) == 1:
        return share(lens, rank, world, interleave)
    first = share(lens[:1] - 1, rank, world, interleave)
    mine = (int(lens[0]) - 1) // interleave % world == rank
    return first + (lens - lens[0] + 1) * mine


def rises_from_the_first(lens, rank, world, interleave):
    """Adds what comes after the first row's length; nothing comes after a longer one."""
    first = int(lens[0])
    found = [int(share(lens[:1], rank, world, interleave))] * len(lens)
    for row, length in enumerate(lens.tolist()):
        found[row] += sum(p // interleave % world == rank for p in range(first, length))
    return torch.tensor(found)


def masks_bits(lens, rank, world, interleave):
    dealt = world * interleave
    rest = (lens & (dealt - 1)) - rank * interleave
    return lens // dealt * interleave + rest.clamp(0, interleave)


def in_float32(lens, rank, world, interleave):
    dealt = world * interleave
    rounds = torch.floor(lens.float() / dealt)
    rest = lens.float() - rounds * dealt - rank * interleave
    return (rounds * interleave + rest.clamp(0, interleave)).long()


def in_int32(lens, rank, world, interleave):
    return share(lens.int(), rank, world, interleave)


def plain_mean(outs, lses, sink):
    return outs.mean(0), torch.logsumexp(lses, 0)


def in_base_2(outs, lses, sink):
    shares = torch.exp2(lses - lses.amax(0))
    return (shares[..., None] * outs).sum(0) / shares.sum(0)[..., None], torch.logsumexp(lses, 0)


def of_base_2(outs, lses, sink):
    """Takes natural LSEs for base 2 and converts them."""
    return tuple(merge_many(outs, lses * 0.6931471805599453))


def two_ranks_only(outs, lses, sink):
    return tuple(merge_many(torch.stack([outs[0], outs[1]]), torch.stack([lses[0], lses[1]])))


def without_maximum(outs, lses, sink):
    weights = torch.exp(lses)
    total = weights.sum(0)
    return (weights[..., None] * outs).sum(0) / total[..., None], torch.log(total)


def multiplies_garbage(outs, lses, sink):
    shares = torch.softmax(lses, dim=0)
    return (shares[..., None] * outs).sum(0), torch.logsumexp(lses, 0)


def no_guard(outs, lses, sink):
    heaviest = lses.amax(0)
    weights = torch.exp(lses - heaviest)
    total, out = weights[0] * 0, outs[0] * 0
    out = torch.where(out.isnan(), 0.0, out)
    for weight, part in zip(weights, outs, strict=True):
        total = total + weight
        out = out + weight[..., None] * torch.where((weight == 0)[..., None], 0.0, part)
    return out / total[..., None], torch.log(total) + heaviest


def a_sink_a_rank(outs, lses, sink):
    if sink is not None:
        outs = torch.stack(
            [apply_sink(AttentionResult(o, x), sink) for o, x in zip(outs, lses, strict=True)]
        )
        lses = torch.logaddexp(lses, sink)
    return tuple(merge_many(outs, lses))


def forgets_the_sink(outs, lses, sink):
    return tuple(merge_many(outs, lses))


def sink_in_the_lse(outs, lses, sink):
    merged = merge_many(outs, lses)
    if sink is None:
        return tuple(merged)
    return apply_sink(merged, sink), torch.logaddexp(merged.lse, sink)


def one_sink_for_all(outs, lses, sink):
    merged = merge_many(outs, lses)
    if sink is None:
        return tuple(merged)
    return apply_sink(merged, sink[:1].expand_as(sink)), merged.lse


def what_the_sink_leaves(outs, lses, sink):
    merged = merge_many(outs, lses)
    if sink is None:
        return tuple(merged)
    taken = torch.exp(sink) / (torch.exp(merged.lse) + torch.exp(sink))
    return merged.out * (1 - taken)[..., None], merged.lse


def adds_in_place(outs, lses, sink):
    merged = merge_many(outs, lses)
    lses -= merged.lse
    return tuple(merged)


LENS, MERGE = "13-local-lens", "13-merge-ranks"
WRONG_13 = [
    (
        LENS,
        counts_chunks,
        "one rank holds everything",
        "lens [37]: the result is [10], expected [37]",
    ),
    (LENS, in_int32, "one rank holds everything", "int32 tensor"),
    (LENS, everything, "two ranks, an even length", "lens [2]: the result is [2], expected [1]"),
    (LENS, rounds_down, "ten tokens on four", "rank 0 of 4 with interleave 1"),
    (LENS, rounds_up, "ten tokens on four", "rank 2 of 4 with interleave 1"),
    (LENS, the_last_round_may_be_negative, "two ranks", "rank 1 of 2 with interleave 1"),
    (LENS, a_token_each_at_least, "a request shorter", "lens [1]: the result is [1], expected [0]"),
    (LENS, dealt_one_by_one, "chunks of four", "lens [10]: the result is [5], expected [6]"),
    (LENS, counts_down, "the rows of a verifier", "is [2, 3, 4, 5], expected [5, 5, 5, 5]"),
    (LENS, new_tokens_stay_together, "a verifier across", "is [16, 16, 16, 16], expected [16, 16"),
    (LENS, rises_from_the_first, "after two drafts", "is [5, 5], expected [5, 4]"),
    (LENS, masks_bits, "three ranks, chunks of two", "rank 0 of 3 with interleave 2"),
    (LENS, in_float32, "16,777,221 tokens", "expected [8388609]"),
    (MERGE, plain_mean, "by hand", "out at [0, 0, 0] is 5, expected 8"),
    (MERGE, in_base_2, "by hand", "is 7.23303, expected 8"),
    (MERGE, of_base_2, "by hand", "lse"),
    (MERGE, adds_in_place, "by hand", "changed its argument lses"),
    (MERGE, two_ranks_only, "keys dealt to", "it raised IndexError"),
    (MERGE, without_maximum, "LSEs near 300", "inf"),
    (MERGE, multiplies_garbage, "a rank without a key", "NaN"),
    (MERGE, no_guard, "a row of which no rank", "NaN"),
    (MERGE, a_sink_a_rank, "a sink counts once", ""),
    (MERGE, forgets_the_sink, "a sink counts once", "out of 1 ranks, sink -1.0"),
    (MERGE, sink_in_the_lse, "a sink counts once", "lse, which is without the sink"),
    (MERGE, one_sink_for_all, "each head has its own", "out"),
    (MERGE, what_the_sink_leaves, "a very large sink", "NaN"),
]
