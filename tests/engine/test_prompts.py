"""Prompts from files of all forms, and what is said about a file that cannot be used."""

import gzip
import json
import re

import pytest

from mla_ref.engine import Prompt, chat_text, read_prompts, request_seed


def test_human_eval_is_read_by_its_names(tmp_path):
    lines = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "test": ""} for i in (0, 1)]
    path = tmp_path / "human_eval.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert read_prompts(path) == [
        Prompt("HumanEval/0", "def f0():\n"),
        Prompt("HumanEval/1", "def f1():\n"),
    ]


def test_mt_bench_is_its_first_turns_as_chats(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 81, "turns": ["Who?", "And why?"]}\n')
    [prompt] = read_prompts(path)
    assert prompt == Prompt("81", "Who?", chat=True)
    assert prompt.model_text == chat_text("Who?")
    assert chat_text("Who?") == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert Prompt("a", "Who?").model_text == "Who?"


def test_a_json_text_may_hold_what_other_readers_take_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\x85c"}\r\n\r\n{"text": "d"}'.encode())
    # Named by their lines, of which the second is blank.
    assert read_prompts(str(path)) == [Prompt("mine/1", "a\u2028b\x85c"), Prompt("mine/3", "d")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_texts_stand_between_lines_of_three_dashes(tmp_path, end):
    path = tmp_path / "mine.txt"
    path.write_bytes(
        end.join(["one", "", "", "---", "", " two ---", "----", "---", "3", ""]).encode()
    )
    assert read_prompts(path) == [
        Prompt("mine/1", "one\n\n"),
        Prompt("mine/2", "\n two ---\n----"),
        Prompt("mine/3", "3"),
    ]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", b"x", "prompts are read from .jsonl, .jsonl.gz and .txt"),
        ("a.txt", b"", "a.txt holds no prompt"),
        ("a.txt", b" \n", "a.txt holds no prompt"),
        ("a.jsonl", b"\n\n", "a.jsonl holds no prompt"),
        ("a.txt", b"x\n---\n---\ny", "prompt 2 of 3 is empty"),
        ("a.txt", b"x\n---\n", "prompt 2 of 2 is empty"),
        ("a.txt", b"\xff", "a.txt is not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "a.jsonl is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', "a.jsonl, line 3 is no JSON"),
        ("a.jsonl", b"[1]", "line 1 must be a JSON object, got list"),
        ("a.jsonl", b'{"id": 1, "question": "x"}', "line 1 has no prompt: one of prompt, turns"),
        ("a.jsonl", b"{}", "got the fields none"),
        ("a.jsonl", b'{"prompt": ""}', "line 1: the prompt is empty"),
        ("a.jsonl", b'{"prompt": 3}', "prompt must hold a text, got 3"),
        ("a.jsonl", b'{"turns": []}', "turns must be a list of texts"),
        ("a.jsonl", b'{"turns": "x"}', "turns must be a list of texts"),
        ("a.jsonl.gz", b'{"text": "x"}', "is not a whole gzip file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9],
            "is not a whole gzip file",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_another_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none.jsonl")


def test_seeds_of_requests_are_all_different():
    seeds = [request_seed(seed, number) for seed in (-1, 0, 1, 2) for number in range(50)]
    assert len(set(seeds)) == 200 and request_seed(1, 2) == request_seed(1, 2)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
