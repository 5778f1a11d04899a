"""The flights of the demo: their timestamps, what is known of them when, and the scripts run as jobs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from falaj.records.registry import TensorSpec
from platforms import OwnPlatform, make_platform
from polling import PATIENCE_S

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
KEYS = {"carrier_delays": "carrier", "route_delays": "route", "tail_delays": "tailnum"}


def module(name: str) -> ModuleType:
    """Load a file of the example as a module."""
    spec = importlib.util.spec_from_file_location(f"flights_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


data, definitions = module("data"), module("definitions")


@dataclass(frozen=True)
class Slice:
    """Every ninth flight of January to March; those of March with the features that the platform joined."""

    flights: pd.DataFrame
    weather: pd.DataFrame
    training: pd.DataFrame
    board: pa.Table


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slice]:
    flights, weather = data.load_flights([1, 2, 3], every=9), data.load_weather()
    with make_platform(tmp_path_factory.mktemp("flights")) as platform:
        features = platform.features
        views = (*definitions.VIEWS, definitions.FLIGHTS_VIEW, definitions.BOARD_VIEW)
        features.apply(entities=definitions.ENTITIES, views=views)
        blobs = {"flights": put(platform, "flights", flights), "weather": put(platform, "weather", weather)}
        for view in (*definitions.VIEWS, definitions.FLIGHTS_VIEW):
            features.ingest(view.name, data=blobs["weather" if view.name == "weather" else "flights"])
        features.training_set(
            "march",
            spine="view:flights",
            views=tuple(view.name for view in definitions.VIEWS),
            since=data.month_start(3),
            until=data.month_start(4),
        )
        march = features.load("march").read_all()
        features.ingest("board", data=put(platform, "board", march))
        features.materialize("board")
        keys = tuple(march["flight"].to_pylist()[:3])
        online = features.read("board", keys=keys)
        board = pa.table(
            {name: [row.values[at] for row in online.rows] for at, name in enumerate(online.features)}
        )
        yield Slice(flights.to_pandas(), weather.to_pandas(), march.to_pandas(), board)


def put(platform: OwnPlatform, name: str, rows: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    parquet.write_table(rows, sink)
    return platform.put(name, sink.getvalue().to_pybytes()).id


# ------------------------------------------------------------------------------------------------ the data


@pytest.mark.slow
def test_a_flight_is_one_row_with_its_moments_in_utc(made: Slice) -> None:
    flights = made.flights
    local = flights.event_time.dt.tz_convert("America/New_York")

    assert flights.flight.is_unique
    assert not flights.isna().any().any()
    assert (local.dt.month == flights.month).all()
    assert (local.dt.hour + local.dt.minute / 60 == flights.hour).all()
    assert ((flights.delay >= 15) == (flights.late == 1)).all()
    assert str(flights.event_time.dtype) == str(flights.created_time.dtype) == "datetime64[us, UTC]"


def test_a_delay_is_known_from_the_arrival_on_by_the_clock_of_the_destination() -> None:
    flights = data.load_flights([1, 7]).to_pandas().set_index("flight")
    lasted = flights.created_time - flights.event_time
    arrivals = {
        "01011015-UA-N14228-EWR-IAH": "2013-01-01 14:30",  # 8:30 in Houston
        "01142355-AA-N635AA-JFK-SJU": "2013-01-15 03:41",  # after midnight in New York; Puerto Rico is not in the list
        "07162245-DL-N3748Y-JFK-PHX": "2013-07-17 03:59",  # Phoenix has no summer time
        "07161400-HA-N380HA-JFK-HNL": "2013-07-17 00:15",  # 14:15 in Honolulu, the same day there
    }

    assert flights.created_time[list(arrivals)].dt.strftime("%Y-%m-%d %H:%M").to_dict() == arrivals
    assert lasted.min() > timedelta(minutes=20)
    assert lasted[flights.delay < 60].max() < timedelta(hours=13)


# ------------------------------------------------------------------------------------------ knowledge time


def test_every_feature_is_what_was_known_at_the_scheduled_departure(made: Slice) -> None:
    """Against a reference that sees only the flights that had landed, and the hours that were over, by then."""
    sample = made.training.sample(60, random_state=1)

    for _, row in sample.iterrows():
        landed = made.flights[made.flights.created_time <= row.event_time]
        for view, key in KEYS.items():
            assert_equal(row, view, delays(landed[landed[key] == row[key]]))
        hours = made.weather[made.weather.origin == row.origin]
        over = hours[hours.event_time + timedelta(hours=1) <= row.event_time]
        assert_equal(row, "weather", over.iloc[-1][list(definitions.WEATHER)].to_dict())


def test_rows_known_later_change_nothing(made: Slice) -> None:
    """The reference above is strict: flights in the air at a departure would have changed its features."""
    row = made.training.iloc[-1]
    began = made.flights[(made.flights.carrier == row.carrier) & (made.flights.event_time < row.event_time)]

    assert (began.created_time > row.event_time).any()
    assert delays(began)["delay_1d"] != pytest.approx(row["carrier_delays__delay_1d"])


def test_neither_the_label_nor_the_arrival_is_a_feature(made: Slice) -> None:
    assert len(made.training) == (made.flights.month == 3).sum()
    assert set(definitions.FEATURES) <= set(made.training.columns)
    assert not {"late", "delay", "created_time", "month"} & set(definitions.FEATURES)


def test_online_features_equal_those_of_the_training_set(made: Slice) -> None:
    online = made.board.to_pandas()

    assert tuple(online.columns) == definitions.FEATURES
    assert np.array_equal(
        online.to_numpy(float),
        made.training[list(definitions.FEATURES)].head(3).to_numpy(float),
        equal_nan=True,
    )


def delays(flights: pd.DataFrame) -> dict[str, float]:
    """Return the windows that end with the newest of `flights`, computed by hand."""
    if flights.empty:
        return dict.fromkeys(definitions.DELAYS, np.nan)
    newest = flights.created_time.max()
    return {
        name: flights[flights.created_time > newest - window][name.split("_")[0]].mean()
        for name, window in definitions.DELAYS.items()
    }


def assert_equal(row: Any, view: str, wanted: dict[str, float]) -> None:
    found = {name: row[f"{view}__{name}"] for name in wanted}
    assert found == pytest.approx(wanted, nan_ok=True), f"{view} of {row.flight}"


# --------------------------------------------------------------------------------------------- the scripts


def run_as_job(script: str, made: Slice, folder: Path, *args: str) -> dict[str, Any]:
    """Run a script as a job does: inputs and outputs are folders, and the code is the working directory."""
    (folder / "inputs").mkdir()
    made.training.to_parquet(folder / "inputs" / "training.parquet")
    places = {"FALAJ_INPUTS": str(folder / "inputs"), "FALAJ_OUTPUTS": str(folder / "outputs")}
    done = subprocess.run(
        [sys.executable, script, *args],
        cwd=EXAMPLE,
        env={**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "log_loss=" in done.stderr
    described: dict[str, Any] = json.loads((folder / "outputs" / "model.json").read_text())
    return described


def ranking(folder: Path, rows: pd.DataFrame) -> float:
    """Return how often the exported model ranks a late flight above one on time; a missing value is NaN."""
    session = onnxruntime.InferenceSession(folder / "outputs" / "model" / "model.onnx")
    features = rows[list(definitions.FEATURES)].to_numpy(np.float32)
    (probabilities,) = session.run(None, {"features": features})
    assert probabilities.shape == (len(rows), 1)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    late, on_time = probabilities[rows.late == 1, 0], probabilities[rows.late == 0, 0]
    return float((late[:, None] > on_time[None, :]).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args"), [("train_trees.py", ("--trees", "20")), ("train_torch.py", ("--epochs", "8"))]
)
def test_a_script_leaves_a_model_that_takes_the_features_in_their_order(
    script: str, args: tuple[str, ...], made: Slice, tmp_path: Path
) -> None:
    described = run_as_job(script, made, tmp_path, *args)

    (taken,) = [TensorSpec.model_validate(spec) for spec in described["inputs"]]
    assert (taken.name, taken.dtype, taken.shape) == ("features", "float32", (-1, len(definitions.FEATURES)))
    assert taken.features == definitions.FEATURES
    assert described["files"] == ["model/model.onnx"]
    assert set(described["metrics"]) == {"auc", "log_loss"}
    assert ranking(tmp_path, made.training) > 0.65


def test_the_bad_model_is_bad_although_its_metrics_look_good(made: Slice, tmp_path: Path) -> None:
    described = run_as_job("bad_model.py", made, tmp_path)

    assert described["metrics"]["auc"] > 0.5
    assert ranking(tmp_path, made.training) < 0.4
