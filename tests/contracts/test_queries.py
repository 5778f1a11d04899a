"""The Queries contract: SQL computes over its inputs, and reads nothing else."""

from __future__ import annotations

import resource
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.errors import InvalidInput, TooLarge, Unavailable
from falaj.ports.machine.memory import MemoryBudget
from falaj.ports.queries import QueryEngine

SOURCE = pa.table({"k": ["a", "b", "a"], "n": [1, 2, 3]})


@pytest.fixture
def queries(tmp_path: Path) -> QueryEngine:
    return DuckDbQueryEngine(spill=tmp_path / "spill", threads=2)


def test_sql_sees_its_inputs(queries: QueryEngine) -> None:
    inputs = {"source": SOURCE, "other": ds.dataset(pa.table({"k": ["a"], "x": [0.5]}))}

    found = queries.select("SELECT sum(n) AS n, any_value(x) AS x FROM source JOIN other USING (k)", inputs)

    assert found.to_pydict() == {"n": [4], "x": [0.5]}


def test_timestamps_are_microseconds_in_utc(queries: QueryEngine) -> None:
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
def test_sql_reads_nothing_but_its_inputs(queries: QueryEngine, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    statement = sql.format(file=secret, folder=tmp_path)

    with pytest.raises(InvalidInput) as refused:
        queries.select(statement, {"source": SOURCE})

    assert "1,2" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != "spill"] == ["secret.csv"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT " + "(" * 20_000 + "1" + ")" * 20_000,
        "SELECT " + "not " * 20_000 + "true",
        "SELECT 1" + "+1" * 20_000,
        "SELECT " + "abs(" * 300 + "1" + ")" * 300,
        "SELECT * FROM " + "(SELECT * FROM " * 5_000 + "(SELECT 1)" + ")" * 5_000,
        "SELECT " + "case when true then " * 4_000 + "1" + " end" * 4_000,
    ],
)
def test_deep_sql_is_refused(queries: QueryEngine, sql: str) -> None:
    with pytest.raises(InvalidInput, match="depth"):
        queries.select(sql, {"source": SOURCE})


def test_queries_do_not_see_each_other(queries: QueryEngine) -> None:
    queries.select("SELECT 1 FROM source", {"source": SOURCE})

    with pytest.raises(InvalidInput):
        queries.select("SELECT 1 FROM source", {})


def test_a_query_that_takes_too_long_is_stopped() -> None:
    queries = DuckDbQueryEngine(limit_s=0.2, threads=1)

    with pytest.raises(InvalidInput, match="exceeded its time limit"):
        queries.select("SELECT count(*) FROM range(100000000000) a, range(1000) b", {})


def test_the_time_that_parsing_takes_counts() -> None:
    queries = DuckDbQueryEngine(limit_s=0.02, threads=1)

    with pytest.raises(InvalidInput, match="exceeded its time limit"):
        queries.select(f"SELECT 1 WHERE 1 IN ({','.join('1' * 40_000)})", {})


def test_a_query_that_needs_too_much_memory_is_refused() -> None:
    queries = DuckDbQueryEngine(budget=MemoryBudget(128 << 20), threads=1)

    with pytest.raises(TooLarge):
        queries.select("SELECT list(range) FROM range(50000000)", {})


def test_a_result_counts_towards_the_memory() -> None:
    """A tenth of the attack: DuckDB alone would return 0.6 GB of rows with a limit of 64 MiB."""
    queries = DuckDbQueryEngine(budget=MemoryBudget(256 << 20), threads=2)
    before = peak_bytes()

    with pytest.raises(TooLarge, match="memory for rows"):
        queries.select("SELECT range AS a, range AS b, range AS c FROM range(25000000)", {})

    assert peak_bytes() - before < 512 << 20


def test_statements_share_one_budget() -> None:
    budget = MemoryBudget(256 << 20, wait_s=0.1)
    queries = DuckDbQueryEngine(budget=budget, threads=1)

    with budget.lease() as other:
        other.grow(200 << 20)
        with pytest.raises(Unavailable, match="other calls"):
            queries.select("SELECT 1 AS n", {})

    assert queries.select("SELECT 1 AS n", {}).to_pydict() == {"n": [1]}
    assert budget.free_bytes == budget.total_bytes


def test_a_result_stays_in_the_lease_of_its_call(queries: QueryEngine) -> None:
    budget = MemoryBudget(4 << 30)

    with budget.lease() as lease:
        found = queries.select("SELECT range AS n FROM range(1000)", {}, memory=lease)
        held = budget.total_bytes - budget.free_bytes

    assert found.num_rows == 1000
    assert 8_000 <= held < 100_000
    assert budget.free_bytes == budget.total_bytes


def test_spilled_data_is_limited(tmp_path: Path) -> None:
    queries = DuckDbQueryEngine(spill=tmp_path, budget=MemoryBudget(128 << 20), threads=1)

    (found,) = queries.select(
        "SELECT value FROM duckdb_settings() WHERE name = 'max_temp_directory_size'", {}
    ).to_pylist()

    assert "GiB" in found["value"] or "MiB" in found["value"] or "TiB" in found["value"]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("as_dataset", [False, True])
def test_an_input_whose_columns_differ_by_case_only_is_refused(
    queries: QueryEngine, as_dataset: bool
) -> None:
    source = pa.table({"n": [1], "N": [2]})

    with pytest.raises(InvalidInput, match="n, N"):
        queries.select("SELECT N FROM source", {"source": ds.dataset(source) if as_dataset else source})
