"""The table of jobs, the last day on nodes and GPUs, and one job."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

from console_records import HOSTILE, NOON, RTL, job, machine, placed
from falaj.apps.console.pages.jobs.actions import possible_actions
from falaj.apps.console.pages.jobs.job import OneJobRecords, job_view, progress_view
from falaj.apps.console.pages.jobs.log_view import LINE_CHARACTERS, LINES, LogLines
from falaj.apps.console.pages.jobs.measurements import measurements_view, plan_rows, wanted_curves
from falaj.apps.console.pages.jobs.table import JobQuery, asks_for, jobs_view
from falaj.apps.console.pages.jobs.timeline import day_view
from falaj.apps.console.times import Times
from falaj.records.governance.identity import Principal
from falaj.records.scheduling.accounting import UsageRow
from falaj.records.scheduling.snapshot import Explanation, Reason
from falaj.records.tracking import HistoryPoint, Metric, MetricCurve, Param, Run, RunDetails, RunStatus
from falaj.records.training.jobs import Checkpoint, CheckpointPart, Job, JobProgress

TIMES = Times(UTC)
DANA = Principal(id="user_1", name="dana", kind="user", created_at=NOON)
ALL = ("jobs.cancel", "jobs.retry", "jobs.move")


def names(*jobs: Job, text: str = "") -> list[object]:
    view = jobs_view(jobs, [DANA], JobQuery(text=text), following=None, times=TIMES, base="/w/default/jobs")
    return [row.cells["name"] for row in view.rows]


def test_the_address_holds_the_state_and_the_filter() -> None:
    query = JobQuery("running", "churn & more", "cursor")

    assert JobQuery.of(query.fields()) == query
    assert JobQuery.of({"state": "<script>"}).state == ""


def test_jobs_are_found_by_name_queue_owner_and_node() -> None:
    listed = job("churn", spec={"queue": "risk"}, node="dgx-01"), job("fraud")

    assert names(*listed, text="CHU") == ["churn"]
    assert names(*listed, text="risk dana") == ["churn"]
    assert names(*listed, text="dgx-01") == ["churn"]
    assert names(*listed, text="dana") == ["churn", "fraud"]
    assert names(*listed, text="nobody") == []


def test_hostile_names_stay_the_text_that_they_are() -> None:
    assert names(job(HOSTILE), job(RTL), job("w" * 200)) == [HOSTILE, RTL, "w" * 200]


def test_a_row_leads_to_the_job_and_says_what_it_asks_for() -> None:
    running = job("churn", "running", progress=JobProgress(step=50, total=100, loss=0.25, rate=5.0))

    row = jobs_view([running], [DANA], JobQuery(), following="x", times=TIMES, base="/w/default/jobs").rows[0]

    assert row.target == "/w/default/jobs/job_churn"
    assert row.cells["progress"] == "step 50 of 100, loss 0.25, 10s left"
    assert row.cells["owner"] == "dana"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"cpus": 1}, "1 CPU"),
        ({"cpus": 8, "gpus": 2, "nodes": 4, "framework": "torch"}, "4 × 8 CPUs, 2 GPUs"),
        ({"gpus": 1, "gpu_milli": 250}, "1 CPU, 0.25 GPU"),
        ({"gpus": 1, "gpu_profile": "1g.18gb"}, "1 CPU, 1 GPU 1g.18gb"),
    ],
)
def test_what_a_job_asks_for(spec: dict[str, object], words: str) -> None:
    assert asks_for(job(spec=spec).spec) == words


def test_the_last_day_has_a_lane_for_each_gpu_and_one_for_the_node_without_any() -> None:
    jobs = (
        job("two", placements=(placed("dgx", "a", "b"),)),
        job("cpu", placements=(placed("dgx"),)),
        job("unknown", placements=(placed("gone", "GPU-0123456789abcdef"),)),
    )

    view = day_view(jobs, [machine("dgx", "a", "b")], now=NOON)

    lanes = [(span.lane, span.name) for span in view.spans]
    assert lanes == [
        ("dgx CPUs", "cpu"),
        ("dgx GPU 4", "two"),
        ("dgx GPU 5", "two"),
        ("gone GPU-01234567", "unknown"),
    ]


def test_a_short_job_is_drawn_as_a_part_of_the_time_that_is_shown() -> None:
    blink = job(
        "blink",
        started_at=NOON - timedelta(minutes=50),
        ended_at=NOON - timedelta(minutes=50),
        placements=(placed("dgx"),),
    )
    long = job("long", "running", placements=(placed("dgx"),))

    spans = {span.name: span for span in day_view((blink, long), (), now=NOON).spans}

    assert spans["long"].end_ms - spans["long"].begin_ms == 61 * 60_000
    assert spans["blink"].end_ms - spans["blink"].begin_ms == 61 * 60_000 / 300


def test_the_last_day_ends_now_and_begins_a_day_before() -> None:
    old = job(
        "old",
        started_at=NOON - timedelta(days=3),
        ended_at=NOON - timedelta(hours=1),
        placements=(placed("dgx"),),
    )
    gone = job(
        "gone",
        started_at=NOON - timedelta(days=3),
        ended_at=NOON - timedelta(days=2),
        placements=(placed("dgx"),),
    )
    running = job("running", "running", placements=(placed("dgx"),))
    waiting = job("waiting", "queued")

    view = day_view((old, gone, running, waiting), (), now=NOON)

    until = NOON + timedelta(minutes=1)
    assert [span.name for span in view.spans] == ["old", "running"]
    assert view.spans[0].begin_ms == 1000 * (until - timedelta(days=1)).timestamp()
    assert view.spans[1].end_ms == view.now_ms == 1000 * until.timestamp()
    assert dict(view.counts) == {"queued": 1, "running": 1, "done": 2, "failed": 0, "cancelled": 0}


@pytest.mark.parametrize(
    ("state", "fields", "possible"),
    [
        ("queued", {}, {"jobs.cancel", "jobs.move"}),
        ("running", {}, {"jobs.cancel", "jobs.move"}),
        ("running", {"cancelling": True}, set()),
        ("failed", {}, {"jobs.retry"}),
        ("cancelled", {}, {"jobs.retry"}),
        ("done", {}, set()),
    ],
)
def test_only_buttons_that_the_state_allows(state: str, fields: dict[str, bool], possible: set[str]) -> None:
    assert possible_actions(job(state=state, **fields), ALL) == possible
    assert possible_actions(job(state=state, **fields), ()) == set()


def test_a_waiting_job_says_why_and_what_would_start_it() -> None:
    explained = Explanation(
        job="job_train",
        state="waiting",
        reason=Reason.QUOTA,
        words="the quota of risk is used up",
        position=3,
        of=9,
        share=0.25,
        would_start=("queue risk with 2 more GPUs",),
        expected_start=NOON,
    )

    view = job_view(OneJobRecords(job(state="queued"), explained=explained, may=ALL), times=TIMES)

    assert view.explained is not None
    assert dict(view.explained.facts) == {
        "Binding constraint": "quota",
        "Position": "3 of 9",
        "Share of its queue": "25.0% by weight; the lowest goes first",
        "Starts at the latest": "2026-11-17 12:00:00",
    }
    assert view.explained.would_start == ("queue risk with 2 more GPUs",)


def test_checkpoints_and_places_are_shown() -> None:
    part = CheckpointPart(blob="blob_1", size_bytes=10)
    saved = Checkpoint(
        job="job_train", step=1200, save="a", manifest=part, parts=(part, part), size_bytes=1 << 21
    )
    found = job(placements=(placed("dgx", "a"),), exit_code=0)

    view = job_view(
        OneJobRecords(found, owner="dana", checkpoints=(saved,), machines=(machine("dgx", "a"),)), times=TIMES
    )

    assert dict(view.checkpoints[0].cells) == {
        "step": "1,200",
        "size": "2.0 MiB",
        "parts": "2",
        "blob": "blob_1",
    }
    facts = dict(view.facts)
    assert (facts["Ran"], facts["Duration"], facts["Exit code"]) == ("dgx GPU 4", "30m", "0")


def test_progress_beyond_the_total_fills_the_bar_and_no_more() -> None:
    view = progress_view(job(state="running", progress=JobProgress(step=120, total=100)))

    assert view is not None
    assert view.share == 1.0


# ------------------------------------------------------------------------------------- measurements


def details(params: dict[str, str], metrics: dict[str, float]) -> RunDetails:
    run = Run(
        id="run_1",
        workspace="workspace_1",
        experiment="experiment_1",
        name="train",
        status=RunStatus.FINISHED,
        owner="user_1",
        started_at=NOON,
    )
    return RunDetails(
        run=run,
        params=tuple(Param(key=key, value=value) for key, value in params.items()),
        tags=(),
        metrics=tuple(
            Metric(key=key, points=1, last=value, last_step=1, last_timestamp=NOON)
            for key, value in metrics.items()
        ),
        artifacts=(),
    )


@pytest.mark.parametrize("text", ["", "plan", "plan samples/s", "nothing\nof the kind", "\n\n"])
def test_other_text_is_no_plan_search(text: str) -> None:
    assert plan_rows(text) == ()


def test_a_profile_is_its_verdict_and_the_shares_of_a_step() -> None:
    run = details(
        {"profile": "input-bound: 61% of a step waits for data"},
        {"profile/input": 0.61, "profile/forward": 0.389, "profile/copy": 0.001, "step_time": 0.031},
    )

    view = measurements_view(run, (), None)

    assert view.profile is not None
    assert view.profile.sentence.startswith("input-bound")
    assert view.profile.step == "31ms"
    assert view.profile.shares == (("waiting for data", 61.0), ("forward", 38.9))


def test_hardware_use_is_plotted_by_unit_over_time() -> None:
    points = tuple(HistoryPoint(step=at, timestamp=NOON, value=50.0 + at) for at in range(3))
    keys = ["system/gpu_0_utilization_percentage", "system/cpu_utilization_percentage", "samples_per_second"]
    run = details({}, dict.fromkeys((*keys, "loss"), 1.0))
    curves = [MetricCurve(run="run_1", key=key, total=3, points=points) for key in wanted_curves(run)]
    used = UsageRow(id="job_train", name="train", gpu_hours=2.5, cpu_hours=20, costs={"AED": 12.0})

    view = measurements_view(run, curves, used)

    assert sorted(wanted_curves(run)) == sorted(keys)
    assert [(plot.name, plot.unit, len(plot.curves)) for plot in view.plots] == [
        ("Utilization", "%", 2),
        ("Throughput", "samples/s", 1),
    ]
    facts = dict(view.facts)
    assert (facts["GPU-hours held"], facts["Energy"], facts["Cost"]) == ("2.5", "not measured", "12 AED")


# ---------------------------------------------------------------------------------------------- logs


def test_a_log_in_pieces_becomes_lines() -> None:
    lines = LogLines()

    for piece in (b"one\ntw", b"o\nna\xc3", b"\xafve\n", b"rest"):
        lines.add(piece)

    assert lines.take() == ["one", "two", "naïve"]
    assert lines.take() == []
    lines.end()
    assert lines.take() == ["rest"]


def test_progress_bars_colours_and_control_characters_are_removed() -> None:
    lines = LogLines()

    lines.add(b"10%\r50%\r100%\r\n\x1b[31mred\x1b[0m\x07 " + RTL.encode() + b" <b>bold</b>\n\xff\n")

    assert lines.take() == ["100%", "red gnp.exe <b>bold</b>", "\ufffd"]


def test_a_long_log_keeps_its_end_and_a_long_line_its_beginning() -> None:
    lines = LogLines()

    lines.add(b"".join(b"%d\n" % number for number in range(100_000)))
    lines.add(b"x" * 10_000_000 + b"\n")

    kept = lines.take()
    assert len(kept) == LINES
    assert kept[-2] == "99999"
    assert len(kept[-1]) == LINE_CHARACTERS + 2
