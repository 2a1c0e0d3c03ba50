"""The built site in headless Chromium, as readers have it: on a desk and a phone, light and dark.

Chromium is the system's own, and Playwright drives it (`pip install 'mla-ref[browser]'`, nothing
else is fetched). Where one of them or the built site is missing the tests are skipped; with
MLA_REF_REQUIRE_BROWSER=1 or MLA_REF_REQUIRE_BOOK=1, which CI sets, that is a failure.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "book" / "_build" / "html"
DESK, PHONE = (1280, 900), (390, 844)
# One of each kind, and those with the widest tables and figures.
PAGES = (
    "index",
    "start",
    "ladder",
    "features",
    "lessons/02_online_softmax",
    "lessons/08_fp8_cache",
    "guides/oracle",
    "verifier",
    "api/attention",
    "cli",
    "formats",
    "museum",
    "validation",
    "receipts",
    "sm120",
    "glossary",
    "bibliography",
)

pytestmark = pytest.mark.thorough


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address at which the built site is served, on this machine."""
    if not (SITE / "index.html").is_file():
        missing("BOOK", "the book is not built: make book")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        missing("BROWSER", "there is no Chromium: on Debian, apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("BROWSER", "Playwright is not installed: pip install 'mla-ref[browser]'")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program)
        yield chromium
        chromium.close()


def missing(what: str, reason: str) -> None:
    if os.environ.get(f"MLA_REF_REQUIRE_{what}") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Reader:
    """A tab, and what went wrong in it.

    Attributes:
        page: Playwright's page.
        complaints: Errors of the console and of scripts, files that are not there, and requests
            that would leave the site.
    """

    def __init__(self, browser: Any, site: str, size: tuple[int, int], theme: str) -> None:
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme
        )
        # What does not come at all ends the test; how busy the machine is must not.
        self.context.set_default_timeout(120_000)
        self.page = self.context.new_page()
        self.site = site
        self.complaints: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._complain(f"script error: {error}"))
        self.page.on("response", self._on_response)
        self.page.on("request", self._on_request)

    def open(self, name: str) -> None:
        self.page.goto(f"{self.site}/{name}.html")

    def _complain(self, words: str) -> None:
        self.complaints.append(f"{self.page.url.removeprefix(self.site)}: {words}")

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self._complain(f"console: {message.text}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 400:
            self._complain(f"{response.status} {response.url}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.site, "data:", "blob:")):
            self._complain(f"asks {request.url}")


@pytest.fixture
def read(browser: Any, site: str) -> Iterator[Any]:
    """Opens a tab of a size and a theme; closed after the test."""
    readers: list[Reader] = []

    def tab(size: tuple[int, int] = DESK, theme: str = "light") -> Reader:
        readers.append(Reader(browser, site, size, theme))
        return readers[-1]

    yield tab
    for reader in readers:
        reader.context.close()


@pytest.mark.parametrize(
    "size, theme", [(DESK, "light"), (PHONE, "dark")], ids=["desk-light", "phone-dark"]
)
def test_no_page_complains_or_scrolls_sideways(read: Any, size: tuple, theme: str) -> None:
    reader = read(size, theme)
    for name in PAGES:
        reader.open(name)
        # Formulas and figures take their final width only when MathJax has set them.
        reader.page.evaluate("window.MathJax?.startup?.promise")
        wide = reader.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        if wide > 0:
            reader.complaints.append(f"{name}: {wide} pixels wider than the window")
    assert not reader.complaints, "\n".join(reader.complaints)


@pytest.mark.parametrize("name", ["glossary", "lessons/02_online_softmax"])
def test_every_equation_is_rendered(read: Any, name: str) -> None:
    reader = read()
    reader.open(name)
    reader.page.evaluate("MathJax.startup.promise")
    formulas = reader.page.locator("article .math")
    assert formulas.count() > 5
    assert reader.page.locator("article .math:not(:has(svg))").count() == 0
    assert reader.page.locator("article [data-mjx-error], article mjx-merror").count() == 0


def test_search_finds_LSE(read: Any) -> None:
    reader = read()
    reader.page.goto(f"{reader.site}/search.html?q=LSE")
    reader.page.locator("#search-results li a").first.wait_for()
    reader.page.wait_for_function("Search.status?.innerText?.includes('found')")
    found = reader.page.locator("#search-results li > a").evaluate_all(
        "links => links.map(link => new URL(link.href).pathname)"
    )
    assert "/glossary.html" in found
    assert any(path.startswith("/lessons/") for path in found)


def test_a_click_copies_the_code(read: Any) -> None:
    reader = read()
    reader.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=reader.site)
    reader.open("guides/oracle")
    cell = reader.page.locator(".cell_input .highlight").first
    cell.hover()
    cell.locator("button.copybtn").click()
    copied = reader.page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[0] == "import torch"
    assert copied.strip() == cell.locator("pre").inner_text().strip()


def brightness(reader: Reader, place: str, of: str) -> float:
    """From 0, black, to 1, white."""
    colour = reader.page.locator(place).first.evaluate(f"e => getComputedStyle(e).{of}")
    red, green, blue = (float(x) for x in colour.split("(")[1].rstrip(")").split(",")[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.mark.parametrize("theme, ground", [("light", 1.0), ("dark", 0.0)])
def test_the_page_follows_the_reader_s_theme_and_the_button_changes_it(
    read: Any, theme: str, ground: float
) -> None:
    reader = read(DESK, theme)
    reader.open("sm120")
    assert abs(brightness(reader, "body", "backgroundColor") - ground) < 0.15
    assert abs(brightness(reader, "article p", "color") - ground) > 0.6
    turned = reader.page.locator("article div[role=img] > svg").first.evaluate(
        "e => getComputedStyle(e).filter"
    )
    assert ("invert" in turned) == (theme == "dark")
    other = "light" if theme == "dark" else "dark"
    reader.page.locator("button.theme-switch-button").first.click()
    reader.page.locator(f"button.theme-change-button[data-mode={other}]").first.click()
    reader.page.locator(f"html[data-theme={other}]").wait_for()
    assert abs(brightness(reader, "body", "backgroundColor") - (1 - ground)) < 0.15


def test_on_a_phone_the_menu_leads_to_the_lessons(read: Any) -> None:
    reader = read(PHONE)
    reader.open("index")
    link = reader.page.locator(".bd-sidebar-primary a", has_text="Lesson 02").first
    assert not link.is_visible()
    reader.page.locator("button.primary-toggle").first.click()
    link.click()
    reader.page.wait_for_url("**/lessons/02_online_softmax.html")
    assert not reader.complaints


def test_a_term_in_a_lesson_leads_to_its_entry(read: Any) -> None:
    reader = read()
    reader.open("lessons/02_online_softmax")
    reader.page.locator("a.reference:has(.std-term)", has_text="LSE").first.click()
    reader.page.wait_for_url("**/glossary.html#term-LSE")
    assert reader.page.locator("dt#term-LSE").is_visible()
