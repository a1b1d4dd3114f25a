"""The command `nucleon`."""

import sys
from importlib.util import find_spec

_EXTRA = ("typer", "rich", "matplotlib", "jinja2")


def main() -> None:
    """Run the command line, or say in one sentence what to install for it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        print(
            f"nucleon: the command line needs {', '.join(missing)}, which the extra "
            f"[cli] brings: pip install 'nucleon-optim[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from nucleon.cli.app import app  # here, since it needs the extra

    app(prog_name="nucleon")
