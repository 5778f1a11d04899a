"""`falaj runs import`: the table of counts, exit statuses, progress, and a platform behind an address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from foreign_runs import MlflowFixture, wandb_file, wandb_run
from interfaces import serve


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path / "falaj", capsys, template=template) as line:
        yield line


@pytest.fixture
def mlflow(tmp_path: Path) -> MlflowFixture:
    made = MlflowFixture(tmp_path / "mlflow").create()
    made.experiment(1, "churn")
    made.run("r1", params={"lr": "0.1"}, points=[("auc", 0.9, 1, 1)], files={"a.txt": b"hello"})
    return made


def test_counts_of_the_source_and_of_the_platform_are_shown(
    falaj: CommandLine, mlflow: MlflowFixture
) -> None:
    shown = falaj.done("runs", "import", mlflow.path)
    again = falaj.json("runs", "import", mlflow.path, "--from", "mlflow")

    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if line[:1].isalpha()}
    assert rows["runs"] == ["1", "1"]
    assert rows["points"] == ["1", "1"]
    assert "all of" in shown.out
    assert "1 new run" in shown.out
    assert "falaj runs list" in shown.out
    assert (again["complete"], again["new_runs"]) == (True, 0)
    assert falaj.json("runs", "list")["items"][0]["name"] == "r1"


def test_what_is_not_here_at_the_end_fails_the_command(falaj: CommandLine, mlflow: MlflowFixture) -> None:
    mlflow.points("r1", [("late", 1.0, 0, 10**17)])

    ran = falaj("runs", "import", mlflow.path)

    assert ran.status == 1
    (points,) = (line for line in ran.out.splitlines() if line.startswith("points"))
    assert points.split() == ["points", "2", "1", "differs"]
    assert "not all of" in ran.out


def test_options_choose_experiments_artifacts_and_names(falaj: CommandLine, mlflow: MlflowFixture) -> None:
    mlflow.experiment(2, "other")
    options = ("--experiment", "churn", "--prefix", "old ", "--no-artifacts")

    falaj.done("runs", "import", mlflow.path, *options)

    assert [each["name"] for each in falaj.json("experiments", "list")["items"]] == ["old churn"]
    assert falaj.json("runs", "show", "r1")["artifacts"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("nothing.db",), 2, "SOURCE"),
        (("{file}", "--from", "comet"), 2, "mlflow or wandb"),
        (("{file}", "--from", "wandb"), 2, "line 1"),
        (("{file}", "--artifacts", "nowhere"), 2, "a folder"),
        (("{file}", "--artifacts", ".", "--no-artifacts"), 2, "one of them"),
        (("{file}", "--experiment", "unknown"), 1, "it has churn"),
        (("http://127.0.0.1:9",), 1, "does not answer"),
        (("http://127.0.0.1:9", "--from", "wandb"), 2, "import-runs.md"),
        ((), 2, "SOURCE"),
    ],
)
def test_misuse_is_explained(
    falaj: CommandLine,
    mlflow: MlflowFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr("falaj.sdk.run_import.mlflow_server.WAIT_S", 0.01)

    ran = falaj("runs", "import", *(each.format(file=mlflow.path) for each in arguments))

    assert ran.status == status, ran.err
    assert words in ran.err


def test_a_terminal_shows_a_bar_and_other_places_lines(
    falaj: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"_step": number, "loss": 1.0} for number in range(3000)]
    export = wandb_file(tmp_path / "export.jsonl", wandb_run("r1", rows=rows))
    monkeypatch.setattr("falaj.apps.cli.output.progress.LINE_EVERY_S", 0.0)
    lines = falaj.done("runs", "import", export).err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")

    bar = falaj.done("runs", "import", export).err

    assert "importing: 3001 rows of 3001 rows" in lines
    assert "importing" in bar
    assert "\x1b[" in bar


def test_runs_are_imported_into_a_workspace_of_a_server(
    falaj: CommandLine, mlflow: MlflowFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are split into requests that the server takes, also one that takes smaller ones than usual."""
    mlflow.run(
        "r2",
        params={f"p{number}": "x" * 8000 for number in range(150)},
        points=[("loss", 1.0, number, number) for number in range(12_000)],
    )
    with serve(tmp_path / "served", toml="[server]\nbody_limit_bytes = 1048576\n") as served:
        monkeypatch.setenv("FALAJ_TOKEN", served.developer)

        found = falaj.json("--url", served.url, "runs", "import", mlflow.path, "--workspace", "risk")
        denied = falaj("--url", served.url, "runs", "import", mlflow.path)

        runs = served.platform.runs.list(workspace="risk").items
    assert found["complete"], found
    assert len(runs) == 2
    assert denied.status == 1
    assert "policy.denied" in denied.err or "not_found" in denied.err
