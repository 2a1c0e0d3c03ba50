"""Wrong answers to the exercises of lesson 15, each with the case that must catch it."""

import torch

LANE = torch.arange(32)
G, T = LANE[:, None] // 4, LANE[:, None] % 4
K = 2 * T + torch.tensor([0, 1, 8, 9])
A_ROWS = torch.stack([G, G, G + 8, G + 8] * 2, dim=2)[:, 0]
A_COLUMNS = torch.cat([2 * T, 2 * T + 1] * 2 + [2 * T + 8, 2 * T + 9] * 2, dim=1)
C_ROWS = torch.cat([G, G, G + 8, G + 8], dim=1)
C_COLUMNS = torch.cat([2 * T, 2 * T + 1] * 2, dim=1)


def product(c, a, b, *, a_order=range(8), b_order=range(4), c_order=range(4), b_rows=K, b_column=G):
    """The right answer, with maps that its callers exchange."""
    whole_a, whole_b = torch.zeros(16, 16), torch.zeros(16, 8)
    whole_a[A_ROWS, A_COLUMNS] = a[:, list(a_order)]
    whole_b[b_rows, b_column] = b[:, list(b_order)]
    return c + (whole_a @ whole_b)[C_ROWS, C_COLUMNS][:, list(c_order)]


def replaces_c(c, a, b):
    return product(torch.zeros_like(c), a, b)


def column_t_of_b(c, a, b):
    """B by rows, as A is: lane 4 g + t at row g and its columns."""
    whole_a, whole_b = torch.zeros(16, 16), torch.zeros(16, 8)
    whole_a[A_ROWS, A_COLUMNS] = a
    whole_b[C_ROWS, C_COLUMNS] = b
    return c + (whole_a @ whole_b)[C_ROWS, C_COLUMNS]


def rows_of_a_later(c, a, b):
    """Numbers 2 and 3 of A at k + 8, and 4 and 5 at row g + 8."""
    return product(c, a, b, a_order=[0, 1, 4, 5, 2, 3, 6, 7])


def halves_of_b_exchanged(c, a, b):
    return product(c, a, b, b_order=[2, 3, 0, 1])


def c_by_columns(c, a, b):
    return product(c, a, b, c_order=[0, 2, 1, 3])


def eight_of_k(c, a, b):
    """The shape m16n8k8 of older instructions."""
    return product(c, torch.cat([a[:, :4], a[:, 4:] * 0], dim=1), b)


def skips_nan(c, a, b):
    return product(c, torch.nan_to_num(a), b)


def sums_k_in_halves_of_its_own(c, a, b):
    """Right with one number, wrong by rounding: half precision."""
    return product(c, a.half().float(), b.half().float())


def a_lane_by_itself(c, a, b):
    """As if a lane multiplied what it holds."""
    first, second = a[:, [0, 1, 4, 5]] * b, a[:, [2, 3, 6, 7]] * b
    return c + torch.stack(
        [first.sum(1), first.sum(1) * 0, second.sum(1), second.sum(1) * 0], dim=1
    )


def banks_of_a_quarter(addresses, share=True, modulo=8, whole=False):
    total = 0
    for quarter in [addresses // 16] if whole else (addresses // 16).split(8):
        pieces = quarter.unique() if share else quarter
        total += int(torch.bincount(pieces % modulo).max())
    return total


def as_a_tensor(addresses):
    return torch.tensor(4)


def best_case(addresses):
    return 4


def one_lane_at_a_time(addresses):
    return 32


def nobody_shares(addresses):
    return banks_of_a_quarter(addresses, share=False)


def the_whole_warp_at_once(addresses):
    return banks_of_a_quarter(addresses, whole=True)


def sixteen_banks(addresses):
    return banks_of_a_quarter(addresses, modulo=16)


def the_worst_quarter_four_times(addresses):
    quarters = (addresses // 16).split(8)
    return 4 * max(int(torch.bincount(pieces.unique() % 8).max()) for pieces in quarters)


def any_conflict_costs_eight(addresses):
    """Takes a stride for good or bad, nothing between."""
    counts = [torch.bincount(p.unique() % 8).max() for p in (addresses // 16).split(8)]
    return sum(1 if int(count) == 1 else 8 for count in counts)


def shares_only_if_all_do(addresses):
    total = 0
    for quarter in (addresses // 16).split(8):
        alike = len(quarter.unique()) == 1
        total += 1 if alike else int(torch.bincount(quarter % 8).max())
    return total


def powers_of_two_conflict(addresses):
    """Looks at the distance of neighbours alone."""
    step = int(addresses[1] - addresses[0]) // 16
    return 4 if step == 0 else 4 * min(8, step & -step)


def any_stride_conflicts(addresses):
    """Takes every row that is not 16 bytes for a conflict of all eight lanes."""
    return 32 if int(addresses[1] - addresses[0]) > 16 else 4


PRODUCT, TURNS = "15-warp-product", "15-count-turns"
WRONG_15 = [
    (PRODUCT, replaces_c, "A and B are 0", "is 0, expected"),
    (PRODUCT, a_lane_by_itself, "one number: row 3", "is 0, expected 6"),
    (PRODUCT, column_t_of_b, "one number: row 3", "is 0, expected 6"),
    (PRODUCT, rows_of_a_later, "one number: row 11", "is 0, expected 6"),
    (PRODUCT, c_by_columns, "one number: row 3", "is 0, expected 6"),
    (PRODUCT, halves_of_b_exchanged, "one number: row 0", "is 0, expected 6"),
    (PRODUCT, eight_of_k, "one number: row 2", "is 0, expected 6"),
    (PRODUCT, sums_k_in_halves_of_its_own, "random numbers", "the result at"),
    (PRODUCT, skips_nan, "NaN in row 9", "NaN"),
    (TURNS, as_a_tensor, "512 bytes in a row", "expected an int"),
    (TURNS, the_whole_warp_at_once, "all lanes at one", "is 1, expected 4"),
    (TURNS, one_lane_at_a_time, "512 bytes in a row", "is 32, expected 4"),
    (TURNS, best_case, "a row of 512 bytes", "is 4, expected 32"),
    (TURNS, sixteen_banks, "two rows of 640", "is 4, expected 8"),
    (TURNS, nobody_shares, "all lanes at one address", "is 32, expected 4"),
    (TURNS, any_stride_conflicts, "rows of 656 bytes", "is 32, expected 4"),
    (TURNS, powers_of_two_conflict, "two rows of 640", "is 4, expected 8"),
    (TURNS, any_conflict_costs_eight, "two rows of 640", "is 32, expected 8"),
    (TURNS, the_worst_quarter_four_times, "the first quarter apart", "is 32, expected 25"),
    (TURNS, shares_only_if_all_do, "pairs of lanes", "is 32, expected 16"),
]
