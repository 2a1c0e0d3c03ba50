"""What is under test, in one form: a function, an object that declares its limits, or a backend.

A plain function is enough. An `Adapter` says more: what the kernel does not serve (those cases are
skipped and counted apart), in which base its LSE is, and in which precision it multiplies.
"""

import importlib
import inspect
import os
import sys
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from mla_ref.backends import PARTS, Backend, backend_names, find_backend
from mla_ref.checks import describe, require_choice, require_count

KINDS = ("decode", "extend", *PARTS)


class Skipped(unittest.SkipTest):
    """The case lies outside what the code under test declares. pytest reports it as a skip."""


@dataclass(frozen=True)
class Limits:
    """What a kernel is made for; None stands for everything.

    A case is moved inside the limits where the number that does not fit is not its point: a test of
    -1 entries runs with 64 heads on a kernel for 64 heads. Otherwise it is skipped.

    Attributes:
        heads: Numbers of query heads.
        page_sizes: Tokens a page.
        cache_formats: Of `mla_ref.backends.CACHE_FORMATS`.
        q_dtypes: By name: "bfloat16", "float32".
        topk_multiple: The width of an index list must be a multiple of this.
        strided: Whether q and the pages may have gaps between them.
    """

    heads: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    cache_formats: tuple[str, ...] | None = None
    q_dtypes: tuple[str, ...] | None = None
    topk_multiple: int = 1
    strided: bool = True

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_count("topk_multiple", self.topk_multiple, at_least=1)
        for name in ("heads", "page_sizes", "cache_formats", "q_dtypes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple) and value):
                raise TypeError(f"{name} must be None or a tuple that is not empty, got {value!r}")


@dataclass(frozen=True)
class Adapter:
    """What is under test. At least one of the eight functions, or a backend.

    Attributes:
        decode: `f(q, kv_cache, indices, counts=None, *, softmax_scale, sink=None, out=None,
            lse=None, out_dtype=None) -> (out, lse)`, see `mla_ref.backends.Plan`. Parameters from
            `counts` on may be missing; cases that need them are skipped.
        extend: The same signature.
        merge: As `mla_ref.numerics.merge_many`.
        cache_write: As `mla_ref.cache.write_fp8_rows`.
        convert: As `mla_ref.indexer.positions_to_slots`.
        index_scores: As `mla_ref.indexer.index_scores`.
        topk: As `mla_ref.indexer.select_topk`.
        sampler: As `mla_ref.speculative.rejection_sample`.
        backend: Makes a plan for each case; its plan's decode and extend are then used.
        limits: What the kernel is not made for.
        lse_base: "e" or "2".
        empty_lse: "-inf" or "+inf", the LSE of a row without a valid entry.
        maths: "float32", or "bfloat16" where weights and dequantised rows are rounded to bfloat16
            before the second product, as tensor cores take them. It sets the tolerance.
        topk_order: "sorted" as the contract says, or "any" for kernels that return a set.
    """

    decode: Callable[..., Any] | None = None
    extend: Callable[..., Any] | None = None
    merge: Callable[..., Any] | None = None
    cache_write: Callable[..., Any] | None = None
    convert: Callable[..., Any] | None = None
    index_scores: Callable[..., Any] | None = None
    topk: Callable[..., Any] | None = None
    sampler: Callable[..., Any] | None = None
    backend: Backend | None = None
    limits: Limits = field(default_factory=Limits)
    lse_base: str = "e"
    empty_lse: str = "-inf"
    maths: str = "float32"
    topk_order: str = "sorted"

    def __post_init__(self) -> None:
        """Raise an error that names the field."""
        require_choice("lse_base", self.lse_base, ("e", "2"))
        require_choice("empty_lse", self.empty_lse, ("-inf", "+inf"))
        require_choice("maths", self.maths, ("float32", "bfloat16"))
        require_choice("topk_order", self.topk_order, ("sorted", "any"))
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits must be a Limits, got {describe(self.limits)}")
        if not self.kinds:
            raise ValueError(f"an adapter must have a backend or one of {', '.join(KINDS)}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of case that can run."""
        served = ("decode", "extend") if self.backend else ()
        return tuple(k for k in KINDS if k in served or callable(getattr(self, k)))

    def function(self, kind: str) -> Callable[..., Any]:
        """The function for a kind; for a backend's decode and extend, see `Case`."""
        found = getattr(self, require_choice("kind", kind, KINDS))
        if found is None:
            raise Skipped(f"there is no {kind} to test")
        return found


def as_adapter(target: object, kind: str = "decode") -> Adapter:
    """Take a function, a backend, or an object with an adapter's attributes as an `Adapter`.

    Args:
        target: What is under test. A class is called without arguments first. A backend that rounds
            the operands of its products says so in an attribute `maths`, as an adapter does.
        kind: What a plain function does.
    """
    if isinstance(target, Adapter):
        return target
    if inspect.isclass(target):
        target = target()
    if isinstance(target, Backend):
        parts: dict[str, Any] = dict(target.parts)
        return Adapter(backend=target, maths=getattr(target, "maths", "float32"), **parts)
    given: dict[str, Any] = {
        f.name: getattr(target, f.name) for f in fields(Adapter) if hasattr(target, f.name)
    }
    if any(callable(given.get(k)) for k in KINDS):
        return Adapter(**given)
    if callable(target):
        given = {require_choice("kind", kind, KINDS): target}
        return Adapter(**given)
    raise TypeError(
        f"what is under test must be a function, a backend or an adapter, got {describe(target)}"
    )


def load_target(name: str, kind: str = "decode") -> Adapter:
    """The backend of that name, or the object that `module:object` names.

    Modules are looked for in the current directory too, as `python -m` does.

    Raises:
        ValueError: There is no backend of that name.
        ImportError: The module or the object is not there; the message names it.
    """
    if ":" not in name:
        if name not in backend_names() and not name.isidentifier():
            raise ValueError(f"give a backend's name or module:object, got {name!r}")
        return as_adapter(find_backend(name))
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{name} cannot be imported: {error}") from error
    return as_adapter(found, kind)


def missing_parameters(function: Callable[..., Any], needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the named parameters a function does not take."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled code without a signature: assume the whole contract
        return ()
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(name for name in needed if name not in parameters)
