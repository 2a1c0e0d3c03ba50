"""Text that comes from the library itself, so that no page can drift from the code.

A page asks for it with a block of its own, as in

    ```{from-data} ladder_table
    ```

Before MyST parses the page, the block is replaced by the Markdown that the function of that name
below returns; a second word is its argument. A name that is not in `FUNCTIONS` stays as it is, and
MyST stops the build at a directive that it does not know.
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path, PurePosixPath

import api_reference
import claims_page
import features_page
import formats_page
import receipts_page
import sm120_page
import sweep_page
import validation_page
from page_table import table

BLOCK = re.compile(r"^```\{from-data\} (\w+)(?: (\S+))?\n```$", re.MULTILINE)


def expand(app, docname: str, source: list[str]) -> None:
    """Replace every block of one page."""

    def text(match: re.Match) -> str:
        name, argument = match.groups()
        if name not in FUNCTIONS:
            return match.group()
        return FUNCTIONS[name](app.env, *filter(None, [argument]))

    source[0] = BLOCK.sub(text, source[0])


def pages_to_read(app, env, added, changed, removed) -> list[str]:
    """Read every page with a block again: Sphinx sees a change of the page, not of the data."""
    pages = {name: Path(env.doc2path(name)) for name in env.found_docs}
    return [n for n, p in pages.items() if p.suffix == ".md" and BLOCK.search(p.read_text("utf-8"))]


def readme(env) -> str:
    """The README without its title. Links to files that are no page here become plain text."""
    text = (Path(env.srcdir).parent / "README.md").read_text("utf-8")

    def link(match: re.Match) -> str:
        label, target = match.groups()
        here = target.removesuffix(".ipynb") in env.found_docs or "://" in target
        return match.group() if here else label

    body = text.split("\n", maxsplit=1)[1]
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, body)


def contributing(env, name: str) -> str:
    """A section of CONTRIBUTING.md, by its heading in lower case with hyphens; without heading."""
    text = (Path(env.srcdir).parent / "CONTRIBUTING.md").read_text("utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        if "-".join(re.findall(r"\w+", heading.lower())) == name:
            return body.strip()
    raise ValueError(f"CONTRIBUTING.md has no section {name!r}")


def ladder_table(env) -> str:
    """The ladder, one row a rung."""
    from mla_ref.ladder import RUNGS

    rows = [["", "rung", "what is new", "checked against"], ["--:", "---", "---", "---"]]
    for rung in RUNGS:
        where = f"**{rung.name}**<br>{links(env, rung)}"
        proof = f"{rung.checked_against}<br>`{rung.test}`"
        rows.append([rung.number, where, rung.what_is_new, proof])
    return table(rows)


def links(env, rung) -> str:
    """The reference of a rung's module and, if it is in this book, the rung's lesson."""
    folder, *parts = Path(rung.file).with_suffix("").parts
    # The reference describes the library; kernels are read in their files.
    found = [f"{{ref}}`code <{'.'.join(parts)}>`" if folder == "src" else f"`{rung.file}`"]
    if (page := str(PurePosixPath(rung.lesson).with_suffix(""))) in env.found_docs:
        found.append(f"{{doc}}`lesson </{page}>`")
    return " · ".join(found)


def bug_museum(env) -> str:
    """Every public bug that a test of this project is named after, by the kind of fault."""
    from mla_ref.testing.bugs import BUGS, KINDS

    parts = []
    for kind, meaning in KINDS.items():
        entries = [bug_entry(bug) for bug in BUGS if bug.kind == kind]
        if entries:
            parts += [f"## {kind.capitalize()}\n\n*{meaning[0].upper()}{meaning[1:]}.*", *entries]
    return "\n\n".join(parts)


def bug_entry(bug) -> str:
    reports = ", ".join(f"[{name}]({url})" for name, url in zip(bug.links, bug.urls, strict=True))
    tests = "".join(f"\n  - `{test}`" for test in bug.tests)
    return (
        f"({bug.id})=\n### {bug.id} · {bug.title}\n\n"
        f"- **Symptom.** {bug.symptom}\n- **Cause.** {bug.cause}\n"
        f"- **Reports.** {reports}\n- **Tests.**{tests}"
    )


def preset_table(env) -> str:
    """The attention dimensions of the models we know."""
    from mla_ref.layers.presets import PRESETS

    rows = [
        ["model", "$h_q$", "$d_c$", "$d_n$", "$d_r$", "$d_v$", "row", "softmax scale"],
        ["---", "--:", "--:", "--:", "--:", "--:", "--:", "--:"],
    ]
    for p in PRESETS.values():
        dims = [p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, p.kv_row_dim]
        rows.append([p.name, p.num_heads, p.kv_lora_rank, *dims, f"{p.softmax_scale:.6f}"])
    return table(rows)


def reasons(env) -> str:
    """Every reason code of a route, with an example and the change that would make it decode."""
    from mla_ref.batching import REASONS, TRUTH_TABLE, ScratchRows, route

    rows = [["code", "what it means", "an example", "what to do there"], ["---"] * 4]
    for code, meaning in REASONS.items():
        kind, mode = next(
            (kind, mode)
            for kind in TRUTH_TABLE
            for mode, (_, reason) in kind.routes.items()
            if reason == code
        )
        taken = route(kind.facts, ScratchRows(kind.limits, mode))
        flags = kind.flags or (False,) * len(kind.query_lens)
        pairs = zip(kind.query_lens, flags, strict=True)
        lens = ", ".join(f"{q}p" if prefilling else str(q) for q, prefilling in pairs)
        if len(set(kind.query_lens)) == 1 and len(kind.query_lens) > 4:
            lens = f"{len(kind.query_lens)} times {kind.query_lens[0]}"
        example = f"{kind.name}: {lens}; n = {kind.num_speculative_tokens}, mode {mode}"
        advice = "nothing" if taken.kind == "decode" else "no single change helps"
        if taken.remedy:
            advice = taken.remedy.text
        rows.append([f"`{code}`<br>{taken.kind}", meaning, example, advice])
    return table(rows)


def command_line(env) -> str:
    """The help of `mla-ref` and of each of its verbs, as a terminal shows it."""
    from mla_ref.cli.app import VERBS

    return "\n\n".join([help_text(), *(f"## {verb}\n\n{help_text(verb)}" for verb in VERBS)])


def help_text(*verb: str) -> str:
    """What `mla-ref VERB --help` prints without colour, no wider than a page."""
    from typer.testing import CliRunner

    from mla_ref.cli.app import app

    plain = {"TERMINAL_WIDTH": "84", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [*verb, "--help"], prog_name="mla-ref", env=plain)
    if result.exit_code:
        raise RuntimeError(f"mla-ref {' '.join(verb)} --help failed: {result.output}")
    lines = [line.rstrip() for line in textwrap.dedent(result.output).splitlines()]
    return "```text\n" + "\n".join(lines).strip("\n") + "\n```"


def reference(env) -> str:
    """The floors, the ground first, each with the first paragraph of its docstring."""
    names = {floor.removeprefix("mla_ref."): floor for floor in api_reference.floors()}
    pages = "\n".join(f"api/{name}" for name in names)
    items = []
    for name, floor in names.items():
        about = (inspect.getdoc(importlib.import_module(floor)) or "").split("\n\n")[0]
        items.append(f"[{name}](api/{name}.md)\n: {' '.join(about.split()) or floor}")
    return "\n\n".join([f"```{{toctree}}\n:hidden:\n\n{pages}\n```", *items])


FUNCTIONS = {
    function.__name__: function
    for function in (
        readme,
        ladder_table,
        bug_museum,
        preset_table,
        reasons,
        command_line,
        reference,
        contributing,
        *claims_page.FUNCTIONS,
        *features_page.FUNCTIONS,
        *formats_page.FUNCTIONS,
        *receipts_page.FUNCTIONS,
        *sm120_page.FUNCTIONS,
        *sweep_page.FUNCTIONS,
        *validation_page.FUNCTIONS,
    )
}


def setup(app):
    app.connect("source-read", expand)
    app.connect("env-get-outdated", pages_to_read)
    return {"parallel_read_safe": True}
