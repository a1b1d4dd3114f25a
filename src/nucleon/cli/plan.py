"""`nucleon plan`: γ, D and T of the theorems for a target, or the reason why none exist."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

from nucleon.cli.console import (
    AsJson,
    Debug,
    console,
    hinting,
    matrix_shape,
    plain_errors,
    print_json,
)
from nucleon.online.o2nc.plans import Plan, Planned
from nucleon.online.o2nc.plans import plan as make_plan


def plan(
    optimizer: Annotated[Planned, typer.Option(help="Method of the theorem.")],
    rho: Annotated[float, typer.Option(help="Radius ρ of the stationary point.")],
    epsilon: Annotated[float, typer.Option(help="Accuracy ε in the nuclear norm.")],
    shape: Annotated[
        list[str], typer.Option(help="Rows x columns of a matrix, as 8x16; repeat it for several.")
    ],
    q_nuclear: Annotated[
        float, typer.Option(help="Sum over the matrices of ‖Q‖_*, where E[GGᵀ] ⪯ Q².")
    ],
    delta: Annotated[float, typer.Option(help="ΔL, the first loss less its infimum.")],
    gradient_bound: Annotated[float, typer.Option(help="G, at least every ‖G_t‖_op.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    r"""Compute the discount, radius and rounds that reach a (ρ, ε)-stationary point.

    `nucleon.online.estimate` measures --q-nuclear, --delta and --gradient-bound on batches of a
    model.

    Exit code 0 if the theorem reaches the target, 1 if the target is trivial, not covered or out of
    reach, 2 if the command failed.

    For example:

        nucleon plan --optimizer leon --rho 1 --epsilon .5 --shape 8x16 \
          --q-nuclear 3 --delta 2 --gradient-bound 1
    """
    with plain_errors(debug):
        with hinting("see `nucleon plan --help`"):
            planned = make_plan(
                optimizer,
                rho=rho,
                epsilon=epsilon,
                q_nuclear=q_nuclear,
                loss_gap=delta,
                gradient_bound=gradient_bound,
                shapes=[matrix_shape(words) for words in shape],
            )
        if as_json:
            bound = planned.bound
            total = {} if bound is None else {"bound": {**asdict(bound), "total": bound.total}}
            print_json({**asdict(planned), **total})
        else:
            _show(planned)
        raise typer.Exit(0 if planned.kind == "reachable" else 1)


def _show(planned: Plan) -> None:
    out = console()
    out.print(f"[bold]{planned.optimizer}[/]: {escape(planned.kind)}. {escape(planned.verdict)}")
    if planned.complexity is None or planned.bound is None:
        return
    grid = Grid(show_header=False, box=None)
    grid.add_row("discount γ", f"{planned.discount:.10g}", "the optimizer's momentum")
    grid.add_row("radius D", f"{planned.radius:.6g}", "its lr, with step_length='exponential'")
    grid.add_row("rounds T", f"{planned.rounds}", "")
    for name, value in planned.complexity.terms.items():
        grid.add_row(f"  T ≥ {name.replace('_', ' ')} term", f"{value:.6g}", "")
    for name in ("descent", "regret", "noise", "total"):
        grid.add_row(f"  promised: {name}", f"{getattr(planned.bound, name):.6g}", "")
    out.print(grid)
