"""The page in a real browser, from disk: it copies, fits and asks nothing of the network."""

import shutil

import pytest

from nucleon.report.page import render

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, some_runs, tmp_path):
    """Open the page; afterwards nothing was asked of the network and nothing complained."""
    path = tmp_path / "report.html"
    path.write_text(render(some_runs), encoding="utf-8")
    complaints, requests, contexts = [], [], []

    def go(**options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} <= {path.as_uri()}


def test_tables_are_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    read = "navigator.clipboard.readText()"
    first, evil = (page.locator("article").nth(i).locator("table").nth(1) for i in (0, 1))
    first.get_by_role("button", name="copy as CSV").click()
    first.get_by_text("copied").wait_for()
    assert page.evaluate(read) == 'plain words,value\nplain words,1.23456789\n"a ""b"", c",50.0\n'
    evil.get_by_role("button", name="copy as LaTeX").click()
    evil.get_by_text("copied").wait_for()
    assert page.evaluate(read) == (
        "\\begin{tabular}{lr}\n  \\toprule\n"
        '  <script>alert("x")</script> \\& [bold]é & value \\\\\n  \\midrule\n'
        '  <script>alert("x")</script> \\& [bold]é & 1.235 \\\\\n  a "b", c & 50 \\\\\n'
        "  \\bottomrule\n\\end{tabular}\n"
    )


def test_the_page_follows_a_dark_system_and_reads_without_scripts(visit):
    page = visit(color_scheme="dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(22, 24, 27)"
    page = visit(java_script_enabled=False)
    assert page.locator("img").count() == 3
    assert page.get_by_role("button").count() == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(visit, width):
    page = visit(viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    marks = page.locator("td .mark")
    right = marks.evaluate_all("all => Math.max(...all.map(m => m.getBoundingClientRect().right))")
    assert right <= width  # a verdict is not behind the edge of a table that scrolls
