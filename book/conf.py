"""Sphinx configuration of the book site.

    sphinx-build -n -W --keep-going -b html book book/_build/html

The build needs no network, no GPU, and neither triton nor cupy. It executes every lesson.
"""

import os
import shutil
import sys
import typing
from pathlib import Path

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent

# autodoc imports the library here, and each lesson's kernel, started in another folder, imports
# it there. Absolute paths serve both, with the package installed or not.
SOURCE_ROOTS = [str(ROOT / "src"), str(ROOT / "kernels")]
sys.path[:0] = [str(BOOK / "_ext"), *SOURCE_ROOTS]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*SOURCE_ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# The reference describes what imports on any machine: here neither is installed, wherever we build.
# Mocks would let through what they hide (spikingjelly#716).
sys.modules.update(dict.fromkeys(["triton", "cupy"]))

project = "mla_ref"
author = "the mla_ref authors"
copyright = "the mla_ref authors. Code: Apache-2.0. Text and figures: CC BY 4.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_exercise",
    "sphinx_togglebutton",
    "sphinxcontrib.bibtex",
    "api_reference",
    "docstrings",
    "folded_solutions",
    "from_data",
    "glossary_links",
    "joined_streams",
]

# A virtual environment that somebody made inside this folder is full of README.md files.
exclude_patterns = [
    "_build",
    "_ext",
    "**/.ipynb_checkpoints",
    "**/.venv",
    "**/venv",
    "**/site-packages",
    "**/node_modules",
]
templates_path = []
bibtex_bibfiles = [str(BOOK / "references.bib")]
bibtex_default_style = "plain"

# -- Lessons -------------------------------------------------------------------------------------

# Every build runs every lesson: a cache is keyed on the notebook alone, so it would keep the old
# output after a change in src/. Authors may accept that and name a folder outside book/.
_cache = os.environ.get("MLA_REF_BOOK_CACHE")
nb_execution_mode = "cache" if _cache else "force"
nb_execution_cache_path = _cache or ""
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds a cell
nb_execution_show_tb = True


def copy_lessons(app):
    """Copy lessons/*.ipynb into the source folder, where Sphinx can see them.

    The notebooks live at the top of the repository, since readers open them in Jupyter. They stay
    notebooks here too, so that a page's download button hands out the notebook itself.
    """
    if Path(app.srcdir) != BOOK:
        return  # A test builds other pages with this configuration.
    target = BOOK / "lessons"
    target.mkdir(exist_ok=True)
    lessons = {path.name: path for path in (ROOT / "lessons").glob("*.ipynb")}
    for old in target.glob("*.ipynb"):
        if old.name not in lessons:
            old.unlink()
    for name, path in lessons.items():
        copy = target / name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)


# -- Text ----------------------------------------------------------------------------------------

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
mathjax_path = "mathjax/tex-svg.js"  # MathJax 3.2.2, one file: Sphinx's default is a CDN.

# -- API reference -------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
# Followed, a default such as time.perf_counter gets a link to the source of a built-in module.
viewcode_follow_imported_members = False
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # A list, as the arguments are.
napoleon_attr_annotations = False  # The class's own signature shows the types.
default_role = "code"

# jaxtyping's own switch for documentation: its types then print as `Float[Tensor, 's_q h_q d']`,
# without the module in front. It is read when jaxtyping is first imported.
typing.GENERATING_DOCUMENTATION = "mla_ref"

# -n makes every name without a page an error. The build asks the network for no other project's
# list of names, so those are let through: dotted names that are not ours, and what jaxtyping's
# types consist of. A type variable of ours has no page.
nitpick_ignore_regex = [
    ("py:.*", r"(?!mla_ref\.|mla_kernels\.)\w+\..+"),
    ("py:.*", r"Bool|Float|Int|Num|Shaped|UInt8|Tensor"),
    ("py:.*", r"mla_ref\.[\w.]+\.[A-Z]"),
]

# -- HTML ----------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = "mla_ref"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_context = {"default_mode": "auto"}  # Left out, the theme complains on the console.
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "footer_content_items": ["copyright"],
    "navbar_persistent": [],  # The sidebar has the search field already.
}


def setup(app):
    """Sphinx's hook: the lessons must be in place before it looks for source files."""
    app.connect("builder-inited", copy_lessons)
