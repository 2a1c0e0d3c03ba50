"""`mla-ref check` as a kernel author runs it."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from mla_ref.cli.app import app
from mla_ref.testing import Case, load_target
from mla_ref.testing.outcome import Result
from mla_ref.testing.worker import run_case

pytestmark = pytest.mark.thorough

KERNEL = """
from mla_ref.attention import sparse_decode
from mla_ref.testing import Adapter, Limits

def right(q, kv_cache, indices, counts=None, *, softmax_scale, sink=None):
    return sparse_decode(q, kv_cache, indices, counts, softmax_scale=softmax_scale, sink=sink)

def wrong(q, kv_cache, indices, counts=None, *, softmax_scale, sink=None):
    last = kv_cache.shape[0] * kv_cache.shape[1] - 1
    return right(q, kv_cache, indices.masked_fill(indices == -1, last), counts,
                 softmax_scale=softmax_scale, sink=sink)

adapter = Adapter(decode=right, limits=Limits(heads=(64,), cache_formats=("fp8",)))
"""


@pytest.fixture(autouse=True)
def _my_kernel(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_kernel.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_kernel", raising=False)


class InProcess:
    """What `Worker` does, without a process of its own; the first test has the true one."""

    def __init__(self, target: str, *, kind: str, device: str) -> None:
        self.adapter, self.device = load_target(target, kind), torch.device(device)
        self.kinds = self.adapter.kinds

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, case: Case, timeout: float) -> Result:
        answer = run_case(case.to_json(), self.adapter, self.device)
        details = {k: answer[k] for k in ("findings", "looks_like") if k in answer}
        return Result(str(case), answer["status"], answer.get("reason", ""), 0.0, details or None)


@pytest.fixture
def in_process(monkeypatch) -> None:
    monkeypatch.setattr("mla_ref.testing.conformance.Worker", InProcess)


def run(*args):
    return CliRunner().invoke(app, ["check", *args])


def test_a_right_function_in_the_current_directory_passes():
    result = run("--backend", "my_kernel:right", "--case", "none-strewn")
    assert result.exit_code == 0, result.output
    assert "decode        2 passed" in result.stdout


def test_a_wrong_one_fails_and_hears_why(in_process, monkeypatch):
    monkeypatch.setattr("mla_ref.cli.check.SHOWN", 1)
    result = run("--backend", "my_kernel:wrong", "--case", "none-strewn")
    assert result.exit_code == 1
    assert "FAILED: decode/none-strewn fails" in result.stdout
    assert "it looks like this: -1 is read as the last row" in result.stdout
    assert "1 more fail (--case or --json tells how): decode/none-strewn-fp8" in result.stdout
    assert "2 failures look like this: -1 is read as the last row" in result.stdout
    result = run("--backend", "my_kernel:wrong", "--case", "none-strewn", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert data["ok"] is False
    assert data["counts"]["failed"] == 2
    assert data["results"][0]["details"]["looks_like"]


def test_limits_are_counted_apart(in_process):
    result = run("--backend", "my_kernel:adapter", "--case", "sink")
    assert result.exit_code == 0, result.output
    assert "skipped: cache_format bf16 is outside the limits: fp8 (decode/" in result.stdout
    assert "3 passed, 4 skipped" in result.stdout


def test_nothing_checked_is_no_success(in_process):
    result = run("--backend", "my_kernel:adapter", "--case", "decode/heads-8")
    assert result.exit_code == 1
    assert "nothing has been checked" in result.stderr


def test_a_backend_by_name_and_a_function_of_another_kind(in_process):
    result = run("--case", "/two", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [r["case"] for r in data["results"]] == ["merge/two"]
    result = run("--backend", "my_kernel:right", "--kind", "extend", "--case", "extend/plain")
    assert "extend        2 passed" in result.stdout


def test_repro_is_a_program():
    result = run("--repro", "decode/sink", "--backend", "my_kernel:right")
    assert result.exit_code == 0
    compile(result.stdout, "repro.py", "exec")
    assert 'load_target("my_kernel:right", kind="decode")' in result.stdout


def test_repro_names_a_device_that_torch_knows(monkeypatch):
    monkeypatch.setattr("mla_ref.platform.resolve_device", lambda name: torch.device("cuda:1"))
    result = run("--repro", "decode/sink", "--device", "auto")
    assert 'case.build("cuda:1")' in result.stdout and "auto" not in result.stdout


def test_export_writes_two_files_a_case(tmp_path):
    result = run("--export", "out", "--case", "decode/far")
    assert "left out: decode/far, whose cache has 4.6 GB" in result.stderr
    result = run("--export", "out", "--kind", "convert")
    assert result.exit_code == 0, result.output
    files = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert files.count(".json") == files.count(".safetensors") == len(files) // 2 > 5


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--kind", "prefill"], "--kind"),
        (["--case", "no-such-case"], "--case"),
        (["--timeout", "0"], "--timeout must be above 0 and at most 86,400 seconds, a day; got 0"),
        (["--timeout", "inf"], "--timeout must be above 0"),
        (["--timeout", "nan"], "--timeout must be above 0"),
        (["--timeout", "1e10"], "--timeout must be above 0"),
        (["--repro", "decode/no-such"], "decode/no-such"),
        (["--repro", "decode/sink", "--device", "tpu"], "tpu"),
        (["--repro", "decode/sink", "--export", "out"], "--repro and --export"),
        (["--repro", "decode/sink", "--json"], "--json is for results"),
        (["--export", "out", "--json"], "--json is for results"),
        (["--export", "my_kernel.py", "--kind", "decode", "--case", "decode/none"], "File exists"),
        (["--backend", "my_kernel:nothing"], "my_kernel:nothing"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_options_are_one_line_that_names_them(args, named, in_process, plain_calls):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.output
