"""The exercises of all lessons, by id."""

from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise
from mla_ref.teaching.exercises.lesson_00 import COMPARE
from mla_ref.teaching.exercises.lesson_01 import OFFSET_MASK, RAGGED_LENS
from mla_ref.teaching.exercises.lesson_02 import MERGE
from mla_ref.teaching.exercises.lesson_02_tiles import ADD_TILE
from mla_ref.teaching.exercises.lesson_03 import DECODE_FLOOR, TOKEN_BYTES
from mla_ref.teaching.exercises.lesson_04 import GATHER_BATCH, NEW_SLOTS
from mla_ref.teaching.exercises.lesson_05 import CONVERT_WEIGHT, TO_HALVES
from mla_ref.teaching.exercises.lesson_06 import SOFTMAX_SCALE, UP_PROJECT
from mla_ref.teaching.exercises.lesson_07 import ABSORB_QUERY, ABSORBED_ATTENTION
from mla_ref.teaching.exercises.lesson_08 import PACK, UNPACK
from mla_ref.teaching.exercises.lesson_09 import INDEX_SCORES, TOPK
from mla_ref.teaching.exercises.lesson_10 import SPARSE
from mla_ref.teaching.exercises.lesson_11 import ACCEPT_LENGTH, ACCEPT_OR_RECOVER
from mla_ref.teaching.exercises.lesson_12 import IS_VERIFIER, ROW_LENS
from mla_ref.teaching.exercises.lesson_13 import LOCAL_LENS
from mla_ref.teaching.exercises.lesson_13_merge import MERGE_RANKS
from mla_ref.teaching.exercises.lesson_14 import ADD_TILE_SWAPPED
from mla_ref.teaching.exercises.lesson_15 import WARP_PRODUCT
from mla_ref.teaching.exercises.lesson_15_turns import COUNT_TURNS
from mla_ref.teaching.exercises.lesson_16 import BENCH

EXERCISES: dict[str, Exercise] = {
    exercise.id: exercise
    for exercise in (
        COMPARE,
        OFFSET_MASK,
        RAGGED_LENS,
        MERGE,
        ADD_TILE,
        TOKEN_BYTES,
        DECODE_FLOOR,
        NEW_SLOTS,
        GATHER_BATCH,
        TO_HALVES,
        CONVERT_WEIGHT,
        UP_PROJECT,
        SOFTMAX_SCALE,
        ABSORB_QUERY,
        ABSORBED_ATTENTION,
        PACK,
        UNPACK,
        INDEX_SCORES,
        TOPK,
        SPARSE,
        ACCEPT_LENGTH,
        ACCEPT_OR_RECOVER,
        IS_VERIFIER,
        ROW_LENS,
        LOCAL_LENS,
        MERGE_RANKS,
        ADD_TILE_SWAPPED,
        WARP_PRODUCT,
        COUNT_TURNS,
        BENCH,
    )
}

__all__ = ["EXERCISES", "Case", "Complaint", "Exercise"]
