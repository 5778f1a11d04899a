"""`falaj models card`, `bom`, `diff`, `alias` and gates, on versions that a real job saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line
from falaj.apps.cli.commands.models_cards import _moment
from falaj.errors import InvalidInput

FEATURES = """
[[entity]]
name = "customer"
key = "customer_id"
type = "integer"

[[view]]
name = "usage"
entities = ["customer"]
columns = { calls = "integer", minutes = "float" }
"""
TRAIN = """
import sys
import numpy as np
from sklearn.linear_model import LogisticRegression
import falaj as fj

auc = float(sys.argv[1])
values = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
model = LogisticRegression().fit(values, values[:, 0] > 0)
fj.save_model(
    model,
    sample=values,
    names=["usage__calls", "usage__minutes"],
    metrics={"accuracy": 0.8},
    card="Who leaves next month.",
    licence="mit",
    example=[[1.0, 2.0]],
    measurements={"holdout": {"auc": auc}},
)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a training set and two versions of a model, measured on it."""
    folder = tmp_path_factory.mktemp("cards")
    rows = [f"{number},2026-01-{number + 1:02}T00:00:00Z,{number},1.5" for number in range(20)]
    labels = [f"{number},2026-02-01T00:00:00Z,{number % 2}" for number in range(20)]
    (folder / "code").mkdir()
    (folder / "features.toml").write_text(FEATURES)
    (folder / "code" / "train.py").write_text(TRAIN)
    (folder / "usage.csv").write_text("\n".join(["customer_id,event_time,calls,minutes", *rows]))
    (folder / "labels.csv").write_text("\n".join(["customer_id,event_time,churned", *labels]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform:
            platform.apply("features.toml")
            platform.ingest("usage", "usage.csv")
            platform.training_set("churn-holdout", spine="labels.csv", views=["usage"])
            for auc in ("0.93", "0.9"):
                submitted = platform.train("code/train.py", inputs={"holdout": "churn-holdout"}, args=[auc])
                *_, job = platform.jobs.wait(submitted.id)
                platform.register(job.id, "churn")
    return folder


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def test_a_version_of_a_job_has_its_facts_by_itself(falaj: CommandLine) -> None:
    card = falaj.json("models", "card", "churn@1")
    facts = card["facts"]

    assert card["missing"] == []
    packages = {each["name"]: each for each in facts["packages"]}
    assert packages["scikit-learn"]["version"].startswith("1.")
    assert len(packages["scikit-learn"]["files_sha256"]) == 64
    assert facts["hardware"]["machine"]
    assert facts["hardware"]["cpus"] == 1
    assert facts["environment"]["python"].startswith("3.")
    assert (facts["licence"], facts["example"]) == ("MIT", "model/example.json")
    assert facts["training_set"]["name"] == "churn-holdout"
    (measured,) = facts["measurements"]
    assert (measured["on"], measured["metrics"]) == ("churn-holdout", {"auc": 0.93})
    assert measured["run"] == facts["run"]["id"]
    request = json.loads(falaj.done("models", "read", "churn@1", "model/example.json").out)
    assert request["inputs"][0]["shape"] == [1, 2]


def test_cards_and_bills_of_materials_are_printed(falaj: CommandLine) -> None:
    printed = falaj.done("models", "card", "churn@1").out
    as_json = json.loads(falaj.done("models", "card", "churn@1", "--format", "json").out)
    bom = json.loads(falaj.done("models", "bom", "churn@1").out)
    refused = falaj("models", "card", "churn@1", "--format", "pdf")

    assert printed.startswith("# churn@1\n")
    assert "> Who leaves next month." in printed
    assert as_json["markdown"].strip() == printed.strip()
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert refused.status == 2
    assert "md or json" in refused.err
    assert falaj("models", "card", "churn@9").status == 1


def test_two_versions_are_compared_in_a_table(falaj: CommandLine) -> None:
    printed = falaj.done("models", "diff", "churn@1", "churn@2").out
    as_json = falaj.json("models", "diff", "churn@1", "churn@2")

    assert "auc on churn-holdout" in printed
    assert "-0.03" in printed
    assert [each["name"] for each in as_json["facts"]] == ["run"]
    assert as_json["packages"] == []


def test_gates_are_set_shown_checked_refuse_and_are_waived(falaj: CommandLine) -> None:
    falaj.done("models", "promote", "churn@1", "--to", "champion")
    rule = ("--metric", "auc >= champion - 0.002", "--on", "churn-holdout", "--check", "card-complete")

    assert "churn-holdout" in falaj.done("models", "set-gates", "churn", "--alias", "champion", *rule).out
    shown = falaj.done("models", "gates", "churn", "--alias", "champion").out
    assert "auc >= champion - 0.002" in shown
    checked = falaj("models", "check-gates", "churn@2", "--alias", "champion")
    assert checked.status == 1
    assert "failed" in checked.out
    assert "passed" in checked.out
    refused = falaj("models", "promote", "churn@2", "--to", "champion")
    assert refused.status == 1
    assert "given    auc 0.9" in refused.err
    assert "allowed  >= 0.928: champion is churn@1 with 0.93" in refused.err
    waived = falaj.done("models", "waive-gates", "churn@2", "--alias", "champion", "--reason", "a trial")
    assert "falaj models promote churn@2 --to champion" in waived.out
    assert "churn@2 is champion" in falaj.done("models", "promote", "churn@2", "--to", "champion").out
    state = falaj.done("models", "alias", "churn", "champion").out
    assert "a trial" in state
    assert "churn@1 is champion" in falaj.done("models", "rollback", "churn", "--alias", "champion").out
    today = datetime.now(UTC).date()
    assert falaj.json("models", "alias", "churn", "champion", "--at", str(today))["version"] == "churn@1"
    yesterday = str(today - timedelta(days=1))
    assert falaj.json("models", "alias", "churn", "champion", "--at", yesterday)["version"] is None


@pytest.mark.slow
def test_a_version_and_the_champion_are_evaluated_for_gates(falaj: CommandLine) -> None:
    falaj.done("models", "promote", "churn@1", "--to", "champion")
    rule = ("--metric", "auc >= champion - 0.5", "--on", "churn-holdout", "--target", "churned")
    assert (
        "computed for churned on churn-holdout"
        in falaj.done("models", "set-gates", "churn", "--alias", "champion", *rule).out
    )
    refused = falaj("models", "promote", "churn@2", "--to", "champion")
    assert "fix      falaj models evaluate churn@2 --on churn-holdout --target churned" in refused.err

    table = falaj.done("models", "evaluate", "churn@2", "--on", "churn-holdout").out

    assert [line.split()[:2] for line in table.splitlines() if " auc " in line] == [
        ["churn@1", "auc"],
        ["churn@2", "auc"],
    ]
    shown = falaj.done("models", "check-gates", "churn@2", "--alias", "champion").out
    assert "of churn@2 was computed by job_" in shown
    assert "over 20 rows" in shown
    falaj.done("models", "promote", "churn@2", "--to", "champion")
    assert "of churn@1 was computed by job_" in falaj.done("models", "alias", "churn", "champion").out
    again = falaj("models", "evaluate", "churn@2", "--on", "churn-holdout", "--against", "none")
    assert again.status == 1
    assert "computed already" in again.err


def test_a_day_stands_for_its_end() -> None:
    assert _moment("2026-05-03") == datetime(2026, 5, 3, 23, 59, 59, 999999, tzinfo=UTC)
    assert _moment("2026-05-03T12:00") == datetime(2026, 5, 3, 12, tzinfo=UTC)
    with pytest.raises(InvalidInput, match="--at"):
        _moment("3 May")
