"""`falaj queues what-if`: its options, refusals, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.commands import queues_what_if as command
from falaj.apps.cli.commands.queues_what_if import read_changes
from falaj.records.scheduling.simulation import Changes, ResourceBound
from falaj.records.scheduling.snapshot import Price
from falaj.scheduling.simulator import what_if
from simulator_fixtures import machine, past, team, world_of


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def test_changes_are_read_as_they_are_typed() -> None:
    read = read_changes(
        ["risk.gpus=8", "bank.risk.memory=64GiB"],
        ["risk.gpus=none"],
        ["research=2.5"],
        ["like=n1,count=2,gpus=4,gpu=H200"],
        ["n2,n3"],
        command="queues what-if",
    )

    found = Changes.model_validate(read)
    assert [(each.queue, each.resource, each.amount) for each in found.quotas] == [
        ("risk", "gpus", 8),
        ("bank.risk", "memory_bytes", 64 << 30),
    ]
    assert found.limits == (ResourceBound(queue="risk", resource="gpus", amount=None),)
    assert (found.weights[0].queue, found.weights[0].weight) == ("research", 2.5)
    node = found.add_nodes[0]
    assert (node.like, node.count, node.gpus, node.gpu_model) == ("n1", 2, 4, "H200")
    assert found.remove_nodes == ("n2", "n3")


def test_all_faults_of_the_options_are_named_at_once(falaj: CommandLine) -> None:
    typed = ["--quota", "risk=8", "--limit", "risk.gpus=many", "--weight", "research", "--node", "count=2"]

    ran = falaj("queues", "what-if", *typed)

    assert ran.status == 2
    assert "4 values are not valid" in ran.err
    for words in ("--quota risk.gpus=8", "a whole number, or none", "--weight research=2", "like=NAME"):
        assert words in ran.err


def test_unknown_names_and_an_empty_history_are_refused(falaj: CommandLine) -> None:
    unknown = falaj("queues", "what-if", "--weight", "nobody=2")
    empty = falaj("queues", "what-if", "--since", "3d")
    wrong = falaj("queues", "what-if", "--since", "yesterday")

    assert (unknown.status, empty.status, wrong.status) == (2, 1, 2)
    assert "a queue: default" in unknown.err
    assert "no job submitted" in empty.err
    assert "--since" in wrong.err


def test_the_table_shows_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    world = world_of(machine(gpus=3), queues=[team("risk", 1), team("research", 1)])
    world = world.model_copy(update={"price": Price(gpu=2.0)})
    jobs = [past(f"risk-{i}", 0, 60, queue="risk", waited=60 * i) for i in range(2)]
    jobs.append(past("other", 0, 60, queue="research"))
    found = what_if(jobs, world, Changes(quotas=(ResourceBound(queue="risk", resource="gpus", amount=2),)))

    command._print_comparison(found)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 jobs, submitted 2026-03-02 00:00Z")
    assert lines[1] == "  quota of risk: 1 GPU → 2 GPUs"
    risk = next(line for line in lines if line.startswith("risk"))
    assert "30m 0s → 0.0s" in risk
    assert risk.rstrip().endswith("4.00")
    assert any(line.startswith("fairness") for line in lines)
    assert any("only the changes differ" in line for line in lines)
