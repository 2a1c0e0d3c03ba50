"""Under each exercise of a lesson's page, its solution, folded.

A notebook does not hold the solutions, so that a reader in Jupyter is not shown what they are about
to write. The page is made from the notebook: as Sphinx reads it, a cell is added in memory after
each cell that grades. The file that a page's download button hands out stays as it is.
"""

import ast
import json
import re
from pathlib import Path

GRADING = re.compile(r"^grade\(\"([\w-]+)\", (\w+)\)$")
FOLD = """\
<details class="admonition">
<summary class="admonition-title">A solution</summary>

```python
{code}
```

</details>"""


def fold(app, docname: str, source: list[str]) -> None:
    """Add the solutions to one lesson."""
    if not docname.startswith("lessons/"):
        return
    number = Path(docname).name[:2]
    path = Path(app.srcdir).parent / "lessons" / "solutions" / f"lesson_{number}.py"
    app.env.note_dependency(str(path))
    source[0] = with_solutions(source[0], path.read_text("utf-8"))


def with_solutions(notebook: str, solutions: str) -> str:
    """A notebook with a folded solution after each cell that is a call of `grade`."""
    data = json.loads(notebook)
    cells = []
    for cell in data["cells"]:
        cells.append(cell)
        if cell["cell_type"] == "code" and (call := GRADING.match("".join(cell["source"]))):
            exercise, name = call.groups()
            text = FOLD.format(code=solution(solutions, name))
            cells.append(
                {
                    "cell_type": "markdown",
                    "id": f"solution-{exercise}",
                    "metadata": {},
                    "source": text.splitlines(keepends=True),
                }
            )
    data["cells"] = cells
    return json.dumps(data)


def solution(module: str, name: str) -> str:
    """A function of a module, with the imports, constants and functions of it that it needs."""
    body = ast.parse(module).body
    owners = {own: node for node in body for own in defined(node)}
    needed, waiting = set(), [name]
    while waiting:
        if (node := owners[waiting.pop()]) not in needed:
            needed.add(node)
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            waiting += sorted(used & set(owners))
    chosen = [node for node in body if node in needed]
    imports = [n for n in chosen if isinstance(n, (ast.Import, ast.ImportFrom))]
    rest = [source(module, node) for node in chosen if node not in imports]
    return "\n\n\n".join(["\n".join(source(module, node) for node in imports), *rest]).strip()


def source(module: str, node: ast.stmt) -> str:
    """The text of a statement, decorators and the comments above it included."""
    lines = module.splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target)
                if isinstance(part, ast.Name)]  # fmt: skip
    return []


def setup(app):
    app.connect("source-read", fold)
    return {"parallel_read_safe": True}
