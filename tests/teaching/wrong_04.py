"""Wrong answers to the exercises of lesson 04, each with the case that must catch it."""

import torch


def positions_of(query_start_loc, seq_lens):
    q_lens = query_start_loc.diff()
    request = torch.arange(len(seq_lens)).repeat_interleave(q_lens)
    shift = (seq_lens - query_start_loc[1:])[request]
    return request, torch.arange(len(request)) + shift


def in_int32(block_table, query_start_loc, seq_lens, page_size):
    request, positions = positions_of(query_start_loc, seq_lens)
    return block_table[request, positions // page_size] * page_size + positions.int() % page_size


def positions_as_slots(block_table, query_start_loc, seq_lens, page_size):
    """A fresh server with one request."""
    return positions_of(query_start_loc, seq_lens)[1]


def neighbours_of_the_first(block_table, query_start_loc, seq_lens, page_size):
    request, positions = positions_of(query_start_loc, seq_lens)
    return block_table[request, 0].long() * page_size + positions


def from_the_start(block_table, query_start_loc, seq_lens, page_size):
    """Takes the new tokens for the first ones of their request."""
    q_lens = query_start_loc.diff()
    request = torch.arange(len(seq_lens)).repeat_interleave(q_lens)
    positions = torch.arange(len(request)) - query_start_loc[:-1][request]
    pages = block_table[request, positions // page_size].long()
    return pages * page_size + positions % page_size


def all_in_the_first_row(block_table, query_start_loc, seq_lens, page_size):
    _, positions = positions_of(query_start_loc, seq_lens)
    pages = block_table[0, positions // page_size] if len(seq_lens) else positions
    return pages.long() * page_size + positions % page_size


def counts_the_starts(block_table, query_start_loc, seq_lens, page_size):
    """Finds a row's request by a running count of starts; two at one place count once."""
    starts = torch.zeros(int(query_start_loc[-1]), dtype=torch.int64)
    starts[query_start_loc[1:-1]] = 1
    request = starts.cumsum(0)
    positions = torch.arange(len(starts)) + (seq_lens - query_start_loc[1:])[request]
    pages = block_table[request, positions // page_size].long()
    return pages * page_size + positions % page_size


def shifts_by_bits(block_table, query_start_loc, seq_lens, page_size):
    """A page size of 1 has no bits to mask with, and the mask is written as if it had one."""
    request, positions = positions_of(query_start_loc, seq_lens)
    bits = max(1, page_size.bit_length() - 1)
    pages = block_table[request, positions >> bits].long()
    return (pages << bits) + (positions & ((1 << bits) - 1))


def wraps_in_int32(block_table, query_start_loc, seq_lens, page_size):
    request, positions = positions_of(query_start_loc, seq_lens)
    pages = block_table[request, positions // page_size]
    return (pages * page_size + (positions % page_size).int()).long()


def joins_pieces(block_table, query_start_loc, seq_lens, page_size):
    pieces = []
    for r, length in enumerate(seq_lens.tolist()):
        q_len = int(query_start_loc[r + 1] - query_start_loc[r])
        positions = torch.arange(length - q_len, length)
        pages = block_table[r, positions // page_size].long()
        pieces.append(pages * page_size + positions % page_size)
    return torch.cat(pieces)


def by_request(take):
    """A gather that takes each request's rows in its own way."""

    def gather_batch(cache, block_table, seq_lens):
        pieces = [take(cache, row, int(n)) for row, n in zip(block_table, seq_lens, strict=True)]
        return torch.cat(pieces)

    return gather_batch


def pages_in_order(cache, row, length):
    """Ignores the table."""
    return cache.flatten(0, 1)[:length]


def one_row_of_the_table(cache, block_table, seq_lens):
    rows = cache[block_table[0, :-1].long()].flatten(0, 1)
    return torch.cat([rows[: int(n)] for n in seq_lens])


def whole_pages(cache, row, length):
    return cache[row[: -(-length // cache.shape[1])].long()].flatten(0, 1)


def one_page_too_many(cache, row, length):
    """Rounds up where nothing is left over, and looks up what stands behind."""
    return cache[row[: length // cache.shape[1] + 1].long()].flatten(0, 1)[:length]


def at_least_one(cache, row, length):
    pages = max(1, -(-length // cache.shape[1]))
    return cache[row[:pages].long()].flatten(0, 1)[:length]


def each_page_once(cache, block_table, seq_lens):
    """Gives a page to the request that names it last."""
    page_size = cache.shape[1]
    owner = {}
    for r, length in enumerate(seq_lens.tolist()):
        for i, page in enumerate(block_table[r, : -(-length // page_size)].tolist()):
            owner[page] = (r, i * page_size, min(length - i * page_size, page_size))
    order = sorted(owner, key=lambda page: owner[page][:2])
    return torch.cat([cache[page, : owner[page][2]] for page in order])


def float_rows(cache, block_table, seq_lens):
    """Copies into a float tensor of two dimensions."""
    page_size = cache.shape[1]
    out = torch.zeros(int(seq_lens.sum()), cache.shape[2])
    first = 0
    for r, length in enumerate(seq_lens.tolist()):
        for p in range(length):
            out[first + p] = cache[int(block_table[r, p // page_size]), p % page_size]
        first += length
    return out


def assumes_contiguous(cache, block_table, seq_lens):
    """Computes addresses from the shape."""
    page_size = cache.shape[1]
    request = torch.arange(len(seq_lens)).repeat_interleave(seq_lens)
    positions = torch.arange(len(request)) - (seq_lens.cumsum(0) - seq_lens)[request]
    slots = block_table[request, positions // page_size].long() * page_size + positions % page_size
    row = cache.shape[2:].numel()
    flat = torch.as_strided(cache, (cache.shape[0] * page_size, row), (row, 1))
    return flat[slots].reshape(-1, *cache.shape[2:])


WRONG_04 = [
    ("04-new-slots", in_int32, "a prompt in page 0", "expected a int64 tensor"),
    ("04-new-slots", positions_as_slots, "a prompt over two pages", "expected [12, 13, 14, 15, 4"),
    ("04-new-slots", neighbours_of_the_first, "a prompt over two pages", "[12, 13, 14, 15, 16"),
    ("04-new-slots", from_the_start, "one decode step", "[12], expected [6]"),
    ("04-new-slots", all_in_the_first_row, "decode, chunk, verifier", ""),
    ("04-new-slots", counts_the_starts, "a request without new tokens", ""),
    ("04-new-slots", shifts_by_bits, "pages of one token", ""),
    ("04-new-slots", wraps_in_int32, "a slot beyond 2 to the 31", "expected [511, 2560000000]"),
    ("04-new-slots", joins_pieces, "no requests", "it raised"),
    ("04-gather-batch", by_request(pages_in_order), "one full page", "row 0"),
    ("04-gather-batch", by_request(whole_pages), "a page used in part", "shape [8, 2]"),
    ("04-gather-batch", by_request(one_page_too_many), "one full page", "it raised IndexError"),
    ("04-gather-batch", one_row_of_the_table, "three lengths", "row 10"),
    ("04-gather-batch", by_request(at_least_one), "a length of 0", "it raised IndexError"),
    ("04-gather-batch", each_page_once, "a page that two requests share", "shape [9, 2]"),
    ("04-gather-batch", float_rows, "rows of heads, in bytes", "it raised RuntimeError"),
    ("04-gather-batch", assumes_contiguous, "a page that stores its heads first", "row 0"),
]
