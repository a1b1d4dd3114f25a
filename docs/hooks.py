"""Hooks of mkdocs: tables of options from the code, and formulas that are not emphasis.

`<!-- options of LeonOptions -->` becomes a table of the fields of that class, with their types,
defaults and docstrings. The underscores and stars of ‖X‖_op, P_t and ‖S‖_* stay as they are.
"""

import ast
import inspect
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from markdown import Extension, Markdown
from markdown.inlinepatterns import SimpleTextInlineProcessor

from nucleon import optim
from nucleon.optim import options

CLASSES = {
    name: member
    for module in vars(optim).values()
    if isinstance(module, types.ModuleType)
    for name, member in vars(module).items()
    if is_typeddict(member)
}


class Formulas(Extension):
    """Keep underscores, a star behind one and a star before ‖; *this* stays emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # the library's name
        """Come after links, priority 160, and before emphasis, 60."""
        literal = SimpleTextInlineProcessor(r"(_\*?|\*(?=‖))")
        md.inlinePatterns.register(literal, "formulas", 65)


def on_config(config: Any, **_: Any) -> Any:
    """Add `Formulas` to every page, docstrings included."""
    config.markdown_extensions.append(Formulas())
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark by its table; mkdocs calls this for every page."""
    return re.sub(r"<!-- options of (\w+) -->", lambda mark: table(mark[1]), markdown)


def table(name: str) -> str:
    """Return the fields that a class of options adds, as a table in Markdown."""
    hints, defaults = get_type_hints(CLASSES[name]), options.defaults_in(CLASSES[name])
    rows = [
        f"| `{field}` | `{defaults[field]!r}` | {_kind(hints[field])} | {_cell(words)} |"
        for field, words in fields(name).items()
    ]
    return "\n".join(["| option | default | type | meaning |", "|---|---|---|---|", *rows])


def fields(name: str) -> dict[str, str]:
    """Return {field: docstring} of the fields that a class adds to `Options`, in its order."""
    (body,) = ast.parse(inspect.getsource(CLASSES[name])).body
    assert isinstance(body, ast.ClassDef)
    bases = [base.id for base in body.bases if isinstance(base, ast.Name)]
    shared = [fields(base) for base in bases if base in CLASSES and base != "Options"]
    return {k: v for each in shared for k, v in each.items()} | {
        field.target.id: words.value.value
        for field, words in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant)
        if isinstance(words.value.value, str)
    }


def _kind(hint: Any) -> str:
    """Return a type as Markdown."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice!r}`".replace("'", '"') for choice in get_args(hint))
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(map(_kind, get_args(hint)))
    if hint is type(None):
        return "`None`"
    return f"`{str(hint).replace('collections.abc.', '') if get_args(hint) else hint.__name__}`"


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
