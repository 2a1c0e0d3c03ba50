"""What a lesson shows of the library's code."""

import ast

import pytest

from mla_ref.attention import OnlineSoftmax, causal_attention
from mla_ref.numerics import merge_many
from mla_ref.teaching import show


def test_the_code_is_shown_without_its_docstring_and_with_its_place():
    source = show(causal_attention)
    assert source.place.startswith("attention/causal.py, line ")
    assert source.code.startswith("def causal_attention(")
    assert '"""' not in source.code
    assert "for row, seen in enumerate" in source.code
    ast.parse(source.code)


def test_the_docstring_stays_if_it_is_asked_for():
    assert "Keys of all s_kv tokens" in show(causal_attention, docstring=True).code


def test_a_method_and_a_class():
    assert show(OnlineSoftmax.add).code.startswith("def add(")
    assert "class OnlineSoftmax" in show(OnlineSoftmax).code


def test_helpers_of_the_same_module_follow():
    source = show(merge_many, "_merged")
    assert [node.name for node in ast.parse(source.code).body] == ["merge_many", "_merged"]
    with pytest.raises(ValueError, match="helpers must name functions of .*'_nothing'"):
        show(merge_many, "_nothing")


def test_a_notebook_gets_a_coloured_block_and_a_terminal_plain_text():
    source = show(causal_attention)
    assert source._repr_markdown_() == f"```python\n{source!r}\n```"
    assert repr(source).splitlines()[0] == f"# mla_ref/{source.place}"
