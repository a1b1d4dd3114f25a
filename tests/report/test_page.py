import base64
import html
import json
import re
import shutil

from nucleon.claims import Settings
from nucleon.report.page import render
from nucleon.report.runs import completed, find, load
from toys import EVIL, toy


def words(page):
    """Return the text that a reader sees."""
    tags = r"<style.*?</style>|<script.*?</script>|<[^>]+>"
    return html.unescape(re.sub(tags, "", page, flags=re.S))


def test_what_was_measured_is_what_is_read_back(some_runs):
    expected = toy(words="plain words").run(Settings())
    read = some_runs[0].result
    assert (read.checks, read.notes) == (expected.checks, expected.notes)
    assert [list(map(tuple, table.rows)) for table in read.tables] == [
        list(table.rows) for table in expected.tables
    ]
    written = json.loads((some_runs[0].folder / "result.json").read_text())
    first, second = written["figures"][0]["panels"][0]["series"]
    assert first["y"] == [3.0, 1.0, 30.0] and second["y"] == [1.0, "nan", 100.0]
    assert [run.manifest["passed"] for run in some_runs] == [True, False, None]


def test_the_page_has_all_there_is_to_say(some_runs):
    page = render(some_runs)
    text = words(page)
    assert "1 of 2 claims hold" in text
    named = ("plain words", "PASS", "FAIL", "1.235", "≤\N{NO-BREAK SPACE}1", "torch")
    assert all(word in text for word in (*named, "nucleon reproduce good"))
    assert text.count("copy as CSV") == text.count("copy as LaTeX") == 4
    assert 'data-value="1.23456789"' in page  # what is copied is exact
    images = re.findall(r'<img src="data:image/svg\+xml;base64,(.*?)"', page)
    for image, run in zip(images, some_runs, strict=True):
        assert base64.b64decode(image) == run.drawings[0]


def test_the_figures_come_before_the_checks(some_runs):
    page = render(some_runs[:1])
    assert page.index("<figure") < page.index("<table")


def test_every_word_is_escaped(some_runs):
    page = render([some_runs[1]])
    assert "The claim does not hold" in page
    assert "<script>alert" not in page
    assert words(page).count(EVIL) >= 7
    assert b"<script>" not in some_runs[1].drawings[0]


def test_the_page_needs_no_network_and_runs_no_other_script(some_runs):
    page = render(some_runs)
    assert not re.findall(r'<[^>]*(?:src|href)="(?!data:|#)', page)
    assert not re.findall(r"<[^>]* (?:on\w+|style)=", page)


def test_runs_of_one_id_are_told_apart_by_their_folders(some_runs, tmp_path):
    def links(runs):
        return re.findall(r'<a href="#run-\d+">(.*?)</a>', render(runs))

    assert links(some_runs)[0] == "good"
    folder = shutil.copytree(some_runs[0].folder, tmp_path / "<b>")
    shown = links([*some_runs, load(folder)])
    assert shown[0] == f"good/{some_runs[0].folder.name}"
    assert shown[1] == "lemma-decomposition"
    assert shown[-1] == "good/&lt;b&gt;"


def test_find_takes_the_newest_run_of_each_id(some_runs, tmp_path):
    newest = "20260102-000000-000000-aaaaaaaa"
    places = (
        "a/20260101-000000-000000-bbbbbbbb",
        f"a/{newest}",
        f"b/{newest}",
        "a/.x.tmp",
        "mine",
        ".y",
    )
    for place in places:
        (tmp_path / place).mkdir(parents=True)
    assert find(tmp_path) == [tmp_path / "a" / newest, tmp_path / "b" / newest]
    assert find(tmp_path / "a") == [tmp_path / "a" / newest]
    assert find(tmp_path / "absent") == []
    for place in ("mine", "a/.x.tmp", ".y"):  # drafts have a manifest before their name
        (tmp_path / place / "manifest.json").touch()
    assert find(tmp_path)[2:] == [tmp_path / "mine"]
    assert find(some_runs[0].folder) == [some_runs[0].folder]


def test_completed_wants_the_same_options(some_runs):
    root = some_runs[0].folder.parents[1]
    options = some_runs[0].manifest["options"]
    assert completed(root, "good", options).folder == some_runs[0].folder
    assert completed(root, "good", {**options, "quick": True}) is None
    assert completed(root, "other", options) is None
