"""The page in a real browser, from disk: it draws, copies, fits and asks nothing of the network."""

import shutil

import pytest

from nucleon.report.page import render
from toys import EVIL

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
        if options.get("java_script_enabled", True):  # a panel is drawn once it has a size
            playwright.expect(page.locator(".panel:not(:has(text.y-tick))")).to_have_count(0)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} <= {path.as_uri()}


def test_charts_are_drawn_and_answer(visit):
    page = visit()
    assert page.locator(".panel svg[role=img]").count() == 4
    assert page.locator("img.static").first.is_hidden()
    gap, evil, figure = page.locator("figure").all()
    assert evil.locator(".panel-head").text_content() == EVIL
    broken = gap.locator("g.series.s4")  # a value is missing: two pieces, points alone are dots
    assert broken.locator("path.line").get_attribute("d").count("M") == 2
    assert broken.locator("circle.dot").count() == 2

    def ticks(axis, panel):
        place = figure.locator(".panel").nth(panel)
        return place.locator(f"text.{axis}-tick").all_text_contents()

    lines = figure.locator(".panel").first.locator("g.series path.line")
    key, before = figure.get_by_role("button", name="ftl"), ticks("y", 0)
    assert lines.count() == 2
    key.click()
    assert lines.count() == 1 and ticks("y", 0) != before  # the axis fits what is left
    key.click()
    assert lines.count() == 2 and ticks("y", 0) == before == ["0", "50", "100", "150", "200"]
    assert ticks("y", 1) == ticks("y", 0)  # they share their axes
    panel = figure.locator(".panel").first
    box = panel.locator("svg[role=img]").bounding_box()
    panel.locator("svg[role=img]").hover(position={"x": box["width"] - 16, "y": box["height"] / 2})
    assert panel.locator(".tip div").all_text_contents() == ["round t 100", "ftl200", "faml10"]


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


def test_dark_paper_and_a_reader_without_scripts(visit):
    page = visit(color_scheme="dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(22, 24, 27)"
    page.emulate_media(media="print")
    assert page.locator("img.static").first.is_visible()
    assert not page.locator(".chart").first.is_visible()
    page = visit(java_script_enabled=False)
    assert page.locator("img.static").count() == 3
    assert page.locator("img.static").first.is_visible()


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(visit, width):
    page = visit(viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    marks = page.locator("td .mark")
    right = marks.evaluate_all("all => Math.max(...all.map(m => m.getBoundingClientRect().right))")
    assert right <= width  # a verdict is not behind the edge of a table that scrolls
