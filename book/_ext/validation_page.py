"""The figures and tables of the page on validation, made from the files in book/data.

`mla-ref validate rows --full`, `modes --full` and `recipe --full` write them. A file that is not
there stops the build: a page without its data would be an opinion.
"""

import json
from functools import cache
from pathlib import Path

from page_figure import inline
from page_table import table
from receipts_page import kernels_in_words

DATA = Path(__file__).resolve().parents[1] / "data"
# How the page calls what a file calls by its pair.
PAIRS = {
    "extend || decode": "extend ∥ decode",
    "token-wise || decode": "token-wise ∥ decode",
    "token-wise || extend": "token-wise ∥ extend",
    "decode || null": "null control",
    "decode || positive": "positive control",
}


@cache
def data(name: str) -> dict:
    return json.loads((DATA / f"validation-{name}.json").read_text("utf-8"))


def validation_source(env, name: str) -> str:
    """The command that made a file, and where it ran."""
    found = data(name)
    versions = ", ".join(f"{what} {version}" for what, version in found["versions"].items())
    device = found.get("device_name") or "a CPU"
    threads = f", {found['threads']} threads" if "threads" in found else ""
    return (
        f"*Made by `{found['command']}` on {device}{threads}; {versions}. "
        f"Drawn by chance: {found['chance']}. "
        f"The file: `book/data/validation-{name}.json`.*{_stale(found)}"
    )


def _stale(found: dict) -> str:
    """What is to be said where the kernels of a file have changed since."""
    if not found.get("kernel_hash"):
        return ""
    return f" {kernels_in_words(found['backend'], found['kernel_hash'])}"


def validation_summary(env, name: str) -> str:
    """How many rows, and how many configurations hold."""
    found = data(name)
    held = sum(f["verdict"]["status"] == "holds" for f in found["findings"])
    lines = [
        f"**{found['rows']:,} verifier rows in {len(found['findings'])} configurations: decode and "
        f"extend are the same to rounding in {held}.**"
    ]
    lines += [f["headline"] for f in found["findings"] if f["verdict"]["status"] != "holds"]
    return "\n\n".join(lines)


def validation_axes(env, name: str) -> str:
    """A row a configuration."""
    rows = [
        ["configuration", "rows", "KL", "null", "positive", "top-1", "top-10", "layers"],
        ["---"] + ["--:"] * 7,
    ]
    for finding in data(name)["findings"]:
        apart = pair(finding, "extend || decode")
        layers = next(e for e in finding["layers"] if e["pair"] == ["decode", "extend"])
        controls = (pair(finding, f"decode || {other}") for other in ("null", "positive"))
        rows.append(
            [
                configuration(finding),
                finding["rows"],
                *(number(found["kl"]["mean"]) for found in (apart, *controls)),
                changes(finding["verdict"]["top1_changes"]),
                f"{apart['top10_overlap']['mean']:.1%}",
                number(layers["rel_l2"]["max"]),
            ]
        )
    return table(rows)


def validation_positions(env, which: str) -> str:
    """KL of each pair: over all rows, then the mean by position in the verifier batch."""
    finding = find(which)
    count = len(finding["pairs"][0]["kl_by_position"])
    everywhere = [["KL, nats", "mean", "median", "std. dev.", "least", "most"]]
    places = [["mean KL, nats", "accepted", *(f"draft {i}" for i in range(1, count))]]
    for rows in (everywhere, places):
        rows.append(["---"] + ["--:"] * (len(rows[0]) - 1))
    for name, words in PAIRS.items():
        found = pair(finding, name)
        kl = [found["kl"][key] for key in ("mean", "median", "stdev", "min", "max")]
        everywhere.append([words, *map(number, kl)])
        means = [summary["mean"] for summary in found["kl_by_position"]]
        places.append([words, *map(number, means)])
    return f"{table(everywhere)}\n\n{table(places)}"


def validation_figure(env, which: str) -> str:
    """Rows, layers and controls of one configuration, as SVG in the page."""
    from mla_ref.teaching import style
    from mla_ref.validation import draw_validation

    finding = find(which)
    with style.styled():
        return inline(draw_validation(finding, narrow=True), finding["headline"])


def validation_ways(env, name: str) -> str:
    """What modes and ranks wrote, and what they accepted; the original's counts below."""
    found = data(name)
    modes, ranks = found["modes"], found["ranks"]
    rows = [
        ["way", "accepted / drafted", "rate", "95 % (Wilson)", "length"],
        ["---", "--:", "--:", "--:", "--:"],
    ]
    for one in (*modes["acceptance"], *ranks["acceptance"], *found["original"]):
        low, high = one["wilson_95"]
        rows.append(
            [
                one["name"],
                f"{one['accepted']} / {one['drafted']}",
                f"{one['rate']:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"{one['mean_acceptance_length']:.2f}",
            ]
        )
    lines = [modes["headline"], ranks["headline"], f"{found['what']}."]
    ties = [*modes["departures"], *ranks["departures"]]
    if ties:
        lines.append(
            "Where a text leaves plain decoding, the two tokens' logits and what rounding alone "
            "moves there: "
            + "; ".join(
                f"{tie['way']}, {tie['prompt']}, token {tie['place']}: gap {number(tie['gap'])}, "
                f"limit {number(tie['limit'])}"
                for tie in ties
            )
            + "."
        )
    return "\n\n".join([*lines[:2], table(rows), *lines[2:]])


def validation_recipe(env) -> str:
    """A row a recipe, then what the verifier rows say."""
    found = data("recipe")
    rows = [
        ["recipe", "perplexity", "KL(plain ∥ recipe)", "top-1 as plain", "accepted", "length"],
        ["---"] + ["--:"] * 5,
    ]
    for one in found["recipes"]:
        took = one["acceptance"]
        rows.append(
            [
                one["name"],
                f"{one['perplexity']:.2f}",
                number(one["kl_of_plain_and_recipe"]),
                f"{one['top1_as_plain']:.1%}",
                f"{took['accepted']} / {took['drafted']}",
                f"{took['mean_acceptance_length']:.2f}",
            ]
        )
    text = f"Text: {found['text']}; {found['topk']} keys a row where lists are sparse."
    return "\n\n".join([table(rows), text, found["emulated"], found["verifier_rows"]["headline"]])


def find(which: str) -> dict:
    """The finding of a configuration, by a name such as `fp32-fp8-sparse`."""
    dtype, cached, lists = which.split("-")
    wanted = {"dtype": dtype, "cache": cached, "sparse": lists == "sparse", "shards": 1}
    return next(f for f in data("rows")["findings"] if wanted.items() <= f["configuration"].items())


def configuration(finding: dict) -> str:
    it = finding["configuration"]
    words = [it["dtype"], f"{it['cache']} cache", "sparse" if it["sparse"] else "dense"]
    if it["shards"] > 1:
        words.append(f"{it['shards']} shards")
    return ", ".join(words)


def changes(found: list[dict]) -> str:
    ties = sum(change["tie"] for change in found)
    if len(found) > ties:
        return f"**{len(found)}, {ties} of them ties**"
    return f"{ties} ties" if ties else "none"


def pair(finding: dict, name: str) -> dict:
    return next(p for p in finding["pairs"] if f"{p['reference']} || {p['tested']}" == name)


def number(value: float | None) -> str:
    if value is None:
        return "NaN"
    # A minus sign: at a hyphen the line would break.
    return f"{value:.1e}".replace("-", "−") if value else "0"


FUNCTIONS = (
    validation_source,
    validation_summary,
    validation_axes,
    validation_positions,
    validation_figure,
    validation_ways,
    validation_recipe,
)
