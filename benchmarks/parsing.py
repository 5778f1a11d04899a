"""What parsing apart costs: uploaded rows through the parser process, beside the same work in this process."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from falaj.assembly.parsing import PARSERS, find_sandboxes
from falaj.assembly.row_parsers import parse_view_rows
from falaj.drivers.parsing.pool import ParserLimits, ProcessParserPool
from falaj.governance import arrow_ipc
from falaj.ports.parsers import ByteSource
from harness import Result, Rule, report

QUICK = True
SMALL_ROWS, LARGE_ROWS = 1_000, 3_500_000  # the larger file has 100 MB
OPTIONS = {
    "name": "rows",
    "texts": ["car"],
    "limit_bytes": 1 << 30,
    "sql": None,
    "strict": False,
    "columns": [
        {"name": "driver", "type": "integer"},
        {"name": "event_time", "type": "moment"},
        {"name": "km", "type": "float"},
        {"name": "car", "type": "text"},
    ],
    "required": ["driver", "event_time"],
    "where": "view",
}


def main() -> None:
    pool = ProcessParserPool(PARSERS, sandboxes=find_sandboxes, limits=ParserLimits(memory_bytes=4 << 30))
    try:
        results = []
        for rows, goal_ms in ((SMALL_ROWS, 20), (LARGE_ROWS, 2000)):
            for name, data in files(rows).items():
                apart = median_ms(lambda data=data: through(pool, data))
                here = median_ms(lambda data=data: parse_view_rows([source(data)], OPTIONS))
                what = f"{rows:,} rows of {name} ({len(data) / 1e6:.2f} MB), ms, beside the same process"
                results.append(Result(what, apart, here, goal_ms, Rule.FALAJ_AT_MOST))
    finally:
        pool.close()
    report("parsing", results)


def files(rows: int) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "driver": rng.integers(0, 1_000_000, rows),
            "event_time": pa.array(rng.integers(16 * 10**14, 17 * 10**14, rows)).cast(
                pa.timestamp("us", "UTC")
            ),
            "km": rng.random(rows),
            "car": pa.array(rng.integers(0, 1000, rows)).cast(pa.string()),
        }
    )
    parquet = io.BytesIO()
    pq.write_table(table, parquet, compression="none", use_dictionary=False)
    return {"Arrow": arrow_ipc.write_table(table).to_pybytes(), "Parquet": parquet.getvalue()}


def through(pool: ProcessParserPool, data: bytes) -> pa.Table:
    parsed = pool.parse("view_rows", [source(data)], OPTIONS, owner="bench", reserve=lambda size_bytes: None)
    return arrow_ipc.read_result(parsed.content, where="rows", limit_bytes=1 << 30)


def source(data: bytes) -> ByteSource:
    return ByteSource(len(data), lambda offset, length: data[offset : offset + length])


def median_ms(work: Callable[[], object]) -> float:
    """The median of several calls, after one that warms up."""
    work()
    found: list[float] = []
    until = time.monotonic() + 2
    while len(found) < 3 or (time.monotonic() < until and len(found) < 100):
        began = time.perf_counter()
        work()
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.median(found)


if __name__ == "__main__":
    main()
