"""The first exercise of lesson 13: how many keys a rank holds."""

import torch

from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise, Function
from mla_ref.teaching.exercises.expect import expect_tensor


def _counted(length: int, rank: int, world: int, interleave: int) -> int:
    """Token by token, so that nothing here gives the formula away to the reader."""
    held, owner, left = 0, 0, interleave
    for _ in range(length):
        held += owner == rank
        left -= 1
        if left == 0:
            owner, left = (owner + 1) % world, interleave
    return held


def _lens_case(
    name: str,
    lens: tuple[int, ...],
    world: int,
    interleave: int,
    why: str,
    *,
    rows: bool = False,
    expected: tuple[int, ...] | None = None,
) -> Case:
    """All ranks of a world.

    `rows` passes the lengths together, as those of a step's rows; else one after the other.
    `expected` is each rank's answer where counting would take too long.
    """

    def check(local_lens: Function) -> None:
        for rank in range(world):
            for some in [lens] if rows else [(length,) for length in lens]:
                if expected is None:
                    right = [_counted(length, rank, world, interleave) for length in some]
                else:
                    right = [expected[rank]]
                given = torch.tensor(some, dtype=torch.int64)
                result = local_lens(given, rank, world, interleave)
                held = expect_tensor(result, torch.int64, (len(some),), "the result")
                if held.tolist() != right:
                    raise Complaint(
                        f"rank {rank} of {world} with interleave {interleave} and lens "
                        f"{list(some)}: the result is {held.tolist()}, expected {right}"
                    )

    return Case(name, why, check)


LOCAL_LENS = Exercise(
    id="13-local-lens",
    title="How many keys are mine?",
    task=(
        "Write `my_local_lens(lens, rank, world, interleave)`: for each global length, how many of "
        "the first so many tokens of a request this rank holds, as int64. `interleave` "
        "neighbouring positions stay together, and such chunks are dealt to the ranks in turn, "
        "beginning with rank 0. Lengths may come in any order and may be 0; do without a loop over "
        "tokens."
    ),
    signature=(
        'def my_local_lens(\n    lens: Int[Tensor, " rows"],\n    rank: int,\n    world: int,\n'
        '    interleave: int,\n) -> Int[Tensor, " rows"]:'
    ),
    cases=(
        _lens_case(
            "one rank holds everything",
            (0, 1, 37),
            1,
            4,
            "The plain cache is the smallest world.",
        ),
        _lens_case(
            "two ranks, an even length",
            (2, 8, 100),
            2,
            1,
            "Half each.",
        ),
        _lens_case(
            "ten tokens on four ranks",
            (10,),
            4,
            1,
            "3, 3, 2, 2: the first ranks get what is left over. Rounding down loses the newest "
            "tokens, rounding up reads slots that nobody wrote.",
        ),
        _lens_case(
            "a request shorter than the world",
            (0, 1, 3),
            8,
            1,
            "Some ranks hold nothing. Their number is 0, never negative (sglang#33325).",
        ),
        _lens_case(
            "chunks of four on two ranks",
            (10, 3, 4, 5, 8),
            2,
            4,
            "Ten tokens are 6 and 4: whole chunks are dealt, and the last may be begun.",
        ),
        _lens_case(
            "the rows of a verifier",
            (17, 18, 19, 20),
            4,
            1,
            "Each draft makes the share of one rank longer and leaves the others. A rank that "
            "counts down by one a row from its last length loses its newest keys (ROCm/ATOM#2118).",
            rows=True,
        ),
        _lens_case(
            "a verifier across the end of a chunk",
            (63, 64, 65, 66),
            4,
            16,
            "The new keys of the first rows lie on the last rank, the others on the first.",
            rows=True,
        ),
        _lens_case(
            "after two drafts were refused",
            (20, 18),
            4,
            1,
            "From the global length again. What two refused drafts mean for a rank depends on "
            "where the request ended (vllm#50391).",
            rows=True,
        ),
        _lens_case(
            "three ranks, chunks of two, every length to 40",
            tuple(range(41)),
            3,
            2,
            "No power of two, where a mask of bits would do for the remainder.",
            rows=True,
        ),
        _lens_case(
            "16,777,221 tokens",
            (2**24 + 5,),
            2,
            4,
            "Not every whole number above 16,777,216 is a float32.",
            expected=(2**23 + 4, 2**23 + 1),
        ),
    ),
)
