"""One run as one HTML file that needs nothing else: no network, no other file."""

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nucleon.experiments.base import Cell, Claim, Result


def number(value: Cell) -> str:
    """A cell as text: numbers with four significant digits."""
    return value if isinstance(value, str) else f"{value:.4g}"


def render(
    claim: Claim,
    result: Result,
    *,
    command: str,
    drawings: Sequence[str],
    facts: Mapping[str, str],
) -> str:
    """The page; every word in it is escaped.

    Args:
        claim: what was checked.
        result: what came out.
        command: that makes this page again.
        drawings: the SVG of each figure of the result, in order.
        facts: name → value of what the reader may want to know of the run.
    """
    environment = Environment(
        loader=PackageLoader("nucleon.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["number"] = number
    # matplotlib has escaped the words inside its drawings.
    figures = zip(result.figures, map(_without_prolog, drawings), strict=True)
    return environment.get_template("page.html").render(
        claim=claim, result=result, command=command, figures=figures, facts=facts
    )


def _without_prolog(svg: str) -> Markup:
    """The <svg> element alone: HTML knows neither an XML declaration nor a second doctype."""
    return Markup(svg[svg.index("<svg") :])
