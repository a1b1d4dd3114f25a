"""Runs as one HTML file that needs no network and no other file; every word is escaped."""

import base64
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import nucleon
from nucleon.claims import Cell
from nucleon.report.runs import DamagedRunError, Saved


def number(value: Cell) -> str:
    """Return a cell as text, numbers with four significant digits."""
    return value if isinstance(value, str) else f"{value:.4g}"


def render(runs: Sequence[Saved], damaged: Sequence[DamagedRunError] = ()) -> str:
    """Return the page of `runs`, in this order, with a line for each damaged run."""
    environment = Environment(
        loader=PackageLoader("nucleon.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    ids = [run.manifest["id"] for run in runs]
    return environment.get_template("page.html").render(
        runs=[_view(run, ids) for run in runs],
        damaged=damaged,
        heading=_heading(runs),
        version=nucleon.__version__,
        style=Markup(_resource("page.css")),  # nothing of a run is in these
        script=Markup(_resource("page.js")),
    )


def _view(run: Saved, ids: Sequence[str]) -> dict[str, Any]:
    """Return the variables of the template for a run."""
    about, name = run.manifest, run.manifest["id"]
    # As images, drawings have names that cannot clash with another's.
    images = [f"data:image/svg+xml;base64,{base64.b64encode(x).decode()}" for x in run.drawings]
    return {
        "about": about,
        "label": name if ids.count(name) == 1 else f"{name}/{run.folder.name}",
        "mark": {True: "PASS", False: "FAIL", None: ""}[about["passed"]],
        "result": run.result,
        "figures": list(zip(run.result.figures, images, strict=True)),
        "facts": {
            "started": f"{datetime.fromisoformat(about['started']):%Y-%m-%d %H:%M:%S %z}",
            "took": f"{about['seconds']:.1f} s",
            "options": _pairs(about["options"], " = "),
            "commit": about["commit"] or "unknown",
            "versions": _pairs(about["versions"], " "),
            "machine": _pairs(about["machine"], " = "),
            "folder": run.folder,
        },
    }


def _pairs(values: dict[str, Any], between: str) -> str:
    return ", ".join(f"{k}{between}{v}" for k, v in values.items() if v is not None)


def _heading(runs: Sequence[Saved]) -> str:
    verdicts = [run.manifest["passed"] for run in runs if run.manifest["place"]]  # in the paper
    verdicts = [verdict for verdict in verdicts if verdict is not None]
    if not verdicts:
        return f"{len(runs)} run{'s' * (len(runs) != 1)}"
    if len(verdicts) == 1:
        return "The claim holds" if verdicts[0] else "The claim does not hold"
    return f"{sum(verdicts)} of {len(verdicts)} claims hold"


def _resource(name: str) -> str:
    return files("nucleon.report").joinpath(name).read_text(encoding="utf-8")
