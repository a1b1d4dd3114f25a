"""Runs on disk: a manifest, a result, a trace, figures; and one self-contained page over them."""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon.report.page import number, render
    from nucleon.report.plots import draw
    from nucleon.report.runs import (
        MANIFEST,
        RESULT,
        TRACE,
        Run,
        Subject,
        draft,
        publish,
    )
    from nucleon.report.saved import DamagedRunError, Saved, completed, find, load, load_all

__all__ = [
    "MANIFEST",
    "RESULT",
    "TRACE",
    "DamagedRunError",
    "Run",
    "Saved",
    "Subject",
    "completed",
    "draft",
    "draw",
    "find",
    "load",
    "load_all",
    "number",
    "publish",
    "render",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "page": "number render",
        "plots": "draw",
        "runs": "draft MANIFEST publish RESULT Run Subject TRACE",
        "saved": "completed DamagedRunError find load load_all Saved",
    },
)
