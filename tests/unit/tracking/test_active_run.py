"""`with platform.run(…) as run`: what is logged, and how the run ends."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from falaj.assembly.machine_telemetry import read_here
from falaj.errors import Conflict, InvalidInput
from falaj.ports.machine.hardware import GpuTelemetry, NodeTelemetry
from falaj.sdk.run_logging.files import figure_bytes, image_bytes, table_bytes
from falaj.sdk.run_logging.system_metrics import SystemSampler, system_metrics
from platforms import OwnPlatform


def test_a_run_is_logged_to_and_finished(platform: OwnPlatform) -> None:
    with platform.run("churn", name="first", params={"lr": 0.1}) as run:
        run.log(auc=0.8, loss=0.5)
        run.log(step=1, auc=0.9)
        run.params(depth=3)
        run.tags(team="risk")
        run.artifact("plots/roc.png", b"png")

    found = platform.runs.show(run.id)
    assert (found.run.name, found.run.status) == ("first", "finished")
    assert {each.key: (each.last, each.points) for each in found.metrics} == {
        "auc": (0.9, 2),
        "loss": (0.5, 1),
    }
    assert {each.key: each.value for each in found.params} == {"lr": "0.1", "depth": "3"}
    assert [each.path for each in found.artifacts] == ["plots/roc.png"]
    assert platform.get(found.artifacts[0].blob) == b"png"
    assert "finished" in repr(run)


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_a_run_that_raises_is_marked(platform: OwnPlatform, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), platform.run("churn") as run:
        raise error

    assert platform.runs.show(run.id).run.status == status


def test_a_run_that_was_ended_inside_its_block_stays_as_it_is(platform: OwnPlatform) -> None:
    with platform.run("churn") as run:
        run.end(status="killed")

    assert platform.runs.show(run.id).run.status == "killed"
    with pytest.raises(Conflict, match="has ended"):
        run.end()


def test_what_cannot_be_logged_is_refused(platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput), platform.run("churn") as run:
        run.params(**{"a" * 300: 1})
    with pytest.raises(InvalidInput):
        platform.run("two\nlines")


def test_a_child_is_a_run_inside_another(platform: OwnPlatform) -> None:
    with platform.run("churn") as run, run.child("fold-1", params={"fold": 1}) as child:
        child.log({"val/auc": 0.5}, step=2)

    found = platform.runs.list(where=f"attributes.parent = '{run.id}'", metrics=("val/auc",)).items
    assert [(each.name, each.metrics[0].last_step, each.experiment) for each in found] == [
        ("fold-1", 2, run.run.experiment)
    ]


# ------------------------------------------------------------------------- figures, images and tables


class Figure:
    """Saves itself as figures of matplotlib do."""

    def savefig(self, file: io.BytesIO, *, format: str) -> None:  # noqa: A002 - as there
        file.write(f"a figure as {format}".encode())


def test_figures_images_and_tables_are_artifacts(platform: OwnPlatform) -> None:
    with platform.run("churn") as run:
        run.log_figure("plots/roc.svg", Figure())
        run.log_image("digit.png", np.eye(8))
        run.log_table("scores.json", {"name": ["a", "b"], "score": [0.5, float("nan")]})

    def read(path: str) -> bytes:
        return b"".join(platform.runs.read_artifact(run.id, path))

    assert read("plots/roc.svg") == b"a figure as svg"
    assert json.loads(read("scores.json")) == {
        "columns": ["name", "score"],
        "data": [["a", 0.5], ["b", None]],
    }
    assert Image.open(io.BytesIO(read("digit.png"))).getpixel((3, 3)) == 255


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_an_array_becomes_the_same_image(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)

    image = Image.open(io.BytesIO(image_bytes("a.png", pixels)))

    assert np.array_equal(np.asarray(image).reshape(5, 7, channels), pixels)


def test_images_come_from_files_and_from_pillow(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 3), (255, 0, 0))
    image.save(tmp_path / "a.png")

    assert image_bytes("b.png", tmp_path / "a.png") == (tmp_path / "a.png").read_bytes()
    assert Image.open(io.BytesIO(image_bytes("b.jpg", image))).size == (4, 3)


def test_tables_come_from_frames_rows_and_columns() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})

    assert table_bytes("t.csv", frame) == b"a,b\n1,x\n2,y\n"
    assert table_bytes("t.csv", [{"a": 1}, {"b": "=2"}]) == b"a,b\n1,\n,=2\n"
    read = pd.read_parquet(io.BytesIO(table_bytes("t.parquet", {"a": [1, 2], "b": ["x", "y"]})))
    assert read.equals(frame)


@pytest.mark.parametrize(
    ("make", "path", "given"),
    [
        (table_bytes, "t.xlsx", {"a": [1]}),
        (table_bytes, "t.csv", {"a": [1], "b": []}),
        (table_bytes, "t.csv", 5),
        (image_bytes, "a.png", np.zeros((2, 2, 5))),
        (image_bytes, "a.jpg", np.zeros((2, 2))),
        (image_bytes, "png", b""),
        (figure_bytes, "a.png", object()),
        (figure_bytes, "a.exe", Figure()),
    ],
)
def test_what_is_no_picture_and_no_table_is_refused(make: Any, path: str, given: Any) -> None:
    with pytest.raises(InvalidInput):
        make(path, given)


# ------------------------------------------------------------------------------------ machine, notebooks


def test_a_run_samples_the_machine_that_it_is_on(platform: OwnPlatform) -> None:
    with platform.run("churn", system_metrics_every=timedelta(hours=1)) as run:
        run.log(auc=0.5)

    keys = {each.key for each in platform.runs.show(run.id).metrics}
    assert {"auc", "system/cpu_utilization_percentage", "system/disk_usage_percentage"} <= keys
    assert "system/system_memory_usage_megabytes" in keys


def test_system_metrics_have_the_names_of_mlflow() -> None:
    gpu = GpuTelemetry(
        id="0", model="H200", memory_total_bytes=100, memory_used_bytes=50, busy=0.25, power_w=9.0
    )
    before = NodeTelemetry(name="n", cpu_s={"user": 1.0, "idle": 9.0}, network_bytes={("eth0", "sent"): 0})
    now = NodeTelemetry(
        name="n",
        cpu_s={"user": 2.0, "idle": 10.0},
        memory_total_bytes=4_000_000,
        memory_available_bytes=1_000_000,
        network_bytes={("eth0", "sent"): 2_000_000},
        gpus=(gpu,),
    )

    found = system_metrics(before, now)

    assert found == {
        "system/cpu_utilization_percentage": 50.0,
        "system/system_memory_usage_megabytes": 3.0,
        "system/system_memory_usage_percentage": 75.0,
        "system/network_transmit_megabytes": 2.0,
        "system/gpu_0_utilization_percentage": 25.0,
        "system/gpu_0_memory_usage_megabytes": 50 / 1e6,
        "system/gpu_0_memory_usage_percentage": 50.0,
        "system/gpu_0_power_usage_watts": 9.0,
    }


def test_a_run_that_ends_before_the_next_tick_of_the_cpu_counters_has_its_utilization() -> None:
    logged: list[Mapping[str, float]] = []
    unchanged = NodeTelemetry(name="n", cpu_s={"user": 1.0, "idle": 9.0})
    ticked = NodeTelemetry(name="n", cpu_s={"user": 1.01, "idle": 9.03})
    reports = iter([unchanged, unchanged, unchanged, ticked])

    sampler = SystemSampler(
        lambda _, found: logged.append(found), every=timedelta(hours=1), read=lambda: next(reports)
    )
    sampler.stop()

    (sample,) = logged
    assert sample == {"system/cpu_utilization_percentage": pytest.approx(25.0)}


def test_cpu_counters_that_stand_still_do_not_hold_up_the_end_of_a_run() -> None:
    logged: list[Mapping[str, float]] = []
    stuck = NodeTelemetry(
        name="n", cpu_s={"idle": 9.0}, memory_total_bytes=4_000_000, memory_available_bytes=1_000_000
    )

    sampler = SystemSampler(
        lambda _, found: logged.append(found), every=timedelta(hours=1), read=lambda: stuck
    )
    sampler.stop()

    (sample,) = logged
    assert {*sample} == {"system/system_memory_usage_megabytes", "system/system_memory_usage_percentage"}


def test_a_sample_that_cannot_be_logged_does_not_end_the_sampler() -> None:
    logged: list[int] = []

    def refuse(step: int, found: object) -> None:
        logged.append(step)
        raise Conflict("no")

    sampler = SystemSampler(refuse, every=timedelta(hours=1), read=read_here)
    sampler.stop()

    assert logged == [0]


def test_a_notebook_shows_the_run_and_escapes_what_users_wrote(platform: OwnPlatform) -> None:
    with platform.run("churn", name="<script>x</script>", params={"lr": "<b>"}, tags={"a": "<i>"}) as run:
        run.log(auc=0.5)

    html = run._repr_html_()

    assert "&lt;script&gt;" in html
    assert "auc" in html
    assert not any(tag in html for tag in ("<script>", "<b>", "<i>"))
