"""The command `nucleon`, one file per verb.

Imports every other package, typer and rich; nothing imports it.
"""

import sys
from importlib.util import find_spec

_EXTRA = ("typer", "rich", "matplotlib", "jinja2")


def main() -> None:
    """Run the command line; without the extra [cli], print what to install."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        print(
            f"nucleon: the command line needs {', '.join(missing)}; install the extra [cli]: "
            f"pip install 'nucleon-optim[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from nucleon.cli.app import app  # here, since it needs the extra

    app(prog_name="nucleon")
