"""Rows of a quarantined batch: shown page by page, and made ready to be checked again. This code runs in the parser
process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from falaj.errors import shorten
from falaj.features.row_files import read_rows
from falaj.features.validation.checks import BROKEN, ROW
from falaj.features.validation.conversion import shown_value
from falaj.ports.parsers import ByteSource, Parsed
from falaj.ports.queries import ArrowTable
from falaj.records.features import Feature, RowRule

SHOWN_CHARACTERS = 120
PAGE_CHARACTERS = 1 << 18
"""A page is cut when its values are longer: the answer stays below 1 MiB."""


def parse_page(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser that shows up to `limit` rows after the one that has the number `after` in its file."""
    batch = read_rows(sources, options)
    names = [name for name in batch.column_names if name not in (ROW, BROKEN)]
    items: list[dict[str, Any]] = []
    start, taken = pc.sum(pc.less_equal(batch[ROW], options["after"])).as_py() or 0, 0
    for row in range(start, min(batch.num_rows, start + options["limit"])):
        values = [_text(batch[name][row]) for name in names]
        items.append(
            {
                "row": batch[ROW][row].as_py(),
                "broken": [_broken_value(each, names, values) for each in batch[BROKEN][row].as_py()],
                "values": values,
            }
        )
        taken += sum(len(value or "") for value in values)
        if taken > PAGE_CHARACTERS:
            break
    more = start + len(items) < batch.num_rows
    return Parsed(facts={"columns": names, "items": items, "more": more})


def in_columns(batch: ArrowTable, columns: Sequence[Feature]) -> ArrowTable:
    """Return the rows in `columns`; those that were added to the view since are null."""
    found = {
        each.name: batch[each.name] if each.name in batch.column_names else pa.nulls(batch.num_rows)
        for each in columns
    }
    return pa.table(found)


def repeated(batch: ArrowTable) -> Any:
    """Return the positions of the rows that repeat a row of their file, which need not be in the batch."""
    lists = batch[BROKEN].combine_chunks()
    rules = lists.flatten().field("rule")
    return pc.unique(pc.list_parent_indices(lists).filter(pc.equal(rules, RowRule.UNIQUE.value)))


def _broken_value(found: Mapping[str, str], names: Sequence[str], values: Sequence[str | None]) -> Any:
    """Return a broken rule with the value that breaks it; `unique` is a rule of several columns."""
    known = dict(zip(names, values, strict=True))
    shown = [known.get(name) for name in found["column"].split(", ")]
    value = shown[0] if len(shown) == 1 else ", ".join(str(each) for each in shown)
    return {"rule": found["rule"], "column": found["column"], "value": value}


def _text(value: Any) -> str | None:
    return None if not value.is_valid else shorten(shown_value(value), limit=SHOWN_CHARACTERS)
