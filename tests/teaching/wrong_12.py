"""Wrong answers to the exercises of lesson 12, each with the case that must catch it."""

import torch
from torch import Tensor

from mla_ref.batching import is_verifier_batch
from mla_ref.teaching import planted


def by_lengths(query_lens, is_prefilling, num_reqs, n):
    return 1 < max(query_lens, default=0) <= 1 + n


def uniform_only(query_lens, is_prefilling, num_reqs, n):
    """A graph's shape test."""
    return by_lengths(query_lens, is_prefilling, num_reqs, n) and len(set(query_lens)) == 1


def single_tokens_too(query_lens, is_prefilling, num_reqs, n):
    return max(query_lens) <= 1 + n


def whatever_n_is(query_lens, is_prefilling, num_reqs, n):
    """As a mode that is forced."""
    return 1 < max(query_lens) <= 8


def n_tokens_at_most(query_lens, is_prefilling, num_reqs, n):
    """Forgets the last token."""
    return 1 < max(query_lens) <= n


def one_more(query_lens, is_prefilling, num_reqs, n):
    return n > 0 and 1 < max(query_lens) <= n + 2


def prefills_with_several_tokens(query_lens, is_prefilling, num_reqs, n):
    chunk = any(f and q > 1 for f, q in zip(is_prefilling, query_lens, strict=True))
    return by_lengths(query_lens, is_prefilling, num_reqs, n) and not chunk


def unknown_is_nobody(query_lens, is_prefilling, num_reqs, n):
    flags = is_prefilling or [False] * len(query_lens)
    return is_verifier_batch(query_lens, flags, n, num_reqs=num_reqs)


def asks_padding(query_lens, is_prefilling, num_reqs, n):
    return planted.is_verifier_batch_with_padding(query_lens, is_prefilling, n, num_reqs=num_reqs)


def cuts_at_num_reqs(query_lens, is_prefilling, num_reqs, n):
    flags = None if is_prefilling is None else is_prefilling[:num_reqs]
    return planted.is_verifier_batch_with_padding(query_lens, flags, n)


def maximum_of_nobody(query_lens, is_prefilling, num_reqs, n):
    longest = max(query_lens[:num_reqs])
    return 1 < longest <= 1 + n and is_verifier_batch(query_lens, is_prefilling, n)


def a_tensor_is_the_answer(query_lens, is_prefilling, num_reqs, n):
    if not isinstance(is_prefilling, Tensor):
        return is_verifier_batch(query_lens, is_prefilling, n, num_reqs=num_reqs)
    return ~is_prefilling.any()


def reads_a_device(query_lens, is_prefilling, num_reqs, n):
    if isinstance(is_prefilling, Tensor):
        is_prefilling = [bool(flag) for flag in is_prefilling]
    return is_verifier_batch(query_lens, is_prefilling, n, num_reqs=num_reqs)


def refuses_a_device_only_when_it_looks(query_lens, is_prefilling, num_reqs, n):
    if max(query_lens[:num_reqs], default=0) <= 1:
        return False
    return is_verifier_batch(query_lens, is_prefilling, n, num_reqs=num_reqs)


def row_lens(computed_lens, query_lens, num_rows):
    """The right answer, for its callers to spoil."""
    starts = query_lens.cumsum(0) - query_lens
    shift = (computed_lens - starts + 1).repeat_interleave(query_lens)
    lens = torch.zeros(num_rows, dtype=torch.int64)
    lens[: len(shift)] = torch.arange(len(shift)) + shift
    return lens


def not_itself(computed_lens, query_lens, num_rows):
    return (row_lens(computed_lens, query_lens, num_rows) - 1).clamp(min=0)


def one_length_a_request(computed_lens, query_lens, num_rows):
    lens = (computed_lens + query_lens).repeat_interleave(query_lens)
    return torch.nn.functional.pad(lens, (0, num_rows - len(lens)))


def hides_candidates(computed_lens, query_lens, num_rows):
    lens = (computed_lens + 1).repeat_interleave(query_lens)
    return torch.nn.functional.pad(lens, (0, num_rows - len(lens)))


def as_wide_as_the_first(computed_lens, query_lens, num_rows):
    """Takes every request for one of as many tokens as the first."""
    lens = torch.zeros(num_rows, dtype=torch.int64)
    if len(query_lens):
        width = int(query_lens[0])
        grid = (computed_lens[:, None] + 1 + torch.arange(width)).flatten()
        real = min(int(query_lens.sum()), len(grid))
        lens[:real] = grid[:real]
    return lens


def counts_through_the_batch(computed_lens, query_lens, num_rows):
    lens = (computed_lens + 1).repeat_interleave(query_lens) + torch.arange(int(query_lens.sum()))
    return torch.nn.functional.pad(lens, (0, num_rows - len(lens)))


def full_context_without_cache(computed_lens, query_lens, num_rows):
    """Believes that a request without cached tokens is a prompt whose rows see all of it."""
    lens = row_lens(computed_lens, query_lens, num_rows)
    fresh = (computed_lens == 0).repeat_interleave(query_lens)
    lens[: len(fresh)][fresh] = query_lens.repeat_interleave(query_lens)[fresh]
    return lens


def a_token_each_at_least(computed_lens, query_lens, num_rows):
    return row_lens(computed_lens, query_lens.clamp(min=1), num_rows)


def goes_on_counting(computed_lens, query_lens, num_rows):
    lens = row_lens(computed_lens, query_lens, num_rows)
    real = int(query_lens.sum())
    lens[real:] = 1
    return lens


def needs_a_request(computed_lens, query_lens, num_rows):
    lens = row_lens(computed_lens, query_lens, num_rows)
    return lens + 0 * int(computed_lens[0])


IS, ROWS = "12-is-verifier", "12-row-lens"
WRONG_12 = [
    (IS, n_tokens_at_most, "three requests with all drafts", "is False, expected True"),
    (IS, uniform_only, "a request with fewer drafts", "is False, expected True"),
    (IS, single_tokens_too, "one token each", "is True, expected False"),
    (IS, whatever_n_is, "several tokens, but no drafts", "n = 0 the result is True"),
    (IS, one_more, "five tokens with n = 3", "is True, expected False"),
    (IS, by_lengths, "a short chunk of a prompt", "is True, expected False"),
    (IS, prefills_with_several_tokens, "a chunk of one token", "is True, expected False"),
    (IS, unknown_is_nobody, "nobody has said", "is_prefilling None"),
    (IS, asks_padding, "a stale flag in padding", "is False, expected True"),
    (IS, cuts_at_num_reqs, "a stale flag, and num_reqs", "num_reqs 4 and n = 3"),
    (IS, maximum_of_nobody, "nobody", "it raised"),
    (IS, a_tensor_is_the_answer, "flags in a host tensor", "tensor("),
    (IS, reads_a_device, "flags on a device", "it raised"),
    (IS, refuses_a_device_only_when_it_looks, "flags on a device", "expected a TypeError"),
    (ROWS, not_itself, "one token each", "is [9, 4], expected [10, 5]"),
    (ROWS, one_length_a_request, "one verifier", "is [10, 10, 10, 10]"),
    (ROWS, hides_candidates, "one verifier", "is [7, 7, 7, 7]"),
    (ROWS, as_wide_as_the_first, "ragged", "expected [7, 8, 9, 10, 10, 11, 12, 5]"),
    (ROWS, counts_through_the_batch, "one token each", "is [10, 6], expected [10, 5]"),
    (ROWS, full_context_without_cache, "a fresh prompt", "expected [6, 7, 8, 9, 1, 2, 3"),
    (ROWS, a_token_each_at_least, "a request without a token", "it raised"),
    (ROWS, goes_on_counting, "padded to a graph's rows", "expected [7, 8, 9, 10, 10, 11, 0"),
    (ROWS, needs_a_request, "a graph of nobody", "it raised"),
]
