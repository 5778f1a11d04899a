"""The prediction log of the model server: its batches, its process, and their failures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from falaj.apps.model_server.platform import prediction_writer
from falaj.apps.model_server.platform.prediction_writer import (
    PredictionSource,
    PredictionWriter,
    StoreBatch,
    VersionKey,
)
from falaj.assembly.model_server import service_caller
from falaj.errors import Damaged, FalajError, NotFound, Unavailable
from falaj.governance.arrow_ipc import parse_arrow
from falaj.governance.operations.caller import acting_as
from falaj.ports.parsers import ByteSource
from falaj.records.governance.identity import Role
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.names import new_id
from falaj.records.serving.endpoints import ScoringRule
from falaj.records.serving.predictions import PredictionRecord
from falaj.records.serving.statistics import percentile_ms
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving import store as serving_store
from falaj.serving.dependencies import PredictedBatch
from falaj.serving.prediction_batches import decode_batch, split_id
from falaj.serving.scores import score
from falaj.serving.service import MODEL_SERVER
from hostile_rows import LYING, arrow_file, rows
from model_servers import constant
from platforms import OwnPlatform

MODEL = ServedModel(
    name="m",
    version="1",
    platform="onnx",
    inputs=(Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2)),),
    outputs=(
        Tensor(name="label", datatype=Datatype.BYTES, shape=(-1,)),
        Tensor(name="p", datatype=Datatype.FP32, shape=(-1, 2)),
    ),
)
KEY: VersionKey = ("endpoint", "1")


class Store:
    """Keeps batches, or fails as configured."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: FalajError | None = None

    def __call__(
        self, key: VersionKey, batch: str, content: bytes, rows: int, source: PredictionSource
    ) -> None:
        if self.error is not None:
            raise self.error
        self.kept[batch] = content


class Sketches:
    def __init__(self) -> None:
        self.seen: list[tuple[ColumnRole, dict[str, list[float]]]] = []

    def add(
        self, endpoint: str, version: str, columns: Any, *, role: ColumnRole = ColumnRole.FEATURE
    ) -> None:
        self.seen.append((role, {name: np.asarray(column).tolist() for name, column in columns.items()}))


class Events:
    def __init__(self) -> None:
        self.stored_batches: list[str] = []
        self.counts: Counter[VersionKey] = Counter()

    def stored(self, ident: str) -> None:
        self.stored_batches.append(ident)

    def lost(self, key: VersionKey, rows: int, ident: str = "") -> None:
        self.counts[key] += rows


class Log:
    """A writer, and the ids that the server would give out."""

    def __init__(
        self, store: StoreBatch, collector: Sketches | None = None, *, version: str = "version"
    ) -> None:
        self.events = Events()
        self.now = 0.0
        self.writer = PredictionWriter(store, events=self.events, collector=collector, clock=lambda: self.now)
        self._source = PredictionSource(version, (), ("a", "b"))
        self._ident, self._given = "", 0

    @property
    def lost(self) -> Counter[VersionKey]:
        return self.events.counts

    def next_id(self) -> str:
        if not self._ident:
            self._ident, self._given = str(new_id("predictions")), 0
            self.writer.open(self._ident, KEY, MODEL, self._source)
        self._given += 1
        return f"{self._ident}-{self._given - 1}"

    def add(
        self, idents: Sequence[str], counts: Sequence[int], inputs: list[Any], outputs: list[Any]
    ) -> None:
        """Add the answers to requests, whose ids are of one batch."""
        size, now = len(idents), datetime.now(UTC)
        batch = PredictedBatch(
            MODEL, now, "endpoint", (), counts, ["vera"] * size, [""] * size, inputs, outputs
        )
        self.writer.add(split_id(idents[0])[0], [split_id(ident)[1] for ident in idents], batch)

    def close(self) -> None:
        self.writer.close(self._ident, self._given)
        self._ident = ""

    def flush(self) -> None:
        self.close()
        self.writer.write()


def made_log(store: Store, collector: Sketches | None = None) -> Log:
    return Log(store, collector)


def answered(log: Log, *sizes: int) -> list[str]:
    """Return the ids of requests with that many rows each, answered as one batch."""
    idents, at = [log.next_id() for _ in sizes], sum(sizes)
    rows = np.arange(2 * at, dtype=np.float32).reshape(at, 2)
    texts = np.array(["yes"] * at, np.object_)
    log.add(idents, sizes, [rows], [texts, rows / 100])
    return idents


def values(store: Store, ident: str) -> dict[str, Any]:
    batch, number, row = split_id(ident)
    kept = store.kept[batch]
    source = ByteSource(len(kept), lambda offset, length: kept[offset : offset + length])
    decoded = decode_batch(
        parse_arrow([source], {"where": "batch", "limit_bytes": 1 << 20}).content, limit_bytes=1 << 20
    )
    place = decoded.place(number, row)
    assert place is not None
    return decoded.fields(place) | {"predicted": decoded.predicted(place)}


def test_every_row_is_found_by_its_id() -> None:
    store, sketches = Store(), Sketches()
    log = made_log(store, sketches)

    one, several = answered(log, 1, 3)
    log.flush()
    (later,) = answered(log, 1)
    log.flush()

    assert values(store, one)["inputs"] == {"a": 0.0, "b": 1.0}
    assert values(store, f"{several}.2")["inputs"] == {"a": 6.0, "b": 7.0}
    assert values(store, f"{several}.2")["outputs"]["label"] == ["yes"]
    assert values(store, f"{several}.2")["predicted"] == pytest.approx([0.06, 0.07])
    assert split_id(later)[0] != split_id(one)[0]
    assert sketches.seen[0] == (ColumnRole.FEATURE, {"a": [0.0, 2.0, 4.0, 6.0], "b": [1.0, 3.0, 5.0, 7.0]})
    assert sketches.seen[1][0] is ColumnRole.PREDICTION
    assert not log.lost


def test_numbers_that_json_lacks_are_texts_in_a_logged_prediction() -> None:
    """As null they could not be told from each other, nor from a value that is null."""
    values = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": None, "e": [1.5, math.inf]}
    facts = dict.fromkeys(("id", "endpoint", "model", "version", "caller", "request"), "x")
    found = PredictionRecord(**facts, at=datetime(2026, 1, 1, tzinfo=UTC), inputs=values, outputs={})

    sent = json.loads(found.model_dump_json(), parse_constant=pytest.fail)

    expected = {"a": "Infinity", "b": "-Infinity", "c": "NaN", "d": None, "e": [1.5, "Infinity"]}
    assert sent["inputs"] == expected


def test_rows_that_cannot_be_written_are_retried_later() -> None:
    store = Store()
    log = made_log(store)
    store.error = Unavailable("the disk is full")
    (early,) = answered(log, 1)
    log.flush()
    (late,) = answered(log, 1)
    log.flush()

    store.error = None
    log.flush()

    assert [values(store, ident)["caller"] for ident in (early, late)] == ["vera", "vera"]
    assert not log.lost


def test_memory_is_bounded_and_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.error = Unavailable("the disk is full")
    log = made_log(store)
    monkeypatch.setattr(prediction_writer, "MAX_PENDING_ROWS", 10)

    for _ in range(5):
        answered(log, 4)
    assert log.lost[KEY] == 12
    monkeypatch.setattr(prediction_writer, "MAX_PENDING_BYTES", 0)
    log.flush()

    assert log.lost[KEY] == 20
    answered(log, 4)
    assert log.lost[KEY] == 24


def test_a_removed_endpoint_does_not_block_the_others() -> None:
    store = Store()
    log = made_log(store)
    store.error = NotFound("there is no endpoint")
    answered(log, 2)
    log.flush()
    store.error = None

    (ident,) = answered(log, 1)
    log.flush()

    assert (values(store, ident)["caller"], log.lost[KEY]) == ("vera", 2)


def unanswered(log: Log) -> tuple[str, Callable[[], None]]:
    """Return the id of an answer that has not reached the log, and what adds it."""
    ident, row = log.next_id(), np.zeros((1, 2), np.float32)
    return ident, lambda: log.add([ident], [1], [row], [np.array(["no"], np.object_), row])


def test_a_batch_waits_for_the_answers_that_have_their_ids() -> None:
    store = Store()
    log = made_log(store)
    late, add = unanswered(log)
    log.flush()
    assert not store.kept

    add()
    log.writer.write()

    assert values(store, late)["caller"] == "vera"
    assert log.events.stored_batches == list(store.kept)


def test_an_answer_that_comes_after_its_batch_is_counted_as_lost() -> None:
    store = Store()
    log = made_log(store)
    _, add = unanswered(log)
    log.flush()
    log.now += prediction_writer.MAX_RESPONSE_WAIT_S
    log.writer.write()

    add()
    log.writer.write()

    assert (store.kept, log.lost[KEY]) == ({}, 1)


@pytest.mark.parametrize(
    ("scoring", "predicted", "label", "expected"),
    [
        (ScoringRule.SQUARED_ERROR, [3.0], 1.0, 4.0),
        (ScoringRule.LOG_LOSS, [0.25], 1, 1.386294),
        (ScoringRule.LOG_LOSS, [0.25], 0, 0.287682),
        (ScoringRule.LOG_LOSS, [0.25, 0.75], 1, 0.287682),
        (ScoringRule.LOG_LOSS, [0.2, 0.3, 0.5], 2, 0.693147),
        (ScoringRule.LOG_LOSS, [0.0], 1, 16.118096),
    ],
)
def test_scores_of_each_metric(
    scoring: ScoringRule, predicted: Sequence[float], label: float, expected: float
) -> None:
    assert score(scoring, predicted, label) == pytest.approx(expected, rel=1e-5)


def test_percentiles_are_interpolated_in_their_bucket() -> None:
    latency = [0, 0, 0, 98, 0, 0, 2]  # 98 between 0.5 and 1 ms, 2 between 5 and 10 ms

    assert percentile_ms(latency, 0.49) == pytest.approx(0.75)
    assert percentile_ms(latency, 0.99) == pytest.approx(7.5)
    assert percentile_ms([], 0.5) is None


@pytest.mark.parametrize("content", [*LYING.values(), arrow_file(rows()), b"", b"ARROW1"])
def test_a_batch_that_is_none_is_damaged(content: bytes) -> None:
    with pytest.raises(Damaged):
        decode_batch(content, limit_bytes=1 << 20)


# ---------------------------------------------------------------------------------------- on a real platform


def test_predictions_whose_transaction_failed_are_stored_by_the_next_try(
    light_platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = light_platform.put("model", constant(tmp_path / "model.onnx", 7.0).read_bytes())
    version = light_platform.models.register("churn", files=(model.id,), paths=("model.onnx",))
    endpoint = light_platform.endpoints.deploy("churn", model="churn@1")
    server = service_caller(light_platform.parts.gate, MODEL_SERVER, Role.OPERATOR)

    def record(_key: VersionKey, batch: str, content: bytes, rows: int, source: PredictionSource) -> None:
        with acting_as(server):
            light_platform.endpoints.record(
                iter([content]), endpoint=endpoint.id, batch=batch, rows=rows, version=source.version
            )

    log = Log(record, version=version.id)
    with monkeypatch.context() as patch:
        patch.setattr(serving_store, "add_batch", full)
        (ident,) = answered(log, 1)
        log.flush()
    log.flush()
    log.flush()

    with acting_as(server):
        assert light_platform.endpoints.prediction(ident).id == ident
    assert not log.lost


def full(*_given: Any, **_more: Any) -> NoReturn:
    raise Unavailable("the disk of the metadata database is full")
