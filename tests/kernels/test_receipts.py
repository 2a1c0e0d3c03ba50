"""Receipts belong to kernels as they were: a changed kernel, or another cut, makes them stale."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla_kernels import kernel_hash
from mla_ref.bench import is_fresh, read_receipt

ROOT = Path(__file__).parents[2]
RECEIPTS = sorted((ROOT / "kernels" / "receipts").glob("*/*.json"))


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_every_receipt_reads_and_is_of_a_known_backend(path):
    receipt = read_receipt(path)
    assert receipt.backend in kernel_hash.KERNEL_HASHES
    assert path.stem == f"{receipt.day}-{receipt.backend}"


CHANGES = [
    ("triton", "triton_kernels/attention.py", "tl.dot(", "tl.dot(0 + "),
    ("triton", "triton_kernels/attention_wide.py", "tl.dot(", "tl.dot(0 + "),
    ("triton", "triton_kernels/merge.py", "tl.load(", "tl.load(0 + "),
    ("triton", "triton_kernels/configs.py", "Config(32, 8, 2, 2)", "Config(32, 8, 4, 2)"),
    ("triton", "triton_kernels/split_plan.py", "tiles // 2", "tiles // 3"),
    ("cupy", "cuda_kernels/decode.cu", "wait", "await"),
    ("cupy", "cuda_kernels/rows.cuh", "return", "return 1 +"),
    ("triton", "triton_kernels/configs.py", "stages: int", "stages: int = 2"),
    ("cupy", "cuda_kernels/attention.py", "def plan_splits(", "def plan_splits(*, more=1, "),
    ("cupy", "cuda_kernels/source.py", "-std=c++20", "--use_fast_math"),
    ("cupy", "cuda_kernels/attention.py", "shared_bytes=93_536", "shared_bytes=93_537"),
    ("cupy", "cuda_kernels/union.py", "multiprocessors // ", "multiprocessors * 2 // "),
]


@pytest.mark.parametrize(("backend", "file", "old", "new"), CHANGES)
def test_a_change_of_kernel_or_cut_makes_its_receipt_stale(
    backend, file, old, new, tmp_path, monkeypatch
):
    shutil.copytree(kernel_hash.FOLDER, tmp_path / "mla_kernels")
    hash_of = kernel_hash.KERNEL_HASHES[backend]
    now = hash_of()
    receipt = replace(read_receipt(RECEIPTS[0]), backend=backend, kernel_hash=now)
    assert is_fresh(receipt, now)

    monkeypatch.setattr(kernel_hash, "FOLDER", tmp_path / "mla_kernels")
    path = tmp_path / "mla_kernels" / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    assert not is_fresh(receipt, hash_of())


def test_a_comment_changes_no_hash(tmp_path, monkeypatch):
    now = {name: hash_of() for name, hash_of in kernel_hash.KERNEL_HASHES.items()}
    shutil.copytree(kernel_hash.FOLDER, tmp_path / "mla_kernels")
    monkeypatch.setattr(kernel_hash, "FOLDER", tmp_path / "mla_kernels")
    for file, comment in (("triton_kernels/attention.py", "#"), ("cuda_kernels/decode.cu", "//")):
        path = tmp_path / "mla_kernels" / file
        path.write_text(path.read_text("utf-8") + f"{comment} A comment.\n", "utf-8")
    assert now == {name: hash_of() for name, hash_of in kernel_hash.KERNEL_HASHES.items()}


@pytest.mark.parametrize(("backend", "file", "old", "new"), CHANGES)
def test_the_record_says_which_source_changed(backend, file, old, new, tmp_path, monkeypatch):
    hash_of = kernel_hash.KERNEL_HASHES[backend]
    shutil.copytree(kernel_hash.FOLDER, tmp_path / "mla_kernels")
    monkeypatch.setattr(kernel_hash, "FOLDER", tmp_path / "mla_kernels")
    monkeypatch.setattr(kernel_hash, "RECORD", tmp_path / "mla_kernels" / "kernel_sources.json")
    kernel_hash.record()
    then = hash_of()
    assert kernel_hash.changed_since(backend, then) == ()
    assert kernel_hash.changed_since(backend, "never recorded") is None

    path = tmp_path / "mla_kernels" / file
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    changed = kernel_hash.changed_since(backend, then)
    assert changed and all(name.startswith(path.name) for name in changed)
    kernel_hash.record()
    assert kernel_hash.changed_since(backend, then) == changed, "a record forgets nothing"
    assert kernel_hash.changed_since(backend, hash_of()) == ()


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_of_each_receipt_the_sources_are_recorded(path):
    receipt = read_receipt(path)
    assert kernel_hash.changed_since(receipt.backend, receipt.kernel_hash) is not None


def test_the_book_says_of_each_receipt_whether_it_is_fresh(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    import receipts_page

    found = {(): "*Fresh:", ("decode.cu",): "**Stale in part**: `decode.cu`", None: "**Stale**"}
    for changed, words in found.items():
        monkeypatch.setattr(kernel_hash, "changed_since", lambda *_, changed=changed: changed)
        page = receipts_page.receipts(None)
        assert page.count(words) == len(RECEIPTS)
    sys.modules.pop("receipts_page")


@pytest.mark.parametrize("kind", ["sweep", "tune"])
def test_a_sweep_and_a_tuning_run_name_their_kernels_and_are_whole(kind):
    (path,) = (ROOT / "kernels" / "receipts").glob(f"*/{kind}/*.json")
    found = json.loads(path.read_text("utf-8"))
    assert found["backend"] in kernel_hash.KERNEL_HASHES and found["kernel_hash"]
    assert found["machine"]["device"] and found["machine"]["state"]["driver"]
    if kind == "tune":
        assert {(t["heads"], t["rows"]) for t in found["trials"]} == {
            (heads, rows) for heads in (8, 64, 128) for rows in (4, 64)
        }
        assert sum(t["chosen"] for t in found["trials"]) == 6
    else:
        points = [(p["context"], p["requests"], p["rows_per_request"]) for p in found["points"]]
        assert points[:64] == [
            (context, requests, rows)
            for context in (1024, 16_384, 65_536, 131_072)
            for requests in (1, 4, 16, 64)
            for rows in (1, 2, 3, 4)
        ]
        assert all(v for p in found["points"] for v in p["total_s"].values())
