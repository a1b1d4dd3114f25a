"""The built site: strict, searchable, and with every option of the optimizers in a table."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nucleon.optim import OPTIMIZERS, options

ROOT = Path(__file__).parents[1]
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` does; any warning is an error there."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_option_has_a_row_with_its_default(site):
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = (site / "api/index.html").read_text(encoding="utf-8")
    assert "<!-- options of" not in page
    optimizers = [make.__self__.__name__ for make in OPTIMIZERS.values()]
    tables = {f"{x}Options": options.added_by(hook.CLASSES[f"{x}Options"]) for x in optimizers}
    tables |= {"Options": options.SHARED, "AdamWOptions": options.ADAMW_DEFAULTS}
    for name, declared in tables.items():
        assert set(hook.fields(name)) == set(declared), name
        for option in declared:
            assert f"<td><code>{option}</code></td>" in page, option


def test_formulas_are_not_taken_for_emphasis(site):
    pages = [p.read_text(encoding="utf-8") for p in site.rglob("*.html")]
    emphasized = [words for page in pages for words in re.findall(r"<em>(.*?)</em>", page)]
    assert "potential" in emphasized  # as docs/theory.md means it
    assert not [words for words in emphasized if re.search(r"[‖_*⟨]|^op\b", words)]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
def test_the_search_finds_options_and_pages_from_disk(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    start = site.as_uri()
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{start}/index.html")
        box = page.locator("input.md-search__input")
        box.click()
        for words, expected in (
            ("smoothing_scale", "api/index.html#leon"),
            ("out of memory", "troubleshooting.html#out-of-memory"),
            ("augmented_polar", "api/linalg.html#nucleon.linalg.augmented_polar"),
        ):
            box.fill("")
            box.press_sequentially(words)
            link = page.locator(f'.md-search-result__link[href*="{expected}"]').first
            playwright.expect(link).to_be_attached(timeout=30_000)
        link.click()
        page.wait_for_url(f"{start}/api/linalg.html*")
        assert [url for url in asked if not url.startswith((start, "data:"))] == []
        browser.close()
