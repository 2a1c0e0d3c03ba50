"""Prompts from a file, in the forms in which people have them.

    .jsonl, .jsonl.gz   one JSON object a line: "prompt" (HumanEval, named by task_id), "turns"
                        (MT-bench, named by question_id; the first turn, as a chat) or "text"
    .txt                texts with a line of --- between each two

The newline before a line of --- belongs to that line, and so does the newline that ends the file.
A text that has such a line inside needs the other form.
"""

import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from mla_ref.checks import describe, require_count, require_utf8
from mla_ref.speculative.noise import require_seed

SEPARATOR = "---"
FIELDS = ("prompt", "turns", "text")
NAMES = ("task_id", "question_id", "id", "name")
# A chat as SmolLM2 was tuned to read it: what stands before a question, and before its answer.
QUESTION, ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        name: What reports call it.
        text: What the user has written.
        chat: Whether it is a question to answer, not a text to continue; see `model_text`.
    """

    name: str
    text: str
    chat: bool = False

    @property
    def model_text(self) -> str:
        """What the model reads."""
        return chat_text(self.text) if self.chat else self.text


def chat_text(question: str) -> str:
    """A question as SmolLM2 was tuned to read it, up to where its answer begins."""
    return f"{QUESTION}{question}{ANSWER}"


def request_seed(seed: int, number: int) -> int:
    """A seed for request `number` of a run with one seed, as a signed int of 64 bits.

    Not seed + number: run 1 would then give its first prompt the chance of run 0's second.

    Raises:
        ValueError: The seed does not fit into 64 bits with its sign, or the number is negative.
        TypeError: One of them is not an int.
    """
    require_seed("seed", seed)
    require_count("number", number)
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """All prompts of a file, in its order.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The ending is unknown, the file is not UTF-8 or not whole, holds no prompt or an
            empty one, or a line is no JSON object with a prompt; the message names the line.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {describe(path)}")
    path = Path(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        prompts = _from_lines(path, _read(path))
    elif path.suffix == ".txt":
        prompts = _from_text(path, _read(path))
    else:
        raise ValueError(f"{path}: prompts are read from .jsonl, .jsonl.gz and .txt")
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    return require_utf8(str(path), data)


def _from_text(path: Path, content: str) -> list[Prompt]:
    if not content.strip():
        return []
    lines = content.replace("\r\n", "\n").removesuffix("\n").split("\n")
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(line)
    prompts = []
    for number, part in enumerate(parts, 1):
        text = "\n".join(part)
        if not text:
            raise ValueError(
                f"{path}: prompt {number} of {len(parts)} is empty: a line of {SEPARATOR} stands "
                "between two prompts"
            )
        prompts.append(Prompt(f"{path.stem}/{number}", text))
    return prompts


def _from_lines(path: Path, content: str) -> list[Prompt]:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    # Not splitlines(): a JSON string may hold U+2028, which that takes for the end of a line.
    return [
        _from_object(line, f"{path}, line {number}", f"{stem}/{number}")
        for number, line in enumerate(content.split("\n"), 1)
        if line.strip()
    ]


def _from_object(line: str, where: str, name: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(entry).__name__}")
    field = next((field for field in FIELDS if field in entry), None)
    if field is None:
        raise ValueError(
            f"{where} has no prompt: one of {', '.join(FIELDS)} must be there, got the fields "
            f"{', '.join(entry) or 'none'}"
        )
    text, chat = entry[field], field == "turns"
    if chat:
        if not isinstance(text, list) or not text:
            raise ValueError(f"{where}: turns must be a list of texts, got {describe(text)}")
        text = text[0]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field} must hold a text, got {describe(text)}")
    if not text:
        raise ValueError(f"{where}: the prompt is empty")
    given = next((entry[key] for key in NAMES if key in entry), name)
    return Prompt(str(given), text, chat)
