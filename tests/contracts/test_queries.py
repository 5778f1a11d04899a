"""What every Queries keeps to: it computes over its inputs, and reaches nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.errors import InvalidInput, TooLarge
from falaj.ports.queries import QueryEngine

SOURCE = pa.table({"k": ["a", "b", "a"], "n": [1, 2, 3]})


@pytest.fixture
def queries(tmp_path: Path) -> QueryEngine:
    return DuckDbQueryEngine(spill=tmp_path / "spill", threads=2)


def test_sql_sees_its_inputs(queries: QueryEngine) -> None:
    inputs = {"source": SOURCE, "other": ds.dataset(pa.table({"k": ["a"], "x": [0.5]}))}

    found = queries.select("SELECT sum(n) AS n, any_value(x) AS x FROM source JOIN other USING (k)", inputs)

    assert found.to_pydict() == {"n": [4], "x": [0.5]}


def test_moments_are_microseconds_in_utc(queries: QueryEngine) -> None:
    noon = datetime(2024, 6, 1, 12, 0, 0, 123456, tzinfo=UTC)
    source = pa.table({"t": pa.array([noon], pa.timestamp("us", "UTC"))})

    found = queries.select("SELECT t, epoch_us(t) AS n, hour(t) AS h FROM source", {"source": source})

    assert found.schema.field("t").type == pa.timestamp("us", "UTC")
    assert found.to_pydict() == {"t": [noon], "n": [1717243200123456], "h": [12]}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_parquet('{file}')",
        "SELECT * FROM read_blob('{folder}/*')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM sniff_csv('{file}')",
        "SELECT * FROM query('SELECT * FROM read_text(''{file}'')')",
        "SELECT (SELECT content FROM read_text('{file}'))",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x')",
        "COPY source TO '{folder}/out.csv'",
        "ATTACH '{folder}/other.db'",
        "EXPORT DATABASE '{folder}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '64GB'",
        "PRAGMA database_list",
        "CREATE TABLE t AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT 1; COPY source TO '{folder}/out.csv'",
        "SELECT * FROM secret",
        "SELECT getenv('HOME')",
        "SELECT * FROM inputs",
        "SELECT no_such_column FROM source",
        "SELEC 1",
        "",
    ],
)
def test_sql_reaches_nothing_else(queries: QueryEngine, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    statement = sql.format(file=secret, folder=tmp_path)

    with pytest.raises(InvalidInput) as refused:
        queries.select(statement, {"source": SOURCE})

    assert "1,2" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != "spill"] == ["secret.csv"]


def test_queries_do_not_see_each_other(queries: QueryEngine) -> None:
    queries.select("SELECT 1 FROM source", {"source": SOURCE})

    with pytest.raises(InvalidInput):
        queries.select("SELECT 1 FROM source", {})


def test_a_query_that_takes_too_long_is_stopped() -> None:
    queries = DuckDbQueryEngine(limit_s=0.2, threads=1)

    with pytest.raises(InvalidInput, match="exceeded its time limit"):
        queries.select("SELECT count(*) FROM range(100000000000) a, range(1000) b", {})


def test_a_query_that_needs_too_much_memory_is_refused() -> None:
    queries = DuckDbQueryEngine(memory_mib=32, threads=1)

    with pytest.raises(TooLarge):
        queries.select("SELECT list(range) FROM range(50000000)", {})
