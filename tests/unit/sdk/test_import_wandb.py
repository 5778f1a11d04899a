"""`platform.import_runs`: exports of W&B in JSON lines, whole and cut."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from falaj.errors import InvalidInput
from falaj.records.tracking import RunDetails
from falaj.sdk.run_import import wandb_export
from foreign_runs import wandb_file, wandb_run
from platforms import OwnPlatform
from polling import PATIENCE_S

ROWS = [
    {"_step": 0, "_timestamp": 1790000000.5, "_runtime": 1, "loss": 1.0, "eval": {"auc": 0.5}},
    {"_step": 1, "_timestamp": 1790000001.5, "loss": "NaN", "eval": {"auc": None}, "done": True},
    {
        "_step": 5,
        "_timestamp": 1790000002.5,
        "loss": "Infinity",
        "note": "text",
        "image": {"_type": "image-file"},
    },
]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    first = wandb_run(
        "1evx4bd4",
        rows=ROWS,
        name="ppo",
        user="ada",
        tags=["baseline", "v2"],
        group="seeds",
        config={
            "lr": 0.1,
            "optimizer": {"name": "adam"},
            "layers": [64, 64],
            "old": {"value": 3, "desc": None},
            "_wandb": 1,
        },
        summary={"loss": 0.1, "best_auc": 0.9, "_runtime": 60, "note": "done"},
    )
    second = wandb_run("m1n2osts", state="crashed", project="other")
    return wandb_file(tmp_path / "export.jsonl", first, second)


def show(platform: OwnPlatform, name: str) -> RunDetails:
    (found,) = (run for run in platform.runs.list(view="all").items if run.name == name)
    return platform.runs.show(found.id)


def test_runs_have_their_config_history_summary_and_tags(platform: OwnPlatform, export: Path) -> None:
    report = platform.import_runs(export)

    found = show(platform, "ppo")
    assert report.complete, report
    assert {each.what: each.here for each in report.counts} == {
        "experiments": 2,
        "runs": 2,
        "logged models": 0,
        "params": 4,
        "tags": 3,
        "points": 6,
        "datasets": 0,
        "artifacts": 0,
        "artifact bytes": 0,
    }
    assert {each.key: each.value for each in found.params} == {
        "lr": "0.1",
        "optimizer.name": "adam",
        "layers": "[64, 64]",
        "old": "3",
    }
    assert {each.key: each.value for each in found.tags} == {
        "falaj.import.run": "wandb:cleanrl/1evx4bd4",
        "wandb.tags": '["baseline", "v2"]',
        "wandb.group": "seeds",
        "wandb.summary.note": "done",
    }
    assert {each.key: (each.points, each.last_step) for each in found.metrics} == {
        "loss": (3, 5),
        "eval.auc": (1, 0),
        "done": (1, 1),
        "best_auc": (1, 5),
    }
    assert (found.run.status, found.run.user) == ("finished", "ada")
    assert found.run.ended_at == found.run.started_at + timedelta(seconds=60)
    assert show(platform, "m1n2osts").run.status == "failed"
    assert any("no numbers" in note and ": 2," in note for note in report.notes)


def test_points_keep_steps_times_nan_and_infinities(platform: OwnPlatform, export: Path) -> None:
    platform.import_runs(export)

    (loss,) = platform.runs.history(show(platform, "ppo").run.id, "loss").items
    assert [point.step for point in loss.points] == [0, 1, 5]
    assert [point.timestamp.timestamp() for point in loss.points] == [
        1790000000.5,
        1790000001.5,
        1790000002.5,
    ]
    assert loss.points[0].value == 1.0
    assert math.isnan(loss.points[1].value)
    assert loss.points[2].value == math.inf


def test_a_second_import_brings_only_what_is_new(light_platform: OwnPlatform, export: Path) -> None:
    light_platform.import_runs(export)
    again = light_platform.import_runs(export)
    longer = wandb_run("1evx4bd4", rows=[*ROWS, {"_step": 6, "loss": 0.5}], name="ppo")
    wandb_file(export, longer, wandb_run("third"))

    last = light_platform.import_runs(export)

    assert (again.new_runs, again.changed_runs, again.complete) == (0, 0, True)
    assert (last.new_runs, last.changed_runs, last.complete) == (1, 1, True)
    assert {each.key: each.points for each in show(light_platform, "ppo").metrics}["loss"] == 4


def test_files_of_runs_are_taken_from_a_folder(
    light_platform: OwnPlatform, export: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "files" / "1evx4bd4" / "media"
    folder.mkdir(parents=True)
    (folder / "image.png").write_bytes(b"png")
    os.symlink("/etc/hostname", folder / "link")

    report = light_platform.import_runs(export, artifacts=tmp_path / "files")

    assert report.complete
    assert [each.path for each in show(light_platform, "ppo").artifacts] == ["media/image.png"]


def test_a_run_whose_id_leads_out_of_the_folder_of_files_has_none(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "secret").write_text("secret")
    export = wandb_file(tmp_path / "export.jsonl", wandb_run(".."), wandb_run("../../etc", name="etc"))

    report = light_platform.import_runs(export, artifacts=tmp_path / "files")

    assert report.complete
    assert show(light_platform, "etc").artifacts == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-1], "line 7: a line that is cut"),
        (lambda text: text[: len(text) // 2], "line 2: a line that is cut"),
        (lambda text: "".join(text.splitlines(keepends=True)[:3]), "line 3: the end of the file inside run"),
        (lambda text: text.replace('"_step": 1,', '"_step": 0,'), "line 3: _step 0 after 0"),
        (lambda text: text.replace('"_step": 1,', '"_step": "x",'), "line 3: _step 'x'"),
        (lambda text: text.replace('"_step": 1,', f'"_step": {2**63},'), "line 3: _step"),
        (lambda text: text.replace('"rows": 3', '"rows": 4'), "line 5: 3 rows"),
        (lambda text: text.replace("finished", "exploded"), "line 1: state"),
        (lambda text: text.replace("2026-05-03T12:00:00", "soon"), "line 1: created_at"),
        (lambda text: text.replace('"id": "1evx4bd4", ', ""), "line 1: id"),
        (lambda text: text + text, "again"),
        (lambda text: '{"loss": 1}\n' + text, "line 1: a row outside of a run"),
        (lambda text: "[1]\n" + text, "line 1: list"),
        (lambda text: "[" * 100_000 + "\n" + text, "line 1"),
        (lambda text: '{"a": ' + "9" * 5000 + "}\n" + text, "line 1"),
        (lambda text: "{}\n", "line 1: a row outside"),
        (lambda text: "\n", "no run"),
    ],
)
def test_a_file_that_is_cut_or_wrong_is_refused_whole(
    light_platform: OwnPlatform, export: Path, change: object, words: str
) -> None:
    export.write_text(change(export.read_text()))  # type: ignore[operator]

    with pytest.raises(InvalidInput) as caught:
        light_platform.import_runs(export, kind="wandb")

    faults = [f"{fault.where}: {fault.given}" for fault in caught.value.faults]
    assert any(words in fault for fault in faults), faults
    assert light_platform.experiments.list(view="all").items == ()


def test_all_faults_are_named_at_once(light_platform: OwnPlatform, export: Path) -> None:
    export.write_text(export.read_text().replace('"_step": ', '"_step": 0.5, "was": '))

    with pytest.raises(InvalidInput) as caught:
        light_platform.import_runs(export)

    assert [fault.where for fault in caught.value.faults] == ["line 2", "line 3", "line 4", "line 5"]


def test_a_line_that_is_too_long_is_refused(
    light_platform: OwnPlatform, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_export, "LINE_BYTES", 1000)
    with export.open("a") as file:
        file.write(json.dumps({"wandb_run": {"config": "x" * 5000}}) + "\n")

    with pytest.raises(InvalidInput) as caught:
        light_platform.import_runs(export)

    assert caught.value.faults[0].where == "line 8"


def test_unknown_fields_become_tags_and_large_values_artifacts(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    fields = {"sweep": {"id": "s1"}, "config": {"prompt": "x" * 50_000_000}, "a key@home": 1}
    export = wandb_file(tmp_path / "export.jsonl", wandb_run("r1", **fields))

    report = light_platform.import_runs(export)

    found = show(light_platform, "r1")
    assert report.complete
    assert {"wandb.sweep": '{"id": "s1"}', "wandb.a key_home": "1"}.items() <= {
        each.key: each.value for each in found.tags
    }.items()
    assert found.artifacts[0].size_bytes > 50_000_000


WANDB = """
from types import SimpleNamespace

class Run(SimpleNamespace):
    user = SimpleNamespace(username="ada")
    summary = SimpleNamespace(_json_dict={"best": 0.9})
    config = {"lr": 0.1}
    def scan_history(self):
        yield {"_step": 0, "_timestamp": 1790000000.0, "loss": float("nan")}
        yield {"_step": 1, "_timestamp": 1790000001.0, "loss": 0.5}
    def files(self):
        return [self]
    def download(self, root, exist_ok):
        import pathlib
        pathlib.Path(root).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(root) / "output.log").write_text("hello")

class Api:
    def runs(self, path):
        entity, project = path.split("/")
        facts = {"entity": entity, "project": project, "state": "finished", "created_at": "2026-05-03T12:00:00Z"}
        return [Run(id="a1", name="one", tags=["x"], **facts), Run(id="a2", name="two", group=None, **facts)]
"""
"""What the documented script uses of the package wandb."""


def test_the_documented_script_writes_an_export(light_platform: OwnPlatform, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "import-runs.md").read_text()
    (script,) = (part for part in page.split("```") if "import wandb" in part)
    (tmp_path / "wandb.py").write_text(WANDB)
    command = [sys.executable, "-c", script.removeprefix("text\n"), "team/cleanrl"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=PATIENCE_S)

    report = light_platform.import_runs(tmp_path / "export.jsonl", artifacts=tmp_path / "files")

    assert report.complete
    found = show(light_platform, "one")
    assert {each.key: each.points for each in found.metrics} == {"loss": 2, "best": 1}
    assert {each.key: each.value for each in found.tags}["wandb.tags"] == '["x"]'
    assert [each.path for each in found.artifacts] == ["output.log"]
    assert found.run.user == "ada"
