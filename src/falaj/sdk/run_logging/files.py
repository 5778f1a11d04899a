"""Figures, images and tables of runs as files that people can look at."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falaj.errors import InvalidInput

FIGURES = ("png", "svg", "pdf", "jpg", "html", "json")
IMAGES = ("png", "jpg", "jpeg", "gif", "webp")
TABLES = ("json", "csv", "parquet")
CHANNELS = {1: 0, 2: 4, 3: 2, 4: 6}
"""The colour type of PNG by the number of channels: grey, grey and alpha, RGB, RGBA."""


def figure_bytes(path: str, figure: Any) -> bytes:
    """Return a figure of matplotlib, plotly or the like in the format that `path` ends with."""
    suffix = _suffix(path, FIGURES)
    if hasattr(figure, "savefig"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix)
        return buffer.getvalue()
    if hasattr(figure, "to_html") and suffix == "html":
        return str(figure.to_html(include_plotlyjs=True)).encode()
    if hasattr(figure, "to_json") and suffix == "json":
        return str(figure.to_json()).encode()
    if hasattr(figure, "to_image"):
        return bytes(figure.to_image(format=suffix))
    raise InvalidInput.at(
        "figure",
        given=type(figure).__name__,
        allowed="a figure of matplotlib, or of plotly with a path like a.html",
    )


def image_bytes(path: str, image: Any) -> bytes:
    """Return an image as a file: bytes or a file as they are, a PIL image, or an array of height × width × channels."""
    suffix = _suffix(path, IMAGES)
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return image.read_bytes()
    if hasattr(image, "save") and hasattr(image, "mode"):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG" if suffix in ("jpg", "jpeg") else suffix.upper())
        return buffer.getvalue()
    if suffix != "png":
        raise InvalidInput.at("path", given=path, allowed="a path that ends with .png for an array")
    return _png(image)


def _png(image: Any) -> bytes:
    """Return an array as a PNG; floating-point values are from 0 to 1, NaN is black."""
    import numpy as np

    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in CHANNELS or 0 in pixels.shape:
        raise InvalidInput.at(
            "image", given=f"an array of {np.shape(image)}", allowed="height × width, or × 1 to 4 channels"
        )
    if pixels.dtype.kind == "f":
        pixels = np.nan_to_num(pixels, posinf=1.0, neginf=0.0).clip(0, 1) * 255
    height, width, channels = pixels.shape
    rows = np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8)).reshape(height, width * channels)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, CHANNELS[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---------------------------------------------------------------------------------------------- tables


def table_bytes(path: str, table: Any) -> bytes:
    """Return a table in the format that `path` ends with: JSON as MLflow's log_table has it, CSV or Parquet.

    A table is a DataFrame, a table of pyarrow, columns by name, or rows by column.
    """
    suffix = _suffix(path, TABLES)
    names, rows = _rows(table)
    if suffix == "json":
        data = {"columns": names, "data": [[_plain(cell) for cell in row] for row in rows]}
        return json.dumps(data, ensure_ascii=False, default=str, allow_nan=False).encode()
    if suffix == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
        return text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def _rows(table: Any) -> tuple[list[str], list[list[Any]]]:
    if hasattr(table, "to_pydict"):
        table = table.to_pydict()
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):
        table = table.to_dict(orient="list")
    if isinstance(table, Mapping):
        columns = {str(name): list(values) for name, values in table.items()}
        if len({len(values) for values in columns.values()}) > 1:
            raise InvalidInput.at(
                "table", given="columns of different lengths", allowed="equally long columns"
            )
        return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]
    if isinstance(table, Sequence) and all(isinstance(row, Mapping) for row in table):
        names = list(dict.fromkeys(str(name) for row in table for name in row))
        return names, [[row.get(name) for name in names] for row in table]
    raise InvalidInput.at(
        "table",
        given=type(table).__name__,
        allowed="a DataFrame, a pyarrow table, columns by name, or a list of rows by column",
    )


def _plain(cell: Any) -> Any:
    """Return a value as JSON has it; it has no NaN and no infinities."""
    cell = cell.item() if hasattr(cell, "item") and getattr(cell, "ndim", 0) == 0 else cell
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if isinstance(cell, list | tuple):
        return [_plain(each) for each in cell]
    if isinstance(cell, Mapping):
        return {str(name): _plain(each) for name, each in cell.items()}
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _suffix(path: str, allowed: Sequence[str]) -> str:
    suffix = path.rpartition(".")[2].lower()
    if suffix not in allowed or "." not in path:
        raise InvalidInput.at("path", given=path, allowed=f"a path that ends with .{', .'.join(allowed)}")
    return suffix
