"""Links the first use of each glossary term in a lesson to its entry.

The notebooks stay as a reader of Jupyter has them, without roles that only Sphinx knows. A term is
found in running text: not in a heading, in code, in a formula, or in a link that is there already.
"""

import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref

GLOSSARY = Path(__file__).resolve().parents[1] / "glossary.md"
# Nothing inside these is running text.
CLOSED = (
    nodes.FixedTextElement,
    nodes.Inline,
    nodes.math_block,
    nodes.raw,
    nodes.rubric,
    nodes.table,
    nodes.title,
    pending_xref,
)
# Words that a sentence also uses in their plain sense.
PLAIN = frozenset({"plan", "list", "row"})


@cache
def terms() -> tuple[str, ...]:
    """The terms of the glossary, as its page has them: lines at the margin of its block."""
    block = re.search(r"^```\{glossary\}\n(.*?)^```$", GLOSSARY.read_text("utf-8"), re.S | re.M)
    if block is None:
        raise ValueError(f"{GLOSSARY.name} has no glossary block")
    return tuple(line for line in block[1].splitlines() if line and not line[0].isspace())


@cache
def pattern() -> re.Pattern[str]:
    """Any term, a longer one before one that it begins with, also in the plural."""
    words = sorted(set(terms()) - PLAIN, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(s?)(?![\w-])", re.I)


def the_term(word: str) -> str | None:
    """The term that a word of the text stands for; an abbreviation only as it is written."""
    for term in terms():
        if word == term or (term.islower() and word.lower() == term):
            return term
    return None


def split(text: str, left: set[str], docname: str) -> list[nodes.Node]:
    """The text with a link at the first use of each term that is left; those are taken out."""
    found: list[nodes.Node] = []
    end = 0
    for match in pattern().finditer(text):
        term = the_term(match[1])
        if term not in left:
            continue
        left.discard(term)
        found.append(nodes.Text(text[end : match.start()]))
        link = pending_xref(
            "", refdomain="std", reftype="term", reftarget=term, refexplicit=True, refdoc=docname
        )
        link += nodes.inline("", match[0], classes=["xref", "std", "std-term"])
        found.append(link)
        end = match.end()
    return [*found, nodes.Text(text[end:])] if found else []


def running_text(node: nodes.Element) -> list[nodes.Text]:
    """The text nodes of paragraphs, in the order in which they are read."""
    found: list[nodes.Text] = []
    for child in node.children:
        if isinstance(child, nodes.Text):
            found.append(child)
        elif isinstance(child, (nodes.emphasis, nodes.strong)) or not isinstance(child, CLOSED):
            found += running_text(child)
    return found


def link_terms(app, doctree: nodes.document) -> None:
    docname = app.env.current_document.docname
    if not docname.startswith("lessons/"):
        return
    left = set(terms()) - PLAIN
    for text in running_text(doctree):
        if pieces := split(text.astext(), left, docname):
            text.parent.replace(text, pieces)


def setup(app):
    app.connect("doctree-read", link_terms)
    return {"parallel_read_safe": True}
