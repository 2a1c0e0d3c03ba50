"""The exercises of all lessons, by id."""

from mla_ref.teaching.exercises.exercise import Case, Complaint, Exercise
from mla_ref.teaching.exercises.lesson_01 import OFFSET_MASK, RAGGED_LENS
from mla_ref.teaching.exercises.lesson_02 import MERGE
from mla_ref.teaching.exercises.lesson_02_tiles import ADD_TILE

EXERCISES: dict[str, Exercise] = {
    exercise.id: exercise for exercise in (OFFSET_MASK, RAGGED_LENS, MERGE, ADD_TILE)
}

__all__ = ["EXERCISES", "Case", "Complaint", "Exercise"]
