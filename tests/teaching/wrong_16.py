"""Wrong answers to the exercise of lesson 16, each with the case that must catch it."""

import statistics


def bench(
    run, check, flush, synchronize, now, repeats, *,
    wait=True, wait_before=True, flush_each=True, flush_once=False, flush_inside=False,
    check_first=True, check_last=True, poison=True, summary=statistics.median, error=ValueError,
):  # fmt: skip
    """The right answer, with parts that its callers leave out."""
    output = run()
    synchronize()
    if check_first and not check(output):
        raise error("the first output is wrong")
    samples = []
    if flush_once:
        flush()
    for _ in range(repeats):
        if poison:
            output.fill_(float("nan"))
        if flush_each and not flush_inside:
            flush()
        if wait_before:
            synchronize()
        start = now()
        if flush_inside:
            flush()
        output = run()
        if wait:
            synchronize()
        samples.append(now() - start)
    if check_last and not check(output):
        raise error("the last output is wrong")
    return summary(samples)


def times_the_launch(*args):
    return bench(*args, wait=False)


def times_the_flush(*args):
    return bench(*args, wait_before=False)


def flushes_on_the_clock(*args):
    return bench(*args, flush_inside=True)


def keeps_the_cache_warm(*args):
    return bench(*args, flush_each=False)


def flushes_once(*args):
    return bench(*args, flush_each=False, flush_once=True)


def microseconds(*args):
    return bench(*args) * 1e6


def all_samples(*args):
    return bench(*args, summary=list)


def counts_the_first_call(run, check, flush, synchronize, now, repeats):
    """In place of the first timed one, which nobody misses while all are alike."""
    samples, output = [], None
    for _ in range(repeats + 1):
        if output is not None:
            output.fill_(float("nan"))
        flush()
        synchronize()
        start = now()
        output = run()
        synchronize()
        samples.append(now() - start)
    return max(samples)


def mean(*args):
    return bench(*args, summary=statistics.fmean)


def upper_of_the_middle(*args):
    return bench(*args, summary=lambda samples: sorted(samples)[len(samples) // 2])


def fastest(*args):
    return bench(*args, summary=min)


def never_looks_at_the_last_output(*args):
    return bench(*args, check_last=False)


def checks_nothing(*args):
    return bench(*args, check_first=False, check_last=False)


def trusts_what_was_kept(*args):
    return bench(*args, poison=False)


ID = "16-bench"
WRONG_16 = [
    (ID, times_the_launch, "one timed call", "is 5 us, expected 10 us"),
    (ID, times_the_flush, "one timed call", "expected 10 us"),
    (ID, flushes_on_the_clock, "one timed call", "expected 10 us"),
    (ID, keeps_the_cache_warm, "one timed call", "is 8 us, expected 10 us"),
    (ID, microseconds, "one timed call", "expected 10 us"),
    (ID, all_samples, "one timed call", "expected a float"),
    (ID, flushes_once, "five calls", "is 8 us, expected 10 us"),
    (ID, counts_the_first_call, "a first call", "expected 10 us"),
    (ID, mean, "one of five", "expected 10 us"),
    (ID, upper_of_the_middle, "two of four", "is 15 us, expected 12.5 us"),
    (ID, fastest, "two of four", "is 10 us, expected 12.5 us"),
    (ID, checks_nothing, "wrong from the first", "expected a ValueError: the first"),
    (ID, never_looks_at_the_last_output, "right at first", "expected a ValueError"),
    (ID, trusts_what_was_kept, "the first output kept", "was not computed again"),
]
