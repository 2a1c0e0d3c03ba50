"""The ladder: the table of rungs as data, and the climb that checks each against the one below."""

from mla_ref.ladder.rungs import RUNGS, Rung, where

__all__ = ["RUNGS", "Rung", "where"]
