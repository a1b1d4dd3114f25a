"""Runs on disk: a manifest, a trace, figures and one self-contained page."""

from nucleon.report.page import number, render
from nucleon.report.plots import draw
from nucleon.report.runs import MANIFEST, REPORT, TRACE, Run, draft, publish

__all__ = ["MANIFEST", "REPORT", "TRACE", "Run", "draft", "draw", "number", "publish", "render"]
