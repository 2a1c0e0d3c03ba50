"""Running a model on requests: so far one request, greedily, with a paged cache."""

from mla_ref.engine.generate import NewToken, Prefilled, generate

__all__ = ["NewToken", "Prefilled", "generate"]
