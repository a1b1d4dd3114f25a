"""Runs as one HTML file that needs nothing else: no network, no other file.

Every word is escaped; figures are images and, for the script, data.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import nucleon
from nucleon.claims import Cell
from nucleon.report.plots import STYLES
from nucleon.report.saved import DamagedRunError, Saved

DIGITS = 6
"""Significant digits of the values in the charts; the files of the run have them all."""


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
        style=Markup(_resource("page.css") + _series_rules()),  # nothing of a run is in these
        script=Markup(_resource("page.js")),
    )


def _view(run: Saved, ids: Sequence[str]) -> dict[str, Any]:
    """Return the variables of the template for a run."""
    name, figures = run.manifest["id"], run.result["figures"]
    # As images, drawings have names that cannot clash with another's.
    images = [f"data:image/svg+xml;base64,{base64.b64encode(x).decode()}" for x in run.drawings]
    return {
        "about": run.manifest,
        "label": name if ids.count(name) == 1 else f"{name}/{run.folder.name}",
        "mark": {True: "PASS", False: "FAIL", None: ""}[run.manifest["passed"]],
        "result": run.result,
        "figures": list(zip(figures, images, map(_chart, figures), strict=True)),
        "facts": _facts(run),
    }


def _heading(runs: Sequence[Saved]) -> str:
    verdicts = [run.manifest["passed"] for run in runs if run.manifest["place"]]  # in the paper
    verdicts = [verdict for verdict in verdicts if verdict is not None]
    if not verdicts:
        return f"{len(runs)} run{'s' * (len(runs) != 1)}"
    if len(verdicts) == 1:
        return "The claim holds" if verdicts[0] else "The claim does not hold"
    return f"{sum(verdicts)} of {len(verdicts)} claims hold"


def _facts(run: Saved) -> dict[str, str]:
    about, machine = run.manifest, run.manifest["machine"]
    expected = "" if about["expected"] is None else f", about {about['expected']:.0f} s expected"
    return {
        "started": f"{datetime.fromisoformat(about['started']):%Y-%m-%d %H:%M:%S %z}",
        "took": f"{about['seconds']:.1f} s{expected}",
        "options": ", ".join(f"{k} = {v}" for k, v in about["options"].items() if v is not None),
        "commit": str(about["commit"] or "not known"),
        "versions": ", ".join(f"{name} {value}" for name, value in about["versions"].items()),
        "machine": ", ".join(f"{k} = {v}" for k, v in machine.items() if v is not None),
        "folder": str(run.folder),
    }


def _chart(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a figure for the script, null where one is not finite."""

    def points(series: Mapping[str, Any]) -> dict[str, Any]:
        columns = {name: _rounded(series[name]) for name in ("x", "y", "low", "high")}
        return {"name": series["name"], "style": series["style"] % len(STYLES), **columns}

    panels = [{**p, "series": [points(s) for s in p["series"]]} for p in figure["panels"]]
    return {"shared": figure["shared_axes"], "panels": panels}


def _rounded(values: Sequence[float | str] | None) -> list[float | None] | None:
    if values is None:
        return None
    numbers = map(float, values)  # of "nan" and "inf" too
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in numbers]


def _series_rules() -> str:
    """Return the colours and dashes of the figures as CSS."""
    rules = list[str]()
    for i, look in enumerate(STYLES):
        dash = " ".join(f"{2 * length:g}" for length in look.dash) or "none"
        colour = f"light-dark({look.colour}, {look.on_dark})"
        rules.append(f".s{i} {{ --c: {colour}; --dash: {dash}; }}\n")
    return "".join(rules)


def _resource(name: str) -> str:
    return files("nucleon.report").joinpath(name).read_text(encoding="utf-8")
