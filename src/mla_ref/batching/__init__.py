"""The host's side of a step: which tokens of which requests run, and where their rows go."""

from mla_ref.batching.step import Step

__all__ = ["Step"]
