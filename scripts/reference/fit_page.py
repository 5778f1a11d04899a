"""docs/reference/fit.md: the options of `fj.fit`, in the groups of `FitOptions`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from falaj.training.runtime.options import GROUPS, OptionRow, fit_options
from reference.markdown import code, docstring, table
from reference.type_text import type_text

HEAD = """# Options of `fj.fit`

`fj.fit(model, loss, data, **options)` trains `model` in place. All options are keywords. Give `steps` or `epochs`;
every other option has a default. Wrong options are refused together, before anything is computed, each with a fix
([`training.invalid`](errors.md#traininginvalid)). [The runtime](runtime/index.md) explains data, plans, parallel
training, checkpoints and profiles; [`fj.fit`](python.md#fjfit) has an example.

With several processes, options marked *agreed* must be equal in all of them.
"""


def fit_page() -> str:
    """Return the page."""
    rows = {row.name: row for row in fit_options()}
    return "\n".join([HEAD, *(_section(group, rows) for group in GROUPS.values())])


def _section(group: type[Any], rows: dict[str, OptionRow]) -> str:
    title, _, rest = docstring(group).partition(". ")
    kinds = get_type_hints(group)
    cells = [
        (code(each.name), code(type_text(kinds[each.name])), code(_default(rows[each.name])), _meaning(each))
        for each in fields(group)
    ]
    text = f"{rest}\n\n" if rest else ""
    return f"## {title.rstrip('.')}\n\n{text}{table(('option', 'type', 'default', 'what it does'), cells)}\n"


def _meaning(option: Any) -> str:
    """Return what an option does, with an example where it has one."""
    example, agreed = option.metadata["example"], option.metadata["agreed"]
    shown = f" Example: `{example}`." if example else ""
    return f"{option.metadata['doc']}{shown}{' *Agreed.*' if agreed else ''}"


def _default(row: OptionRow) -> str:
    return row.default.replace("'", '"')
