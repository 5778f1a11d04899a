"""One run: its facts, its charts, and what is shown of its artifacts."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest

from falaj.apps.console.charts.palette import LIGHT
from falaj.apps.console.pages.runs.artifacts import (
    PICTURE_BYTES,
    TABLE_ROWS,
    artifact_view,
    bytes_needed,
    kind_of,
    quoted,
    stored_table_view,
)
from falaj.apps.console.pages.runs.curves import (
    CurveChart,
    CurveQuery,
    chart_options,
    curve_charts,
    first_metrics,
    metric_group,
)
from falaj.apps.console.pages.runs.run import RunRecords, run_view
from falaj.apps.console.times import Times
from falaj.records.governance.lineage import LineageNode
from falaj.records.tracking import (
    Artifact,
    ArtifactTable,
    HistoryPoint,
    Metric,
    MetricCurve,
    Param,
    Run,
    RunDetails,
    RunStatus,
    Tag,
)

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
TIMES = Times(UTC)
HOSTILE = "<script>alert(1)</script>"


def details(*, status: RunStatus = RunStatus.RUNNING, deleted: bool = False) -> RunDetails:
    run = Run(
        id="run_1",
        workspace="workspace_1",
        experiment="experiment_1",
        name=HOSTILE,
        status=status,
        owner="user_1",
        started_at=NOON,
        ended_at=NOON + timedelta(seconds=90) if status.ended else None,
        parent="run_0",
        deleted_at=NOON if deleted else None,
    )
    return RunDetails(
        run=run,
        params=(Param(key="lr", value="0.1"), Param(key="job.command", value="train.py --lr 0.1")),
        tags=(
            Tag(key="falaj.job", value="job_1"),
            Tag(key="git.commit", value="abc"),
            Tag(key="long", value="x" * 900),
        ),
        metrics=(
            Metric(key="loss", points=5, last=0.5, last_step=1000, last_timestamp=NOON, low=0.4, high=2.0),
        ),
        artifacts=tuple(
            Artifact(path=path, blob="blob_1", size_bytes=3, attached_at=NOON)
            for path in ("a.png", "environment.txt")
        ),
    )


def curve(key: str, values: list[float], *, run: str = "run_1", total: int | None = None) -> MetricCurve:
    points = tuple(
        HistoryPoint(step=step, timestamp=NOON + timedelta(seconds=step), value=value)
        for step, value in enumerate(values)
    )
    return MetricCurve(run=run, key=key, total=total or len(points), points=points)


def test_a_run_shows_its_job_its_code_and_what_came_of_it() -> None:
    made = LineageNode(id="version_1", kind="model_version", name="churn@3", depth=2)

    view = run_view(RunRecords(details(), made=(made,), people={"user_1": "dana"}), times=TIMES)

    assert (view.name, view.is_running, view.is_deleted) == (HOSTILE, True, False)
    assert [(each.words, each.target) for each in view.links] == [
        ("Job", ("jobs", "job_1")),
        ("Parent run", ("runs", "run_0")),
        ("Model churn@3", ("models", "churn", "versions", "3")),
    ]
    assert [(each.name, each.value) for each in view.code] == [
        ("commit", "abc"),
        ("command", "train.py --lr 0.1"),
    ]
    assert view.environment == ("environment.txt",)
    assert ("owner", "dana") in [(each.name, each.value) for each in view.facts]
    assert (view.metrics[0].last, view.metrics[0].low, view.metrics[0].step) == ("0.5", "0.4", "1,000")
    assert len(view.tags[2].value) == 501


@pytest.mark.parametrize(
    ("status", "deleted", "is_running"),
    [
        (RunStatus.SCHEDULED, False, True),
        (RunStatus.FINISHED, False, False),
        (RunStatus.RUNNING, True, False),
    ],
)
def test_a_run_is_followed_only_while_points_may_come(
    status: RunStatus, deleted: bool, is_running: bool
) -> None:
    view = run_view(RunRecords(details(status=status, deleted=deleted)), times=TIMES)

    assert (view.is_running, view.is_deleted) == (is_running, deleted)


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("train/loss", ("loss", "")),
        ("val_loss", ("loss", "")),
        ("loss", ("loss", "")),
        ("system/cpu_utilization_percentage", ("system [%]", "%")),
        ("system/system_memory_usage_megabytes", ("system [MB]", "MB")),
        ("val", ("val", "")),
    ],
)
def test_metrics_that_measure_the_same_share_a_chart(key: str, group: tuple[str, str]) -> None:
    assert metric_group(key) == group


def test_charts_have_units_names_and_all_points() -> None:
    found = curve_charts(
        [curve("train/loss", [2, 1]), curve("val/loss", [3, 2], total=9000), curve("accuracy", [0, 1])],
        {},
        CurveQuery(),
    )

    assert [(each.title, [c.name for c in each.curves], each.total) for each in found] == [
        ("loss", ["train/loss", "val/loss"], 9002),
        ("accuracy", ["accuracy"], 2),
    ]
    options = chart_options(found[0], CurveQuery(smoothing=0.9, scale="log"), LIGHT)
    assert (options["yAxis"]["type"], options["xAxis"]["name"], len(options["series"])) == ("log", "step", 4)


def test_compared_runs_are_named_by_run_and_by_metric_where_a_chart_has_several() -> None:
    names = {"run_1": "first", "run_2": "second"}
    curves = [curve(key, [1, 2], run=run) for key in ("train/loss", "val/loss", "auc") for run in names]

    found = curve_charts(curves, names, CurveQuery(x_axis="time"))

    assert [c.name for c in found[0].curves][:2] == ["first · train/loss", "second · train/loss"]
    assert [c.name for c in found[1].curves] == ["first", "second"]
    assert found[1].curves[0].xs[0] == NOON.timestamp() * 1000


def test_a_compared_run_has_the_same_colour_in_every_chart() -> None:
    names = {"run_1": "first", "run_2": "second"}
    curves = [curve("auc", [1], run="run_2"), *(curve("loss", [1], run=run) for run in names)]

    auc, loss = curve_charts(curves, names, CurveQuery())

    def colours(found: CurveChart) -> list[str]:
        return [each["itemStyle"]["color"] for each in chart_options(found, CurveQuery(), LIGHT)["series"]]

    assert colours(auc) == colours(loss)[1:]


def test_the_address_holds_what_was_chosen_and_nothing_wrong() -> None:
    query = CurveQuery(("loss", "a b"), 0.5, "log", "time", -5, 100)

    assert CurveQuery.of(query.fields()) == query
    assert CurveQuery.of({"smoothing": "7", "scale": "x", "from": "1e99", "to": "abc"}) == CurveQuery()


def test_system_metrics_are_shown_when_they_are_asked_for() -> None:
    known = ("system/a", "loss")

    assert first_metrics(known, CurveQuery()) == ("loss",)
    assert first_metrics(known, CurveQuery(metrics=("system/a", "gone"))) == ("system/a",)
    assert first_metrics(("system/a",), CurveQuery()) == ("system/a",)


# ------------------------------------------------------------------------------------------ artifacts


def test_a_drawing_is_an_image_and_never_markup() -> None:
    data = b"<svg><script>alert(1)</script></svg>"

    view = artifact_view("a.svg", data, len(data))

    assert view.picture == "data:image/svg+xml;base64," + base64.b64encode(data).decode()
    assert view.text == ""


def test_bytes_that_are_no_picture_are_not_shown_as_one() -> None:
    view = artifact_view("a.png", b"<script>", 8)

    assert (view.kind, view.picture) == ("other", "")
    assert "not a PNG" in view.note


def test_large_pictures_are_not_shown_and_texts_are_cut() -> None:
    assert artifact_view("a.png", b"\x89PNG\r\n\x1a\n", PICTURE_BYTES + 1).picture == ""
    view = artifact_view("a.txt", b"x" * 100, 5000)
    assert (view.text, view.note) == ("x" * 100, "The first 100 B of 4.9 KiB.")


def test_a_page_of_html_is_shown_as_text() -> None:
    view = artifact_view("report.html", HOSTILE.encode(), len(HOSTILE))

    assert (view.kind, view.text) == ("text", HOSTILE)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a.csv", b'n,words\n1,"x, y"\n'),
        ("a.tsv", b"n\twords\n1\tx, y\n"),
        ("a.json", b'[{"n": "1", "words": "x, y"}]'),
        ("a.json", b'{"n": ["1"], "words": ["x, y"]}'),
        ("a.json", b'{"columns": ["n", "words"], "data": [["1", "x, y"]]}'),
        ("a.jsonl", b'{"n": "1", "words": "x, y"}\n'),
    ],
)
def test_tables_of_all_forms_have_rows(path: str, data: bytes) -> None:
    view = artifact_view(path, data, len(data))

    assert (view.columns, view.rows, view.note) == (("n", "words"), (("1", "x, y"),), "1 rows")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1, 2]", b"[" * 100_000, b"\xff\xfe", b'{"columns": 3, "data": []}']
)
def test_what_is_no_table_is_shown_as_text(data: bytes) -> None:
    assert artifact_view("a.json", data, len(data)).kind == "text"


def test_a_table_that_was_cut_shows_whole_rows_only() -> None:
    data = b"n,m\n" + b"1,2\n" * 500

    view = artifact_view("a.csv", data[:-2], 1_000_000)

    assert len(view.rows) == TABLE_ROWS
    assert {*view.rows} == {("1", "2")}
    assert view.note == "The first 50 rows"


def test_the_platform_parses_tables_that_python_does_not() -> None:
    found = ArtifactTable(path="a.parquet", columns=("n",), rows=(("1",), (None,)), total_rows=700)

    view = stored_table_view("a.parquet", found)

    assert (view.rows, view.note) == ((("1",), ("",)), "The first 2 rows of 700")
    assert (kind_of("A.PARQUET"), bytes_needed("a.parquet")) == ("stored table", 0)


def test_a_path_is_one_word_of_a_command() -> None:
    assert quoted("plots/a.png") == "plots/a.png"
    assert quoted("it's; rm -rf /") == "'it'\\''s; rm -rf /'"


def test_deep_values_are_one_cell() -> None:
    data = json.dumps([{"a": {"b": [1, 2]}}]).encode()

    assert artifact_view("a.json", data, len(data)).rows == (('{"b": [1, 2]}',),)
