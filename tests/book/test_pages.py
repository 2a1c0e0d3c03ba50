"""What the book's own extensions make: tables, byte maps and links, each against its source."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"


@pytest.fixture
def extension(monkeypatch):
    """Imports a module of book/_ext by its name."""
    pytest.importorskip("sphinx", reason="the book's packages are not installed: make book")
    monkeypatch.syspath_prepend(BOOK / "_ext")
    return importlib.import_module


def test_the_feature_table_has_every_row_with_a_mark_for_every_project(extension):
    features = extension("features_page").features()
    projects, rows = features["project"], features["row"]
    assert len(projects) == 10 and len(rows) == 31
    assert len({row["what"] for row in rows}) == len(rows)
    for row in rows:
        assert len(row["marks"]) == len(projects), row["what"]
        assert set(row["marks"]) <= set("yp-?") and row["ours"] in "yp-", row["what"]
        assert row["where"], row["what"]


def test_our_column_claims_nothing_that_no_page_shows(extension):
    for row in extension("features_page").features()["row"]:
        for page in re.findall(r"\]\((\S+?)\)", row["where"]):
            place = ROOT / page if page.startswith("lessons/") else BOOK / page
            assert place.is_file(), f"{row['what']}: {page}"
        for module in re.findall(r"<(mla_ref[\w.]*)>", row["where"]):
            importlib.import_module(module)


def test_byte_maps_are_found_where_the_format_has_them(extension):
    formats = extension("formats_page")
    row = [(part.first, part.nbytes, part.kind) for part in formats.row_parts()]
    assert row == [
        *((128 * group, 128, "data") for group in range(4)),
        *((512 + 4 * group, 4, "scale") for group in range(4)),
        (528, 128, "rope"),
    ]
    page = [(part.first, part.nbytes, part.kind) for part in formats.index_page_parts(2)]
    assert page == [(0, 128, "data"), (128, 128, "data"), (256, 4, "scale"), (260, 4, "scale")]
    block_scaled = formats.block_scaled(None)
    assert "| MXFP8 | 32 | bytes 32 to 63 | byte 1 | 132 | 8.25 |" in block_scaled
    assert "| NVFP4 | 16 | bytes 8 to 15 | byte 1 | 72 and 4 a tensor | 4.5 |" in block_scaled


def test_a_byte_map_with_a_hole_is_refused(extension):
    formats = extension("formats_page")
    parts = [formats.Part(0, 4, "data", "a"), formats.Part(6, 2, "scale", "b")]
    with pytest.raises(ValueError, match="do not cover 8 bytes once"):
        formats.complete(parts, 8)


def test_a_term_is_linked_once_as_it_is_written_and_not_inside_words(extension):
    links = extension("glossary_links")
    left = {"LSE", "page", "block table"}
    pieces = links.split(
        "Pages, lse, pageant. An LSE of a page; the Block table.", left, "lessons/x"
    )
    linked = [
        (node["reftarget"], node.astext()) for node in pieces if node.tagname == "pending_xref"
    ]
    assert linked == [("page", "Pages"), ("LSE", "LSE"), ("block table", "Block table")]
    assert "".join(node.astext() for node in pieces) == (
        "Pages, lse, pageant. An LSE of a page; the Block table."
    )
    assert not left
    assert links.split("Another page.", left, "lessons/x") == []


def test_terms_are_linked_in_running_text_alone(extension):
    from docutils import nodes

    links = extension("glossary_links")
    code, title = nodes.literal("", "a page"), nodes.title("", "The page")
    shown = nodes.paragraph("", "", nodes.Text("A "), code, nodes.strong("", "slot"))
    document = nodes.section("", title, shown, nodes.literal_block("", "page = 3"))
    assert [text.astext() for text in links.running_text(document)] == ["A ", "slot"]


def test_the_glossary_is_in_order_and_each_term_stands_once(extension):
    terms = extension("glossary_links").terms()
    assert list(terms) == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)


def test_B148_the_glossary_says_which_number_is_an_attention_score(extension):
    text = " ".join((BOOK / "glossary.md").read_text("utf-8").split())
    assert {"index score", "score", "weight"} <= set(extension("glossary_links").terms())
    assert 'Three numbers are called "attention score"' in text
    assert r"$\sum_j w_j \, \mathrm{ReLU}(q_j \cdot k)$" in text
    assert r"score $q \cdot k$ times the softmax scale, before the softmax" in text


def test_B143_each_claim_of_a_device_names_a_test_or_a_receipt_that_exists(extension):
    claims, receipts = extension("claims_page"), extension("receipts_page")
    table = claims.claims(None)
    for line in table.splitlines()[2:]:
        held = re.findall(r"<br>`(.+)`", line)
        assert bool(held) != ("**untested**" in line), line
        assert all((ROOT / by).is_file() for by in held), line
    # What ran is what has a receipt, and nothing of SM120 has one.
    ran = [line for line in table.splitlines() if "**ran**" in line]
    assert len(ran) == len(receipts.receipt_files())
    sm120 = [line for line in table.splitlines() if "SM120" in line]
    assert sm120 and all("only**" in line for line in sm120)


def test_the_guides_take_their_commands_from_the_contributors_page(extension):
    from_data = extension("from_data")

    class Env:
        srcdir = str(BOOK)

    for guide in ("sm120", "train"):
        text = (BOOK / "guides" / f"{guide}.md").read_text("utf-8")
        [name] = re.findall(r"^```\{from-data\} contributing (\S+)$", text, re.MULTILINE)
        assert "```sh" in from_data.contributing(Env, name)
    with pytest.raises(ValueError, match="no section 'gardening'"):
        from_data.contributing(Env, "gardening")


@pytest.mark.parametrize("path", sorted((BOOK / "guides").glob("*.md")), ids=lambda p: p.stem)
def test_the_code_of_a_guide_is_run_by_the_build(path):
    text = path.read_text("utf-8")
    assert text.startswith("---\nfile_format: mystnb\n")
    assert text.count("```{code-cell} ipython3") >= 2
    # A tag would let a cell fail, or hide it.
    assert ":tags:" not in text
    cells = re.findall(r"^```\{code-cell\} ipython3$(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    wide = [line for cell in cells for line in cell.splitlines() if len(line) > 88]
    assert wide == []  # what fits the book's column
