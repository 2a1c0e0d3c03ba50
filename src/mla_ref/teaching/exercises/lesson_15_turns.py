"""Exercise of lesson 15: in how many turns shared memory serves a warp."""

from typing import Any

import torch
from torch import Tensor

from mla_ref.checks import describe
from mla_ref.teaching import warp_memory
from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function


def _check(count_turns: Function, addresses: Tensor) -> None:
    found: Any = count_turns(addresses)
    if isinstance(found, bool) or not isinstance(found, int):
        raise Complaint(f"the result is {describe(found)}, expected an int")
    expected = sum(warp_memory.turns(addresses.numpy()))
    if found != expected:
        raise Complaint(f"the result is {found}, expected {expected}")


def _case(name: str, addresses: Tensor, why: str) -> Case:
    def check(count_turns: Function) -> None:
        _check(count_turns, addresses)

    return Case(name, why, check)


_LANE = torch.arange(32)

COUNT_TURNS = Exercise(
    id="15-count-turns",
    title="Banks",
    task=(
        "Write `count_turns(addresses)`: in how many turns shared memory serves a load of 16 bytes "
        "by each of 32 lanes, as an int. Lanes are served eight at a time, in order. In a turn "
        "there is one piece of 16 bytes for each remainder of the address modulo 128; lanes that "
        "want the very same piece share it."
    ),
    signature='def count_turns(addresses: Int[Tensor, " 32"]) -> int:',
    cases=(
        _case(
            "512 bytes in a row",
            _LANE * 16,
            "The best there is: 8 lanes are 128 bytes, and a warp takes four turns.",
        ),
        _case(
            "a row of 512 bytes for each lane",
            _LANE * 512,
            "512 is 0 modulo 128: all want the same banks, so each lane is served alone.",
        ),
        _case(
            "all lanes at one address",
            torch.full((32,), 96),
            "A piece that is read once reaches everybody.",
        ),
        _case(
            "rows of 656 bytes, a lane each",
            _LANE * 656,
            "656 is 41 pieces, and 41 is odd: eight rows in succession fall on eight remainders.",
        ),
        _case(
            "two rows of 640 bytes, pieces side by side",
            _LANE // 4 * 640 + _LANE % 4 * 16,
            "Two lanes of each quarter want pieces 640 bytes apart, which is 5 times 128.",
        ),
        _case(
            "the first quarter apart, the others together",
            torch.where(_LANE < 8, _LANE * 16, _LANE * 128),
            "Quarters are served one after the other: what one needs costs the others nothing.",
        ),
        _case(
            "pairs of lanes that share, 128 bytes apart",
            _LANE // 2 * 128,
            "Four different pieces of the same banks: four turns, not eight.",
        ),
    ),
)
