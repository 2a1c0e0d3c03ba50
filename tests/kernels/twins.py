"""A kernel beside its torch twin: the same results, and the same words where it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support import raw


def refuses_alike(
    kernel: Callable[..., Any], twin: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Both raise the same error of the same words, or this fails."""
    with pytest.raises((TypeError, ValueError)) as expected:
        raw(twin)(**arguments)
    with pytest.raises(expected.type) as actual:
        raw(kernel)(**arguments)
    assert str(actual.value) == str(expected.value)
