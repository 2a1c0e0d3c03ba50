"""Figures of the lessons. Each takes the reader's own data and returns a matplotlib Figure."""

from mla_ref.teaching.figures.errors import error_by_row
from mla_ref.teaching.figures.masks import mask_alignment, masks
from mla_ref.teaching.figures.merge_tree import merge_tree
from mla_ref.teaching.figures.online_softmax import running_softmax

__all__ = ["error_by_row", "mask_alignment", "masks", "merge_tree", "running_softmax"]
