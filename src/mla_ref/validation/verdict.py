"""What a replay shows, in a sentence that claims no more than its controls support.

Without a row nothing is proved. With rows there are three questions, in this order:

1. Is every logit a number? A comparison with NaN is false, whatever is asked.
2. Are decode and extend apart? They may be as far apart as decode is from itself with other splits
   (the null control), times `FACTOR`; and token-wise attention as far from both as they are from
   one another, times the same. A difference that is found needs no control to be believed, but
   rows: an FP8 cache turns a rounding into another byte now and then, and the few rows in which
   that happens carry the mean. So the limit must be passed by two standard errors of the mean.
3. Could the validation have seen an error? If decode that hides earlier candidates (the positive
   control) is not `SENSITIVITY` times as far off as the null control, that decode and extend agree
   proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from mla_ref.validation.measure import PairStatistics, rounded
from mla_ref.validation.replay import Replay, RowPlace

# KL grows with the square of the logits' error. The null control merges other pieces than decode;
# extend has no pieces at all, so its error may be three times as large: 10. It is also the middle,
# in logarithms, between the null control and the least positive control that counts. The rule about
# standard errors was written after rows of the embedded prompts had been seen, so those are no
# independent test of it: other prompts are (`--prompts`).
FACTOR = 10.0
SENSITIVITY = 100.0
HOLDS, FAILS, PROVES_NOTHING = "holds", "does not hold", "proves nothing"
# Pairs that must be close.
CLOSE = ("extend || decode", "token-wise || decode", "token-wise || extend")


@dataclass(frozen=True)
class TopChange:
    """A row whose best token is another one by decode than by extend.

    Attributes:
        place: Which row.
        gap: How far the two tokens' logits lie apart in extend.
        tie: Whether that is less than the null control moves such a distance.
    """

    place: RowPlace
    gap: float
    tie: bool

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.place.script!r}, step {self.place.step}, row {self.place.position}: logits "
            f"{self.gap:.1e} apart, {'a tie' if self.tie else 'no tie'}"
        )


@dataclass(frozen=True)
class Verdict:
    """What holds.

    Attributes:
        status: `HOLDS`, `FAILS` or `PROVES_NOTHING`.
        reason: Why, in a sentence.
        yardstick: The mean KL that is taken for noise.
        yardstick_of: The pair that it is of: the null control; or, where that has the same bits as
            decode, token-wise attention against decode or extend, whichever is closer: if one of
            the kernels is wrong, its error is not what noise is.
        gap_noise: The most that this pair moves the distance of a row's two best tokens.
        top1_changes: Rows whose best token differs between decode and extend.
    """

    status: str
    reason: str
    yardstick: float
    yardstick_of: str
    gap_noise: float
    top1_changes: tuple[TopChange, ...]

    @property
    def passed(self) -> bool:
        """Whether it holds."""
        return self.status == HOLDS

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "status": self.status,
            "reason": self.reason,
            "yardstick": rounded(self.yardstick),
            "yardstick_of": self.yardstick_of,
            "factor": FACTOR,
            "sensitivity": SENSITIVITY,
            "gap_noise": rounded(self.gap_noise),
            "top1_changes": [
                {
                    "script": change.place.script,
                    "step": change.place.step,
                    "position": change.place.position,
                    "gap": rounded(change.gap),
                    "tie": change.tie,
                }
                for change in self.top1_changes
            ],
        }


def judge(found: Replay) -> Verdict:
    """Weigh the rows of one configuration."""
    pairs = found.pairs
    noise = pairs["decode || null"]
    if noise.identical:
        truth = (pairs["token-wise || decode"], pairs["token-wise || extend"])
        noise = min(truth, key=lambda pair: pair.kl.mean)
    yardstick = noise.kl.mean
    apart = pairs["extend || decode"]
    changes = tuple(
        TopChange(found.places[row], apart.rows[row].gap, apart.rows[row].gap <= noise.gap_noise)
        for row in apart.top1_changes
    )

    def verdict(status: str, reason: str) -> Verdict:
        return Verdict(status, reason, yardstick, noise.name, noise.gap_noise, changes)

    if not found.num_rows:
        return verdict(PROVES_NOTHING, "no verifier row was measured")
    if broken := _not_finite(pairs.values(), found.places):
        return verdict(FAILS, broken)
    for name in CLOSE:
        kl, base = pairs[name].kl, noise
        if name != apart.name and apart.kl.mean > yardstick:
            base = apart
        limit = FACTOR * base.kl.mean
        if kl.mean > limit:
            said = (
                f"KL({name}) is {kl.mean:.1e} on average, more than {FACTOR:.0f} times the "
                f"{base.kl.mean:.1e} of {base.name}"
            )
            # Rows of one text are alike, so the true error is rather larger than this one.
            if kl.mean - 2 * kl.stdev / sqrt(kl.count) > limit:
                return verdict(FAILS, said)
            few = f", but a few of the {kl.count} rows carry that: take more rows"
            return verdict(PROVES_NOTHING, said + few)
    swapped = [change for change in changes if not change.tie]
    if swapped:
        return verdict(
            FAILS,
            f"the best token of {_rows(len(swapped))} is another one, and the two were no tie",
        )
    positive = pairs["decode || positive"].kl.mean
    # Turned round, so that a NaN on either side does not pass.
    if positive <= 0 or not positive >= SENSITIVITY * yardstick:
        return verdict(
            PROVES_NOTHING,
            f"hiding earlier candidates moves the logits by a mean KL of {positive:.1e}, less than "
            f"{SENSITIVITY:.0f} times the {yardstick:.1e} of {noise.name}: such an error would not "
            "be seen",
        )
    return verdict(
        HOLDS,
        f"KL({apart.name}) is {apart.kl.mean:.1e} on average, within {FACTOR:.0f} times the "
        f"{yardstick:.1e} of {noise.name}; hiding earlier candidates gives {positive:.1e}",
    )


def headline(found: Replay, verdict: Verdict, what: str) -> str:
    """The first line: what was compared, and whether it holds.

    Args:
        found: The replay.
        verdict: Its verdict.
        what: The configuration, in words.
    """
    compared = f"decode against extend on {found.num_rows:,} verifier rows ({what})"
    if verdict.status == HOLDS:
        return f"The same to rounding: {compared}. {_sentence(verdict.reason)}"
    if verdict.status == FAILS:
        return f"NOT the same: {compared}. {_sentence(verdict.reason)}"
    return f"Proves nothing: {compared}. {_sentence(verdict.reason)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _rows(count: int) -> str:
    return f"{count:,} row" + "s" * (count != 1)


def _not_finite(pairs: Any, places: Sequence[RowPlace]) -> str:
    """What is said of logits that are no numbers; empty if all are."""
    said = []
    pair: PairStatistics
    for pair in pairs:
        if pair.not_finite:
            place = places[pair.not_finite[0]]
            said.append(
                f"{_rows(len(pair.not_finite))} of {pair.name} (first: {place.script!r}, step "
                f"{place.step}, row {place.position})"
            )
    return f"logits are NaN or infinite in {', '.join(said)}" if said else ""
