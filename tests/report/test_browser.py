"""The page in a real browser, from disk, with every request and every complaint watched."""

import os
import shutil
from dataclasses import replace

import pytest

from nucleon.claims import Panel, Series
from nucleon.report import render
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


@pytest.fixture(scope="module")
def address(some_runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(some_runs), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """Open the page; afterwards nothing was asked of the network and nothing complained."""
    contexts, complaints, requests = [], [], []

    def go(**options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        if options.get("java_script_enabled", True):  # a panel is drawn once it has a size
            # Not wait_for_function: its second look evaluates a string, which the page forbids.
            empty = page.locator(".panel:not(:has(text.y-tick))")
            playwright.expect(empty).to_have_count(0, timeout=30_000)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} <= {address}


def charts(page):
    """The figure of the run without checks: two panels that share their axes."""
    return page.locator("figure").nth(2)


def lines(figure):
    return figure.locator(".panel").nth(0).locator("g.series path.line")


def ticks(figure, axis, panel=0):
    return figure.locator(".panel").nth(panel).locator(f"text.{axis}-tick").all_text_contents()


def test_it_loads_and_draws_every_figure(visit, some_runs):
    page = visit()
    assert page.locator(".panel svg[role=img]").count() == 4
    assert lines(charts(page)).count() == 2
    assert all("M" in lines(charts(page)).nth(i).get_attribute("d") for i in range(2))
    assert page.locator("img.static").first.is_hidden()
    evil = page.locator("figure").nth(1)
    assert evil.locator(".panel-head span").text_content() == EVIL
    assert page.evaluate("document.scripts.length") == len(some_runs) + 1


def test_a_gap_in_the_data_is_a_gap_in_the_line(visit):
    second = visit().locator("figure").nth(0).locator("g.series.s4")
    assert second.locator("path.line").get_attribute("d").count("M") == 2
    assert second.locator("circle.dot").count() == 2  # points alone are dots, or not seen


def test_the_legend_hides_and_shows_a_series(visit):
    figure = charts(visit())
    key, before = figure.get_by_role("button", name="ftl"), ticks(figure, "y")
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert lines(figure).count() == 1
    assert figure.locator(".panel").nth(1).locator("g.series").count() == 1
    assert ticks(figure, "y") != before  # the axis fits what is left
    key.click()
    assert lines(figure).count() == 2
    assert ticks(figure, "y") == before


def test_axes_change_between_linear_and_log(visit):
    figure = charts(visit())
    button = figure.locator("button[data-axis=y]").first
    assert button.text_content() == "y: linear"
    path = lines(figure).first.get_attribute("d")
    assert ticks(figure, "y") == ["0", "50", "100", "150", "200"]
    button.click()
    assert button.text_content() == "y: log"
    assert ticks(figure, "y") == ["1", "2", "5", "10", "20", "50", "100", "200"]
    assert ticks(figure, "y", panel=1) == ticks(figure, "y")  # they share their axes
    assert lines(figure).first.get_attribute("d") != path
    figure.locator("button[data-axis=x]").first.click()
    assert ticks(figure, "x") == ["1", "2", "5", "10", "20", "50", "100"]
    button.click()
    assert ticks(figure, "y") == ["0", "50", "100", "150", "200"]


def test_hovering_shows_the_nearest_values(visit):
    figure = charts(visit())
    panel = figure.locator(".panel").first
    assert panel.locator(".tip").is_hidden()
    box = panel.locator("svg[role=img]").bounding_box()
    panel.locator("svg[role=img]").hover(position={"x": box["width"] - 16, "y": box["height"] / 2})
    assert panel.locator(".tip").is_visible()
    assert panel.locator(".tip div").all_text_contents() == ["round t 100", "ftl200", "faml10"]
    assert panel.locator("line.cursor").count() == 1
    figure.locator("h3").hover()
    assert panel.locator(".tip").is_hidden()


def test_the_theme_follows_the_system_and_the_button(visit):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = "rgb(251, 251, 250)", "rgb(22, 24, 27)"
    page = visit(color_scheme="light")
    assert background(page) == light
    page.locator("#theme").click()
    assert background(page) == dark
    page.reload()
    assert background(page) == dark  # it is remembered
    page = visit(color_scheme="dark")
    assert background(page) == dark
    page.locator("#theme").click()
    assert background(page) == light
    assert background(visit(color_scheme="dark", java_script_enabled=False)) == dark


def test_tables_copy_as_csv_and_latex(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    table = page.locator("article").first.locator("table").nth(1)
    read = "navigator.clipboard.readText()"
    table.get_by_role("button", name="copy as CSV").click()
    table.get_by_text("copied").wait_for()
    assert page.evaluate(read) == 'plain words,value\nplain words,1.23456789\n"a ""b"", c",50.0\n'
    evil = page.locator("article").nth(1).locator("table").nth(1)
    evil.get_by_role("button", name="copy as LaTeX").click()
    evil.get_by_text("copied").wait_for()
    assert page.evaluate(read) == (
        "\\begin{tabular}{lr}\n  \\toprule\n"
        '  <script>alert("x")</script> \\& [bold]é & value \\\\\n  \\midrule\n'
        '  <script>alert("x")</script> \\& [bold]é & 1.235 \\\\\n  a "b", c & 50 \\\\\n'
        "  \\bottomrule\n\\end{tabular}\n"
    )


def test_without_a_clipboard_the_text_is_shown(visit):
    page = visit()
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject('no'); }")
    page.get_by_role("button", name="copy as CSV").first.click()
    assert page.locator("textarea").input_value().startswith("check,measured,tolerance,verdict\n")


def test_without_scripts_the_drawings_are_there(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("img.static").count() == 3
    assert page.locator("img.static").first.is_visible()
    assert not page.locator("#theme").is_visible()
    assert not page.get_by_role("button", name="copy as CSV").first.is_visible()


def test_on_paper_the_drawings_are_there(visit):
    page = visit(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("img.static").first.is_visible()
    assert not page.locator(".chart").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(visit, theme, width):
    page = visit(color_scheme=theme, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    marks = page.locator(".summary .mark")
    right = marks.evaluate_all("all => Math.max(...all.map(m => m.getBoundingClientRect().right))")
    assert right <= width  # a verdict is not behind the edge of a table that scrolls
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/report-{theme}-{width}.png", full_page=True)


def test_a_long_series_is_drawn(browser, some_runs, tmp_path):
    """A log of every step has more points than a function may have arguments."""
    run = some_runs[2]
    steps = [float(t) for t in range(300_000)]
    panel = Panel("long", "step", "loss", (Series("loss", steps, steps),))
    figure = replace(run.result.figures[0], panels=(panel,))
    long = replace(run, result=replace(run.result, figures=(figure,)))
    (tmp_path / "page.html").write_text(render([long]), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    playwright.expect(page.locator("text.y-tick").first).to_be_visible(timeout=60_000)
    page.close()
