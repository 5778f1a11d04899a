"""Rows as JSON, CSV and Arrow: parsed within limits, and written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from falaj.apps.model_server.inference.json_values import encode_values
from falaj.apps.model_server.inference.plain_rows.rows import Rows, Values, require_rows
from falaj.errors import InvalidInput, TooLarge, shorten

Array = npt.NDArray[Any]


class RowFormat(StrEnum):
    """The media types of rows."""

    JSON = "application/json"
    CSV = "text/csv"
    ARROW = "application/vnd.apache.arrow.stream"


MAX_ROWS, MAX_CELLS = 100_000, 500_000
"""Rows and values of a request in JSON or CSV; an object of Python is made of each. Arrow is limited by its bytes."""
MAX_CSV_COLUMNS = 10_000
JSON_TYPES = frozenset(("", "application/json", "text/json", "application/x-www-form-urlencoded"))
"""What is read as JSON: also what curl says of it, unless told otherwise."""

ReadArrow = Callable[[bytes, str], Any]
"""Reads an Arrow stream of a caller, given its name, outside of this process."""


def format_of(content_type: bytes | None) -> tuple[RowFormat, bool]:
    """Return the format of a body, and whether its first line is a header. Raise InvalidInput."""
    kind, _, rest = (content_type or b"").decode("latin-1").partition(";")
    name = kind.strip().lower()
    if name in JSON_TYPES:
        return RowFormat.JSON, True
    if name in (RowFormat.CSV, RowFormat.ARROW):
        return RowFormat(name), "header=absent" not in rest.replace(" ", "").lower()
    raise InvalidInput(
        f"Content-Type: given {shorten(name)}, allowed {', '.join(RowFormat)}", details={"http_status": 415}
    )


def accepted_format(accept: bytes | None, given: RowFormat) -> RowFormat:
    """Return the format of the answer: that of the request, unless the caller asks for another one."""
    wanted = [
        part.partition(";")[0].strip().lower() for part in (accept or b"*/*").decode("latin-1").split(",")
    ]
    if given in wanted or "*/*" in wanted:
        return given
    for name in wanted:
        for known in RowFormat:
            if name == known or (name.endswith("/*") and known.startswith(name[:-1])):
                return known
    given_words = shorten(", ".join(wanted))
    raise InvalidInput(
        f"Accept: given {given_words}, allowed {', '.join(RowFormat)}", details={"http_status": 406}
    )


# ------------------------------------------------------------------------------------------- reading


def read_json(body: bytes, *, key: str) -> tuple[Rows, str]:
    """Return the rows of a JSON body, and the id of the request: a list, or an object that has it under `key`."""
    if body.count(b"{") + body.count(b"[") > 2 * MAX_ROWS or body.count(b",") > MAX_CELLS:
        raise TooLarge(
            f"at most {MAX_ROWS} rows and {MAX_CELLS} values are taken as JSON; send Arrow, or parts"
        )
    try:
        found = _decode(body)
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not JSON: {shorten(str(error))}") from None
    ident = ""
    if isinstance(found, dict) and key in found:
        ident, found = found.get("id", ""), found[key]
        if not isinstance(ident, str) or len(ident) > 256:
            raise InvalidInput(f"id: given {shorten(ident)}, allowed a text of at most 256 characters")
    elif isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        raise InvalidInput(f"the body is not a list of rows, nor an object with '{key}'")
    require_rows(len(found), MAX_ROWS)
    return _rows(found), ident


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        if b"NaN" in body or b"Infinity" in body:
            return json.loads(body)
        raise


def _rows(found: list[Any]) -> Rows:
    if not found or not any(isinstance(row, dict) for row in found):
        return Rows(len(found), unnamed=found)
    if not all(isinstance(row, dict) for row in found):
        raise InvalidInput("rows: given objects and other values, allowed one or the other")
    names = list(found[0])
    for number, row in enumerate(found):
        if row.keys() != found[0].keys():
            odd = sorted(row.keys() ^ found[0].keys())[:5]
            raise InvalidInput(
                f"row {number}: its columns differ from those of the first row: {shorten(', '.join(odd))}; "
                "write null where a value is missing"
            )
    return Rows(len(found), {name: [row[name] for row in found] for name in names})


def read_csv(body: bytes, *, has_header: bool) -> Rows:
    """Return the rows of a CSV file in UTF-8."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the body is not UTF-8: {error}") from None
    lines: list[list[str]] = []
    cells = 0
    try:
        for line in csv.reader(io.StringIO(text, newline=""), strict=True):
            if line:
                lines.append(line)
                cells += len(line)
            require_rows(len(lines) - has_header, MAX_ROWS)
            if cells > MAX_CELLS:
                raise TooLarge(f"at most {MAX_CELLS} values are taken as CSV; send Arrow, or parts")
    except csv.Error as error:
        raise InvalidInput(f"the body is not CSV: {error}") from None
    if not lines:
        raise InvalidInput("the body has no line; the first line of a CSV file names its columns")
    width = len(lines[0])
    for number, line in enumerate(lines):
        if len(line) != width:
            raise InvalidInput(
                f"line {number + 1}: given {len(line)} values, allowed {width}, as in the first line"
            )
    if not has_header:
        return Rows(len(lines), unnamed=lines, is_text=True)
    names = [name.strip() for name in lines.pop(0)]
    if len(set(names)) != width:
        raise InvalidInput("the first line names a column twice; it names each column once")
    columns = {name: [line[place] for line in lines] for place, name in enumerate(names)}
    return Rows(len(lines), columns, is_text=True)


def read_arrow(table: Any) -> Rows:
    """Return the rows of an Arrow table that was validated."""
    if len(set(table.column_names)) != table.num_columns:
        raise InvalidInput("the table names a column twice")
    left = MAX_CELLS
    columns: dict[str, Values] = {}
    for name in table.column_names:
        column = table.column(name)
        if _is_number(column.type):
            columns[name] = column.to_numpy()
            continue
        left -= _count_objects(column)
        if left < 0:
            raise TooLarge(
                f"at most {MAX_CELLS} texts and values of lists are taken; send the rest in another request"
            )
        columns[name] = column.to_pylist()
    return Rows(table.num_rows, columns)


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _count_objects(column: Any) -> int:
    """Return how many objects of Python a column becomes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, count = column.type, len(column)
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = pc.list_flatten(column)
        kind = column.type
        count += len(column)
    return count


# ------------------------------------------------------------------------------------------- writing


def require_row_outputs(outputs: Mapping[str, Array], count: int) -> None:
    """Raise InvalidInput if an output has not one value or list for each row."""
    for name, array in outputs.items():
        if not array.ndim or len(array) != count:
            raise InvalidInput(
                f"output {name} has the shape {list(array.shape)}, and not {count} rows; ask by the V2 protocol"
            )


def write_json(outputs: Mapping[str, Array], *, facts: Mapping[str, str], notes: bytes) -> bytes:
    """Return predictions as records, after `facts` and the parameters `notes`."""
    columns = {name: _json_cells(array) for name, array in outputs.items()}
    names = [orjson.dumps(name) for name in columns]
    records = [
        b"{%b}" % b",".join(b"%b:%b" % pair for pair in zip(names, cells, strict=True))
        for cells in zip(*columns.values(), strict=True)
    ]
    head = orjson.dumps(facts)[:-1] + (b',"parameters":{%b}' % notes if notes else b"")
    return b'%b,"predictions":[%b]}' % (head, b",".join(records))


def write_v1(outputs: Mapping[str, Array]) -> bytes:
    """Return predictions as the V1 protocol has them: values if there is one output, else records."""
    if len(outputs) == 1:
        (array,) = outputs.values()
        return b'{"predictions":[%b]}' % b",".join(_json_cells(array, squeezes=False))
    columns = [_json_cells(array, squeezes=False) for array in outputs.values()]
    names = [orjson.dumps(name) for name in outputs]
    records = (
        b"{%b}" % b",".join(b"%b:%b" % pair for pair in zip(names, cells, strict=True))
        for cells in zip(*columns, strict=True)
    )
    return b'{"predictions":[%b]}' % b",".join(records)


def _json_cells(array: Array, *, squeezes: bool = True) -> list[bytes]:
    """Return the JSON of each row; a row of one value is that value, if `squeezes`."""
    rows = array.reshape(len(array)) if squeezes and array.size == len(array) else array
    if rows.ndim == 1:
        if rows.dtype == object:
            return [orjson.dumps(_text(value)) for value in rows.tolist()]
        return encode_values(rows)[1:-1].split(b",") if len(rows) else []
    return [_nested(row) for row in rows]


def _nested(array: Array) -> bytes:
    if array.ndim == 1:
        return (
            encode_values(array)
            if array.dtype != object
            else orjson.dumps([_text(v) for v in array.tolist()])
        )
    return b"[%b]" % b",".join(_nested(part) for part in array)


def write_csv(outputs: Mapping[str, Array]) -> bytes:
    """Return predictions as CSV; a row of several values becomes columns NAME_0, NAME_1 and so on."""
    names: list[str] = []
    columns: list[list[str]] = []
    for name, array in outputs.items():
        flat = array.reshape(len(array), prod(array.shape[1:]))
        if len(names) + flat.shape[1] > MAX_CSV_COLUMNS:
            raise InvalidInput(f"the outputs have more than {MAX_CSV_COLUMNS} columns; ask for JSON or Arrow")
        names += [name] if flat.shape[1] == 1 else [f"{name}_{place}" for place in range(flat.shape[1])]
        columns += [[_csv_cell(value) for value in flat[:, place]] for place in range(flat.shape[1])]
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*columns, strict=True))
    return sink.getvalue().encode()


def _csv_cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return str(_text(value))


def write_arrow(outputs: Mapping[str, Array]) -> bytes:
    """Return predictions as an Arrow stream; a row of several values becomes a list of fixed size."""
    import pyarrow as pa

    columns = {}
    for name, array in outputs.items():
        width, flat = prod(array.shape[1:]), array.ravel()
        is_text = flat.dtype == object
        plain = pa.array([_text(v) for v in flat.tolist()], pa.string()) if is_text else pa.array(flat)
        columns[name] = plain if width == 1 else pa.FixedSizeListArray.from_arrays(plain, width)
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
