"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.fit import fit
from falaj.training.runtime.reporting.tensorboard import EventFile, crc32c, varint

pytest.importorskip("tensorboard")


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads from a folder, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def write(folder: Path, *metrics: MetricValue, done: int = 0) -> None:
    events = EventFile(folder, done=done)
    events.add(metrics)
    events.close()


def test_values_come_back_under_their_names_and_steps(tmp_path: Path) -> None:
    write(
        tmp_path,
        MetricValue(1, "loss", 0.5),
        MetricValue(300, "loss", -2.25),
        MetricValue(1, "profile/input", 1e-3),
    )

    shown = read_back(tmp_path)

    assert shown["loss"] == [(1, 0.5), (300, -2.25)]
    assert shown["profile/input"] == [(1, pytest.approx(1e-3))]


def test_nan_infinity_and_large_values_are_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        MetricValue(1, "loss", math.nan),
        MetricValue(2, "loss", 1e300),
        MetricValue(3, "loss", -math.inf),
    )

    values = [value for _, value in read_back(tmp_path)["loss"]]

    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, *(MetricValue(step, "loss", 1.0) for step in range(1, 11)))

    write(tmp_path, *(MetricValue(step, "loss", 2.0) for step in range(7, 13)), done=6)

    assert read_back(tmp_path)["loss"] == [(s, 1.0) for s in range(1, 7)] + [(s, 2.0) for s in range(7, 13)]


def test_file_truncated_by_a_crash_is_read_up_to_there(tmp_path: Path) -> None:
    write(tmp_path, MetricValue(1, "loss", 1.0), MetricValue(2, "loss", 2.0))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])

    write(tmp_path, MetricValue(2, "loss", 3.0), done=1)

    assert read_back(tmp_path)["loss"] == [(1, 1.0), (2, 3.0)]


def test_fit_writes_event_files_beside_the_run_and_a_resumed_run_continues_them(tmp_path: Path) -> None:
    rows = torch.randn(16, 2)
    options: dict[str, Any] = {"batch_size": 4, "run": tmp_path, "tensorboard": True, "device": "cpu"}
    for epochs in (1, 2):
        result = fit(nn.Linear(2, 1), nn.functional.mse_loss, (rows, rows[:, :1]), epochs=epochs, **options)

    shown = read_back(tmp_path / "tensorboard")

    assert [step for step, _ in shown["loss"]] == list(range(1, 9))
    assert [value for _, value in shown["loss"]][4:] == pytest.approx(result.losses)
    assert {"samples_per_second", "step_time", "goodput"} <= shown.keys()


def test_without_a_run_the_folder_is_still_written(tmp_path: Path) -> None:
    rows = torch.randn(8, 2)

    fit(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        (rows, rows[:, :1]),
        batch_size=4,
        epochs=1,
        tensorboard=tmp_path,
    )

    assert len(read_back(tmp_path)["loss"]) == 2


@pytest.mark.parametrize(
    ("given", "expected"), [(b"", 0), (b"123456789", 0xE3069283), (b"\0" * 32, 0x8A9136AA)]
)
def test_checksum_is_castagnolis(given: bytes, expected: int) -> None:
    assert crc32c(given) == expected


@pytest.mark.parametrize(("given", "expected"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")])
def test_numbers_take_as_many_bytes_as_they_need(given: int, expected: str) -> None:
    assert varint(given).hex() == expected
