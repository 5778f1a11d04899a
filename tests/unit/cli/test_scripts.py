"""What scripts and pipes get: errors as JSON, rows as CSV, and the files of `falaj init`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.commands import train
from falaj.apps.cli.commands.train import _ending
from falaj.records.training.jobs import Job

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_template(tmp_path_factory.mktemp("template"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform, platform.run("churn") as run:
            for step in range(3):
                run.log(step=step, auc=0.25 * step)
    return folder


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("typed", "code", "status"),
    [
        ("workspaces show nowhere --json", "object.not_found", 1),
        ("--json workspaces show nowhere", "object.not_found", 1),
        ("workspaces create Bad! --json", "input.invalid", 2),
        ("workspaces lits --json", "usage", 2),
        ("--json nonsense", "usage", 2),
        ("--json workspaces create", "usage", 2),
        ("--home nowhere zones list --json", "object.not_found", 1),
    ],
)
def test_errors_are_json_where_results_are(falaj: CommandLine, typed: str, code: str, status: int) -> None:
    ran = falaj(*typed.split())

    found = json.loads(ran.err)
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert (ran.status, found["exit_status"], found["code"]) == (status, status, code)
    assert found["detail"]


def test_the_json_of_an_error_has_faults_and_hints(falaj: CommandLine) -> None:
    wrong = json.loads(falaj("objects", "label", "Blob!", "--only", "uae", "--json").err)
    unknown = json.loads(falaj("workspaces", "show", "defalt", "--json").err)

    assert {fault["where"] for fault in wrong["faults"]} == {"OBJECT", "--only"}
    assert unknown["details"]["similar"] == ["default"]
    assert {"look": "falaj workspaces list"} in unknown["hints"]


def test_what_belongs_to_a_script_does_not_ask_for_json(falaj: CommandLine) -> None:
    assert falaj("train", "gone.py", "--", "--json").err.startswith("error[")


# ------------------------------------------------------------------------------------------------------ rows


def test_a_pipe_gets_rows_as_csv(falaj: CommandLine) -> None:
    header, *rows = falaj.done("runs", "metrics", "last", "auc").out.splitlines()

    assert header == "step,timestamp,value"
    assert [(row.split(",")[0], row.split(",")[2]) for row in rows] == [
        ("0", "0.0"),
        ("1", "0.25"),
        ("2", "0.5"),
    ]


def test_arrow_is_written_where_it_is_asked_for(falaj: CommandLine) -> None:
    falaj.done("runs", "metrics", "last", "auc", "--output", "auc.arrow")

    table = pa.ipc.open_stream((falaj.folder / "auc.arrow").read_bytes()).read_all()
    assert table["value"].to_pylist() == [0.0, 0.25, 0.5]


# ------------------------------------------------------------------------------------------------------ init


def blocks() -> dict[str, str]:
    """Return the files that the tutorial shows."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    return dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", page, re.DOTALL))


def test_init_writes_the_files_of_the_tutorial(falaj: CommandLine) -> None:
    ran = falaj.done("init", "project", "--home", "project/home")

    folder = falaj.folder / "project"
    assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == blocks()
    assert (folder / "home" / "id").exists()
    assert "falaj --home project/home up --detach" in ran.out


def test_init_keeps_what_is_there(falaj: CommandLine) -> None:
    Path("train.py").write_text("mine")

    first, second = falaj.json("init"), falaj.json("init")

    assert Path("train.py").read_text() == "mine"
    assert set(first["files"]) == set(blocks()) - {"train.py"}
    assert second["files"] == []


def test_version_and_whoami(falaj: CommandLine) -> None:
    assert falaj.done("version").out == falaj.done("--version").out
    assert falaj.json("version") == {"version": fj.__version__}
    assert falaj.json("whoami") == falaj.json("users", "whoami")


# ----------------------------------------------------------------------------------- how a training job ended


JOB = {
    "id": "job_00000000000000000000000000",
    "workspace": "workspace_00000000000000000000000000",
    "run": "run_00000000000000000000000000",
    "name": "train",
    "owner": "user_00000000000000000000000000",
    "code": "blob_00000000000000000000000000",
    "submitted_at": "2026-01-01T00:00:00Z",
    "label": {},
}


def failed(reason: str, **spec: str) -> str:
    fields = {"script": "train.py", "name": "train", **spec}
    made = Job.model_construct(
        **JOB | {"started_at": None, "ended_at": None, "outputs": (), "reason": reason, "state": "failed"},
        spec=train.JobSpec.model_construct(**{"environment": None} | fields),
    )
    message = _ending(made, {})
    return "\n".join([message.text, *(command for _, command in message.then)])


@pytest.mark.parametrize(
    "error", ["SyntaxError: invalid syntax", "IndentationError: x", "NameError: name 'a'"]
)
def test_a_fault_in_the_code_is_not_to_be_retried(error: str) -> None:
    said = failed(f"Exit code 1: {error}")

    assert "correct the code" in said
    assert "jobs retry" not in said


def test_a_missing_module_names_the_environment() -> None:
    said = failed("Exit code 1: ModuleNotFoundError: No module named 'xgboost.core'")

    assert "xgboost.core is not installed in the platform's Python: pip install 'falaj[trees]', or " in said
    assert "--environment" in said
    assert "jobs retry" not in said
    assert "the environment old" in failed("ModuleNotFoundError: No module named 'x'", environment="old")


def test_another_failure_may_be_retried() -> None:
    assert "jobs retry" in failed("Exit code 1: ConnectionError: reset by peer")
