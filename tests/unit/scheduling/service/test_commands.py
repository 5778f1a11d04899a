"""`falaj queues` and `falaj usage` on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.commands.usage import print_report
from falaj.apps.cli.output import queue_tables
from falaj.apps.cli.output.queue_tables import print_budgets, print_queue, print_tree
from falaj.apps.cli.output.values import encodable
from falaj.records.scheduling.accounting import (
    Amounts,
    BudgetState,
    BudgetTerms,
    QueueSettings,
    QueueState,
    UsageReport,
    UsageRow,
)
from falaj.records.scheduling.snapshot import Quota

NOON = datetime(2026, 3, 11, 12, tzinfo=UTC)

BANK = QueueState(
    settings=QueueSettings(name="bank", quota=Quota(gpus=8)),
    held=Amounts(gpus=6.5, cpus=9),
    running=3,
    waiting=4,
    share=0.8125,
    history=0.25,
    score=1.0625,
    children=("cards", "risk"),
)
RISK = QueueState(
    settings=QueueSettings(
        name="risk",
        quota=Quota(gpus=4, memory_bytes=1 << 36),
        limit=Quota(gpus=8),
        parent="bank",
        weight=2.0,
        workspaces=("risk",),
    ),
    held=Amounts(gpus=6.0, cpus=8, memory_bytes=1 << 35),
    borrowed=Amounts(gpus=2.0),
    running=2,
    waiting=4,
    share=0.75,
    history=0.25,
    score=0.5,
    unseen=1,
)
CARDS = QueueState(settings=QueueSettings(name="cards", parent="bank"), held=Amounts(gpus=0.5, cpus=1))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def settings(falaj: CommandLine, name: str) -> Any:
    return {
        key: value
        for key, value in falaj.json("queues", "show", name)["settings"].items()
        if key != "version"
    }


# ----------------------------------------------------------------------------------------------- setting


@pytest.mark.slow
def test_omitted_options_keep_their_values(falaj: CommandLine) -> None:
    falaj.done("queues", "set", "risk", "--gpus", "4", "--gpu-limit", "8", "--memory", "64GiB")

    falaj.done("queues", "set", "risk", "--weight", "2.5", "--memory", "32GiB")

    found = settings(falaj, "risk")
    assert found["quota"] == {"cpus": None, "gpus": 4, "memory_bytes": 32 << 30}
    assert found["limit"] == {"cpus": None, "gpus": 8, "memory_bytes": 32 << 30}
    assert found["weight"] == 2.5


def test_none_removes_a_bound_and_no_borrow_sets_the_limit(falaj: CommandLine) -> None:
    falaj.done("queues", "set", "risk", "--gpus", "4", "--cpus", "16", "--gpu-limit", "8")

    falaj.done("queues", "set", "risk", "--cpus", "none", "--no-borrow")

    found = settings(falaj, "risk")
    assert found["quota"] == {"cpus": None, "gpus": 4, "memory_bytes": None}
    assert found["limit"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        ("--gpus", "4", "--gpu-limit", "8", "--parent", "bank", "--weight", "123456.25"),
        ("--gpus", "4", "--cpus", "0", "--memory", "1GiB", "--workspace", "default"),
        (),
    ],
)
def test_the_undo_command_restores_the_queue(falaj: CommandLine, first: tuple[str, ...]) -> None:
    falaj.done("queues", "set", "bank")
    falaj.done("queues", "set", "risk", *first)
    before = settings(falaj, "risk")
    ran = falaj.done("queues", "set", "risk", "--gpus", "6", "--gpu-limit", "7", "--parent", "none")
    assert settings(falaj, "risk") != before

    undo = next(line.split("falaj ", 1)[1].split() for line in ran.out.splitlines() if "undo" in line)
    falaj.done(*undo)

    assert settings(falaj, "risk") == before


@pytest.mark.slow
def test_a_removed_queue_comes_back_by_the_undo(falaj: CommandLine) -> None:
    falaj.done("queues", "set", "risk", "--gpus", "4", "--weight", "3")
    before = settings(falaj, "risk")

    ran = falaj.done("queues", "remove", "risk", "--yes")
    assert falaj("queues", "show", "risk").status == 1
    falaj.done(*ran.out.splitlines()[-1].split("falaj ", 1)[1].split())

    assert settings(falaj, "risk") == before


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("--gpus", "many"), "--gpus"),
        (("--gpus", "-1"), "--gpus"),
        (("--memory", "64"), "--memory"),
        (("--cpu-limit", "1.5"), "--cpu-limit"),
        (("--weight", "0"), "--weight"),
        (("--gpus", "4", "--gpu-limit", "2"), "at least the quota, 4"),
    ],
)
def test_faults_are_named_as_typed(falaj: CommandLine, typed: tuple[str, ...], message: str) -> None:
    ran = falaj("queues", "set", "risk", *typed)

    assert ran.status == 2
    assert message in ran.err


@pytest.mark.parametrize("what", ["parent", "workspace"])
def test_unknown_queues_are_named(falaj: CommandLine, what: str) -> None:
    ran = falaj("queues", "set", "risk", f"--{what}", "nowhere")

    assert ran.status == 1
    assert "'nowhere'" in ran.err


def test_removing_asks_first(falaj: CommandLine) -> None:
    falaj.done("queues", "set", "risk")

    assert falaj("queues", "remove", "risk").status == 2
    assert settings(falaj, "risk")["name"] == "risk"


def test_budgets_are_set_and_shown(falaj: CommandLine) -> None:
    made = falaj.done("queues", "set-budget", "default", "--gpu-hours", "100.5", "--period", "week")
    shown = falaj.done("queues", "budgets")
    gone = falaj.done("queues", "set-budget", "default")

    assert "default may spend 100.5 GPU-hours a week" in made.out
    assert "0.00 of 100.5, 100.50 left" in shown.out
    assert "queues set-budget default --gpu-hours 100.5 --period week" in gone.out
    assert falaj.json("queues", "budgets") == []


# ----------------------------------------------------------------------------------------------- figures


def test_the_queue_tree_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    print_tree([BANK, CARDS, QueueState(settings=QueueSettings(name="default")), RISK])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["queue", "bank", "├─ cards", "└─ risk", "default"]
    assert "████████░░ 6.5 of 8 " in lines[1]
    assert "████████░░ 6 of 4, up to 8" in lines[3]
    assert "32 GiB of 64 GiB, up to all" in lines[3]


def test_the_queue_tree_is_drawn_in_ascii(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_tables, "encodable", partial(encodable, encoding="ascii"))

    print_tree([BANK, CARDS, RISK])

    out = capsys.readouterr().out
    assert out.isascii()
    assert "`- risk" in out
    assert "########.." in out


def test_one_queue_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_queue(RISK)

    out = capsys.readouterr().out
    assert "2 GPUs\n" in out
    assert "2 running, 4 waiting" in out
    assert "75.0% of the cluster now, 25.0% recently" in out
    assert "risk and 1 that you may not see" in out


def test_an_overspent_budget_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    terms = BudgetTerms(workspace="risk", gpu_hours=10, money=1234567.5)
    state = BudgetState(
        terms=terms,
        currency="AED",
        since=NOON,
        used_gpu_hours=12.5,
        left_gpu_hours=-2.5,
        left_money=1234567.5,
    )

    print_budgets([state])

    out = capsys.readouterr().out
    assert "12.50 of 10, 2.50 over" in out
    assert "0.00 of 1234567.5 AED, 1234567.50 left" in out


def test_a_report_marks_unknown_figures(capsys: pytest.CaptureFixture[str]) -> None:
    line = UsageRow(
        id="job_1", name="fitting", workspace="risk", attempts=2, running=1, gpu_hours=3, cpu_hours=6
    )
    line = line.model_copy(update={"unmeasured_gpu_hours": 3.0, "unmeasured_cpu_hours": 6.0})
    report = UsageReport(by="job", since=NOON, until=NOON, lines=(line,), total=line, left_out=2)

    print_report(report)

    captured = capsys.readouterr()
    assert "fitting job_1  risk       2 (1 running)  3.00       6.00       -" in captured.out
    assert "the energy of 3.00 GPU-hours and 6.00 CPU-hours was not measured" in captured.err
    assert "no prices are set" in captured.err
    assert "2 more" in captured.err


# ------------------------------------------------------------------------------------------------- usage


def test_usage_without_a_command_shows_the_report(falaj: CommandLine) -> None:
    alone = falaj.json("usage")
    named = falaj.json("usage", "show", "--by", "workspace")

    assert alone["by"] == named["by"] == "workspace"
    assert falaj.json("usage", "--by", "queue", "--since", "30d")["by"] == "queue"
    assert "Usage: falaj usage" in falaj.done("usage", "--help").out


@pytest.mark.parametrize(
    ("typed", "since"),
    [("2026-03-01", "2026-03-01T00:00:00Z"), ("2026-03-01T04:00+04:00", "2026-03-01T00:00:00Z")],
)
def test_timestamps_are_parsed_as_typed(falaj: CommandLine, typed: str, since: str) -> None:
    found = falaj.json("usage", "--since", typed)["since"]

    assert datetime.fromisoformat(found) == datetime.fromisoformat(since)


@pytest.mark.parametrize("typed", ["5", "yesterday", "2026-13-01"])
def test_an_invalid_timestamp_is_refused(falaj: CommandLine, typed: str) -> None:
    ran = falaj("usage", "--since", typed)

    assert ran.status == 2
    assert "--since" in ran.err
    assert "30d" in ran.err


def test_the_bill_is_written_to_a_file(falaj: CommandLine) -> None:
    falaj.done("usage", "export", "--out", "bill.csv", "--since", "2026-03-01")

    assert (falaj.folder / "bill.csv").read_text().startswith("BilledCost,BillingAccountId,")
