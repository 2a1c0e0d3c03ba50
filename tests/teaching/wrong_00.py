"""Wrong answers to the exercise of lesson 00, each with the case that must catch it."""

import torch

from mla_ref.teaching import planted


def compare(
    actual, expected, max_abs, *,
    absolute=True, strict=False, nan_is_wrong=False, inf_minus_inf=False, sign_of_inf=True,
    mismatch_first=True, last=False, wide=True, empty=True, shapes=True, tensors=False,
    one_way=False,
):  # fmt: skip
    """The right answer, with parts that its callers leave out."""
    if shapes and actual.shape != expected.shape:
        raise ValueError
    if not empty and not actual.numel():
        actual.max()
    if not actual.numel():
        return True, ()
    a, e = (actual.double(), expected.double()) if wide else (actual, expected)
    a, e = torch.broadcast_tensors(a, e)
    nan = ~a.isnan() & e.isnan() if one_way == "expected" else a.isnan() != e.isnan()
    nan = a.isnan() & ~e.isnan() if one_way == "actual" else nan
    nan = a.isnan() | e.isnan() if nan_is_wrong else nan
    inf = (a.isinf() | e.isinf()) & (a != e)
    inf = a.isinf() != e.isinf() if not sign_of_inf else inf
    inf = a.isinf() | e.isinf() if inf_minus_inf else inf
    mismatch = nan | inf & ~a.isnan() & ~e.isnan()
    difference = (a - e).abs() if absolute else a - e
    difference = torch.where(a.isfinite() & e.isfinite(), difference, 0.0)
    large = difference >= max_abs if strict else difference > max_abs
    passed = not bool((mismatch | large).any())
    ranked = torch.where(mismatch, torch.inf if mismatch_first else 1.0, difference).flatten()
    places = (ranked == ranked.max()).nonzero().flatten()
    place = int(places[-1 if last else 0])
    worst = torch.unravel_index(torch.tensor(place), difference.shape)
    return passed, worst if tensors else tuple(int(i) for i in worst)


def only_a_bool(actual, expected, max_abs):
    return compare(actual, expected, max_abs)[0]


def index_of_tensors(*args):
    return compare(*args, tensors=True)


def flat_index(actual, expected, max_abs):
    passed, _ = compare(actual, expected, max_abs)
    return passed, (int((actual.double() - expected.double()).abs().argmax()),)


def signed(*args):
    return compare(*args, absolute=False)


def below_the_limit(*args):
    return compare(*args, strict=True)


def looks_for_large_differences(actual, expected, max_abs):
    """The public bug, with an index."""
    passed = planted.no_difference_above(actual, expected, max_abs)
    return passed, compare(actual, expected, max_abs)[1]


def looks_for_nan_in_the_result_only(*args):
    return compare(*args, one_way="actual")


def no_nan_at_all(*args):
    return compare(*args, nan_is_wrong=True)


def every_infinity_is_wrong(*args):
    return compare(*args, inf_minus_inf=True)


def any_infinity_will_do(*args):
    return compare(*args, sign_of_inf=False)


def largest_difference_before_mismatch(*args):
    return compare(*args, mismatch_first=False)


def last_of_all(*args):
    return compare(*args, last=True)


def in_its_own_dtype(actual, expected, max_abs):
    return compare(actual, expected, max_abs, wide=False)


def at_least_one_dimension(actual, expected, max_abs):
    passed, worst = compare(actual, expected, max_abs)
    return passed, worst or (0,) if actual.numel() else ()


def largest_of_nothing(*args):
    return compare(*args, empty=False)


def broadcasts(*args):
    return compare(*args, shapes=False)


ID = "00-compare"
WRONG_00 = [
    (ID, only_a_bool, "one number too large", "expected the tuple (passed, worst)"),
    (ID, index_of_tensors, "one number too large", "expected a tuple of int"),
    (ID, flat_index, "one number too large", "worst is (7,), expected (2, 1)"),
    (ID, signed, "one number too small", "passed is True, expected False"),
    (ID, below_the_limit, "off by exactly", "passed is False, expected True"),
    (ID, looks_for_large_differences, "NaN in the result", "passed is True, expected False"),
    (ID, looks_for_nan_in_the_result_only, "NaN expected", "passed is True, expected False"),
    (ID, no_nan_at_all, "NaN in both", "passed is False, expected True"),
    (ID, every_infinity_is_wrong, "-inf in both", "passed is False, expected True"),
    (ID, any_infinity_will_do, "+inf where", "passed is True, expected False"),
    (ID, largest_difference_before_mismatch, "NaN in one place", "worst is (0, 0)"),
    (ID, last_of_all, "several mismatches", "worst is (3, 2), expected (1, 1)"),
    (ID, in_its_own_dtype, "two float16", "worst is (1,), expected (2,)"),
    (ID, at_least_one_dimension, "a single number", "worst is (0,), expected ()"),
    (ID, largest_of_nothing, "nothing to compare", "it raised"),
    (ID, broadcasts, "one row against four", "expected a ValueError"),
]
