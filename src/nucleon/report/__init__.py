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
        State,
        Subject,
        announce,
        draft,
        publish,
        run_name,
        seal,
    )
    from nucleon.report.saved import DamagedRunError, Saved, completed, find, load, load_all

__all__ = [
    "MANIFEST",
    "RESULT",
    "TRACE",
    "DamagedRunError",
    "Run",
    "Saved",
    "State",
    "Subject",
    "announce",
    "completed",
    "draft",
    "draw",
    "find",
    "load",
    "load_all",
    "number",
    "publish",
    "render",
    "run_name",
    "seal",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "page": "number render",
        "plots": "draw",
        "runs": "announce draft MANIFEST publish RESULT Run run_name seal State Subject TRACE",
        "saved": "completed DamagedRunError find load load_all Saved",
    },
)
