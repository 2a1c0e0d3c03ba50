"""The hash of a kernel's source: what changes it, and what must not."""

from textwrap import dedent

import pytest

from mla_kernels.audit import record
from mla_kernels.source_hash import source_hash

KERNEL = '''
    import triton
    import triton.language as tl

    LOG2E = tl.constexpr(1.4427)
    UNUSED = 3


    @triton.jit
    def helper(x):
        """Twice."""
        return x * LOG2E


    @triton.jit
    def kernel(p, N: tl.constexpr):
        """Doubles."""
        # why
        tl.store(p, helper(tl.load(p)) + N)
'''


def hashed(tmp_path, text, name="kernel"):
    path = tmp_path / "file.py"
    path.write_text(dedent(text))
    return source_hash(path, name)


@pytest.mark.parametrize(
    "old, new",
    [
        ("# why", "# another reason"),
        ('"""Doubles."""', '"""Says more.\n\n        Much more.\n        """'),
        ('"""Twice."""', ""),
        (
            "tl.store(p, helper(tl.load(p)) + N)",
            "tl.store(\n        p, helper(tl.load(p)) + N\n    )",
        ),
        ("UNUSED = 3", "UNUSED = 4\n    ANOTHER = 5"),
        ("return x * LOG2E", "\n        return (x * LOG2E)"),
    ],
    ids=["comment", "docstring", "helper's docstring", "layout", "unused", "brackets"],
)
def test_what_changes_no_code_changes_no_hash(tmp_path, old, new):
    assert old in KERNEL
    before = hashed(tmp_path, KERNEL)
    assert hashed(tmp_path, KERNEL.replace(old, new)) == before


@pytest.mark.parametrize(
    "old, new",
    [
        ("+ N)", "- N)"),
        ("return x * LOG2E", "return x + LOG2E"),
        ("1.4427", "1.4428"),
        ("N: tl.constexpr", "N"),
        ("@triton.jit\n    def kernel", "@triton.jit(do_not_specialize=['N'])\n    def kernel"),
    ],
    ids=["kernel", "helper", "constant", "annotation", "decorator"],
)
def test_what_changes_code_changes_the_hash(tmp_path, old, new):
    assert old in KERNEL
    before = hashed(tmp_path, KERNEL)
    assert hashed(tmp_path, KERNEL.replace(old, new)) != before


@pytest.mark.parametrize(
    "lines",
    [
        ("from mla_kernels.triton_kernels.lib import twice", "twice(x)"),
        ("from mla_kernels.triton_kernels.lib import twice as f", "f(x)"),
        ("from mla_kernels.triton_kernels import lib", "lib.twice(x)"),
        ("import mla_kernels.triton_kernels.lib as lib", "lib.twice(x)"),
    ],
    ids=["name", "renamed", "module", "import as"],
)
def test_a_helper_in_another_file_of_ours_is_part_of_it(tmp_path, monkeypatch, lines):
    package = tmp_path / "mla_kernels" / "triton_kernels"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('nothing is imported')\n")
    monkeypatch.setattr("mla_kernels.source_hash.find_spec", lambda name: Spec(tmp_path / name))
    bring, call = lines
    kernel = f"{bring}\n\ndef kernel(x):\n    return {call}\n"
    (package / "lib.py").write_text("def twice(x):\n    return 2 * x\n")
    before = hashed(tmp_path, kernel)
    (package / "lib.py").write_text("def twice(x):\n    return 3 * x\n")
    assert hashed(tmp_path, kernel) != before


class Spec:
    def __init__(self, folder):
        self.submodule_search_locations = [str(folder)]


def test_a_function_that_calls_itself_or_its_caller_ends(tmp_path):
    assert hashed(tmp_path, "def kernel(x):\n    return other(x)\ndef other(x):\n    kernel(x)\n")


def test_a_class_counts_where_it_is_named_and_not_where_it_is_used(tmp_path):
    cut = 'class Cut:\n    """Tiles."""\n    def size(self):\n        return 2\n'
    user = f"{cut}def kernel(cut: Cut):\n    return cut.size()\n"
    whole, used = hashed(tmp_path, user, "Cut"), hashed(tmp_path, user)
    for old, new, moves in ((" 2", " 3", True), ("Tiles", "Pieces", False)):
        assert (hashed(tmp_path, user.replace(old, new), "Cut") != whole) is moves
        assert hashed(tmp_path, user.replace(old, new)) == used


def test_a_name_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"function, class or constant of file\.py, got 'gone'"):
        hashed(tmp_path, KERNEL, "gone")


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(dedent(KERNEL))
    entry = {"file": "file.py", "function": "kernel", "source_hash": source_hash(path, "kernel")}
    return path, {"compilations": {"doubles": entry}}


def test_a_record_is_fresh_until_its_kernel_changes(tmp_path, recorded):
    path, data = recorded
    assert record.stale(data, tmp_path) == []
    path.write_text(path.read_text().replace("# why", "# because"))
    assert record.stale(data, tmp_path) == []
    path.write_text(path.read_text().replace("1.4427", "1.5"))
    assert record.stale(data, tmp_path) == [
        "doubles: kernel in file.py has changed since it was compiled"
    ]


def test_a_record_of_a_kernel_that_is_gone_is_stale(tmp_path, recorded):
    path, data = recorded
    path.write_text("def renamed(): pass\n")
    assert record.stale(data, tmp_path) == ["doubles: file.py has no kernel any more"]
    path.unlink()
    assert record.stale(data, tmp_path) == ["doubles: file.py is gone"]


def test_every_python_gives_the_same_hash(tmp_path):
    """What Python 3.10, 3.11, 3.12 and 3.13 gave. `ast.unparse` writes some of it differently."""
    text = """
        def kernel(p, n: int = 3, *, words="a 'quoted' word"):
            for i, (a, b) in enumerate(p):
                n += a[i, 0] if i else f"{words!r:>{n}} {'b'}"
            return (lambda x: x, *p), {**n}
    """
    assert hashed(tmp_path, text) == "180e48087fed873d"
