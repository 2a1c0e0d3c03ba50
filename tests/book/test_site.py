"""The built site, page by page, and the build itself on small projects with the book's settings.

The tests of the site read book/_build/html. Where nobody has built it they are skipped; with
MLA_REF_REQUIRE_BOOK=1, which CI sets after `make book`, that is a failure.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
SITE = BOOK / "_build" / "html"
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))


@dataclass
class Page(HTMLParser):
    """What the tests ask of one HTML page."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)  # followed when a reader clicks
    loads: list[str] = field(default_factory=list)  # fetched when the page opens
    text: str = ""
    styles: str = ""  # of style elements and attributes

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.styles += given.get("style", "") + "\n"
        if tag == "a":
            self.links += [given[name] for name in ("href", "xlink:href") if name in given]
        elif tag == "form" and "action" in given:
            self.links.append(given["action"])
        elif tag == "link":
            if given.get("rel") not in ("index", "search", "next", "prev"):
                self.loads.append(given["href"])
        else:
            names = ("src", "href", "xlink:href", "poster", "data")
            self.loads += [given[name] for name in names if name in given]
            variants = filter(None, map(str.strip, given.get("srcset", "").split(",")))
            self.loads += [variant.split()[0] for variant in variants]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.styles += data
        self.text += data


# What a style sheet fetches: url(...) in any form, and an @import that is only quoted.
STYLE_LOAD = re.compile(
    r"""url\(\s*(?:"([^"]*)"|'([^']*)'|([^)"'\s]*))\s*\)|@import\s+(?:"([^"]*)"|'([^']*)')"""
)


def style_loads(text: str) -> list[str]:
    """Addresses in a style sheet; those that hold their data themselves, or a place, are left."""
    found = (next(filter(None, groups), "") for groups in STYLE_LOAD.findall(text))
    return [load for load in found if load and not load.startswith(("data:", "#"))]


@cache
def read(path: Path) -> Page:
    return Page(path)


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").is_file():
        reason = "the book is not built: make book"
        if os.environ.get("MLA_REF_REQUIRE_BOOK") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return SITE


def html_pages(site: Path) -> list[Path]:
    """Every page of the site; the theme leaves two of its templates under _static."""
    return [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]


def broken(page: Page, link: str) -> bool:
    """True if a link into the site leads to no file, or to no place in the page it names."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = page.path if not parts.path else page.path.parent / unquote(parts.path)
    if not target.is_file():
        return True
    if not parts.fragment or target.suffix != ".html":
        return False
    return unquote(parts.fragment) not in read(target.resolve()).ids


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    pages = [read(path) for path in html_pages(site)]
    assert len(pages) > 10
    dead = [
        f"{page.path.relative_to(site)}: {link}"
        for page in pages
        for link in [*page.links, *page.loads, *style_loads(page.styles)]
        if broken(page, link)
    ]
    for sheet in site.rglob("*.css"):
        loads = style_loads(sheet.read_text("utf-8"))
        files = {load: sheet.parent / unquote(urlsplit(load).path) for load in loads}
        dead += [
            f"{sheet.relative_to(site)}: {load}" for load, p in files.items() if not p.is_file()
        ]
    assert not dead, "\n".join(dead)


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    loads = {
        path: [*read(path).loads, *style_loads(read(path).styles)] for path in html_pages(site)
    }
    loads |= {path: style_loads(path.read_text("utf-8")) for path in site.rglob("*.css")}
    foreign = [
        f"{path.relative_to(site)}: {load}"
        for path, found in loads.items()
        for load in found
        if urlsplit(load).netloc
    ]
    assert not foreign, "\n".join(foreign)


def test_the_walk_sees_what_a_browser_would_fetch(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        """<link rel="stylesheet" href="https://a.example/x.css"><img srcset="//b.example/1.png 2x">
        <style>@import "https://c.example/y.css"; p { background: url( 'https://d.example/z' ) }
        q { background: url(data:image/png;base64,AA) }</style><svg><use href="e.svg#f"></use></svg>
        <p style="background: url(https://g.example)"></p><video poster="https://h.example"></video>
        """
    )
    found = Page(page)
    hosts = [urlsplit(load).netloc for load in [*found.loads, *style_loads(found.styles)]]
    assert sorted(host[:1] for host in hosts) == ["", "a", "b", "c", "d", "g", "h"]


def test_formulas_are_set_by_the_mathjax_that_lies_in_the_site(site: Path) -> None:
    loads = [load for load in read(site / "glossary.html").loads if "mathjax" in load.lower()]
    assert [urlsplit(load).path for load in loads] == ["_static/mathjax/tex-svg.js"]
    assert (site / "_static/mathjax/tex-svg.js").stat().st_size > 1_000_000
    assert (site / "_static/mathjax/LICENSE").is_file()


def test_B134_index_says_what_this_is(site: Path) -> None:
    assert "every rung computes the same thing as the rung below it" in " ".join(
        read(site / "index.html").text.split()
    )


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_B134_each_lesson_has_a_page_with_its_title_and_its_outputs(site: Path, path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
    html = (site / "lessons" / f"{path.stem}.html").read_text("utf-8")
    assert title in read(site / "lessons" / f"{path.stem}.html").text
    assert html.count("cell_output") >= 1
    # The download button hands out the notebook itself.
    assert (site / "_sources" / "lessons" / path.name).read_bytes() == path.read_bytes()


def test_ladder_and_museum_show_all_of_their_data(site: Path) -> None:
    from mla_ref.ladder import RUNGS
    from mla_ref.testing.bugs import BUGS

    ladder, museum = read(site / "ladder.html").text, read(site / "museum.html").text
    assert [rung.name for rung in RUNGS if rung.name not in ladder] == []
    assert [bug.id for bug in BUGS if bug.id not in museum] == []


def test_the_page_on_verifier_batches_shows_every_reason(site: Path) -> None:
    from mla_ref.batching import REASONS

    page = read(site / "verifier.html").text
    assert [code for code, text in REASONS.items() if code not in page or text not in page] == []
    assert "Set the mode to auto." in page


def test_every_public_module_is_in_the_reference(site: Path) -> None:
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "mla_ref").rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    public = [
        name
        for name in names
        # The command line's reference is its own help, in cli.html.
        if not re.search(r"\._", name) and not re.match(r"mla_ref(\.cli\b.*)?$", name)
    ]
    assert "mla_ref.attention.causal" in public
    shown = set().union(*(read(path).ids for path in (site / "api").glob("*.html")))
    assert [name for name in public if f"module-{name}" not in shown] == []


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_B137_notebook_metadata_knows_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    metadata = json.dumps([notebook.metadata, *(cell.metadata for cell in notebook.cells)])
    assert re.findall(r'"(?:/|~|[A-Za-z]:\\)[^"]*"', metadata) == []


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_B136_a_notebook_keeps_no_output_that_could_be_stale(path: Path) -> None:
    # What a reader of the book sees was computed when the book was built.
    cells = nbformat.read(path, as_version=4).cells
    kept = [cell.id for cell in cells if cell.cell_type == "code" and cell.outputs]
    counted = [cell.id for cell in cells if cell.get("execution_count") is not None]
    assert kept == [] and counted == []


def build(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build a folder of pages with the book's own conf.py, warnings as errors."""
    sphinx = [sys.executable, "-m", "sphinx", "-c", str(BOOK)]
    strict = ["-n", "-W", "-T", "--keep-going"]
    return subprocess.run(
        [*sphinx, *strict, *options, str(source), str(source / "_build" / "html")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(source)},
    )


def write_notebook(path: Path, code: str, *tags: str) -> None:
    cells = [
        nbformat.v4.new_markdown_cell("# A lesson"),
        nbformat.v4.new_code_cell(code, metadata={"tags": list(tags)}),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    pytest.importorskip("myst_nb", reason="the book's packages are not installed: make book")
    (tmp_path / "index.md").write_text("# Book\n\n```{toctree}\n:glob:\n*\n```\n")
    return tmp_path


@pytest.mark.slow
def test_B135_a_notebook_that_raises_fails_the_build(pages: Path) -> None:
    write_notebook(pages / "lesson.ipynb", "raise RuntimeError('the lesson is broken')")
    result = build(pages)
    assert result.returncode != 0
    assert "the lesson is broken" in result.stderr


@pytest.mark.slow
def test_B135_a_notebook_that_hangs_fails_the_build(pages: Path) -> None:
    write_notebook(pages / "lesson.ipynb", "import time; time.sleep(120)")
    result = build(pages, "-D", "nb_execution_timeout=1")
    assert result.returncode != 0
    assert "CellTimeoutError" in result.stderr


@pytest.mark.slow
def test_B138_an_error_shown_on_purpose_and_a_venv_inside_the_source_do_not(pages: Path) -> None:
    write_notebook(pages / "lesson.ipynb", "raise RuntimeError('as intended')", "raises-exception")
    package = pages / ".venv" / "lib" / "python3.11" / "site-packages" / "some_package"
    package.mkdir(parents=True)
    (package / "README.md").write_text("[a link to nowhere](nowhere.md)\n")
    result = build(pages)
    assert result.returncode == 0, result.stderr
    assert "as intended" in read(pages / "_build/html/lesson.html").text
    assert not list((pages / "_build/html").rglob("README*"))


@pytest.mark.slow
def test_printed_text_comes_in_whole_lines_and_in_order_however_the_kernel_cut_it(
    pages: Path,
) -> None:
    flush = "sys.stdout.flush(); time.sleep(0.4)"
    lines = [
        "import sys, time",
        f"print('first', end=''); {flush}",
        f"print(' line'); {flush}",
        "print('second line')",
        "display({'text/html': '<i>a figure</i>'}, raw=True)",
        f"print('third', end=''); {flush}",
        "print(' line')",
    ]
    write_notebook(pages / "lesson.ipynb", "\n".join(lines), "remove-input")
    result = build(pages)
    assert result.returncode == 0, result.stderr
    executed = nbformat.read(pages / "_build/jupyter_execute/lesson.ipynb", as_version=4)
    kinds = [output.output_type for output in executed.cells[1].outputs]
    assert kinds.index("display_data") > 1, "the kernel did not cut the text: no test"
    html = (pages / "_build/html/lesson.html").read_text("utf-8")
    blocks = re.findall(r"<pre>(?:<span></span>)?(.*?)</pre>|<i>(a figure)</i>", html, re.DOTALL)
    shown = [text or figure for text, figure in blocks]
    assert shown == ["first line\nsecond line\n", "a figure", "third line\n"]


@pytest.mark.slow
def test_B123_the_reference_may_not_need_a_package_for_gpus(pages: Path) -> None:
    # Both can be imported here, as where they are installed, or mocked: the build must notice.
    text = "# Reference\n"
    for package in ("triton", "cupy"):
        (pages / f"{package}.py").write_text("")
        (pages / f"needs_{package}.py").write_text(f"import {package}\n")
        text += f"\n```{{eval-rst}}\n.. automodule:: needs_{package}\n```\n"
    (pages / "reference.md").write_text(text)
    result = build(pages)
    assert result.returncode != 0
    assert "failed to import 'needs_triton'" in result.stderr
    assert "failed to import 'needs_cupy'" in result.stderr
