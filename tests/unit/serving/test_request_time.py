"""Request-time features and imputed values of endpoints: by REST, gRPC and plain rows, as in the training set."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pyarrow as pa
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

from falaj.apps.model_server.inference.feature_lookup import join_rows
from falaj.apps.model_server.inference.protocol import InputTensor
from falaj.errors import Denied, InvalidInput, NotFound
from falaj.features.request_time.training_columns import add_columns, column_types
from falaj.governance.operations.caller import acting_as
from falaj.records.expressions.declarations import resolve_features
from falaj.records.features import (
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    OnlineRow,
    OnlineRows,
    RequestFeature,
)
from falaj.records.governance.identity import Role
from falaj.records.registry import ModelVersion, TensorSpec
from falaj.records.serving.lookups import Lookup, VersionLookup, ViewLookup
from falaj.records.serving.tensors import Datatype, Tensor
from falaj.serving.lookups.joins import build_join
from falaj.serving.tensors import to_bytes
from model_servers import model, serving_platform
from platforms import OwnPlatform, make_platform
from polling import PATIENCE_S, eventually

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ENTITY = Entity(name="card", key="card", type=ColumnType.INTEGER)
VIEW = FeatureView(
    name="stats",
    entities=("card",),
    columns=(
        Feature(name="mean", type=ColumnType.FLOAT),
        Feature(name="count", type=ColumnType.INTEGER),
        Feature(name="level", type=ColumnType.INTEGER),
        Feature(name="vip", type=ColumnType.BOOLEAN),
    ),
    event_time="at",
)
COMPUTED = (
    RequestFeature(name="ratio", expression="amount / stats__mean"),
    RequestFeature(name="is_night", expression="hour(event_time) < 6"),
    RequestFeature(name="last_digits", expression="card % 1000 + stats__count"),
    RequestFeature(name="unused", expression="log(amount)"),
)
COLUMNS = ("ratio", "is_night", "last_digits", "stats__level", "stats__vip", "amount")
SPEC = TensorSpec(name="x", dtype="float64", shape=(-1, len(COLUMNS)), features=COLUMNS)
LARGE = 2**60 + 7
"""A key that no double holds."""


def echo(path: Path) -> bytes:
    """Return a model that returns its input."""
    width = len(COLUMNS)
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    onnx.save(model(nodes, {"x": ["n", width]}, {"y": ["n", width]}, kind=TensorProto.DOUBLE), path)
    return path.read_bytes()


def arrow(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def moments(*values: datetime) -> pa.Array:
    return pa.array(values, pa.timestamp("us", "UTC"))


def spine() -> pa.Table:
    return pa.table(
        {
            "card": pa.array([1, 2, LARGE, 3, 99], pa.int64()),
            "amount": pa.array([10.0, 7.5, 1e-3, 4.0, 3.0]),
            "event_time": moments(NOON, NOON + timedelta(hours=13), NOON, NOON, NOON),
        }
    )


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    folder = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml="[serving]\nlog_every = 0.2\n") as made:
        made.features.apply(entities=(ENTITY,), views=(VIEW,))
        rows = pa.table(
            {
                "card": pa.array([1, 2, LARGE, 3], pa.int64()),
                "at": moments(*[NOON - timedelta(days=1)] * 4),
                "mean": pa.array([3.0, 0.1, 7.0, None]),
                "count": pa.array([1, 2, 2**62, None], pa.int64()),
                "level": pa.array([2, 5, 5, None], pa.int64()),
                "vip": pa.array([True, False, True, None]),
            }
        )
        made.features.ingest("stats", data=made.put("rows", arrow(rows)).id)
        made.features.materialize("stats")
        made.features.training_set(
            "training",
            spine=made.put("spine", arrow(spine())).id,
            views=("stats",),
            request_features=COMPUTED,
        )
        blob = made.blobs.upload(iter([echo(folder / "echo.onnx")]))
        files: dict[str, Any] = {"files": (blob.id,), "paths": ("model.onnx",), "inputs": (SPEC,)}
        made.models.register("echo", training_set="dataset:training", **files)
        made.models.register("plain", **files)
        yield made


@pytest.fixture(scope="module")
def url(platform: OwnPlatform) -> Iterator[str]:
    with serving_platform(platform.parts) as found:
        yield found


@pytest.fixture
def http(platform: OwnPlatform, url: str) -> Iterator[httpx.Client]:
    token = platform.tokens.issue(purpose="test").secret
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S) as made:
        yield made


LOOKUP = Lookup(views=(ViewLookup(view="stats"),))


def deployed(
    platform: OwnPlatform, http: httpx.Client, name: str, lookup: Lookup, of: str = "echo@1"
) -> None:
    platform.endpoints.deploy(name, model=of, lookup=lookup)
    eventually(lambda: http.get(f"/v2/models/{name}/ready").status_code == 200)


def records() -> list[dict[str, Any]]:
    return [
        {**row, "event_time": row["event_time"].isoformat().replace("+00:00", "Z")}
        for row in spine().to_pylist()
    ]


def inputs() -> list[dict[str, Any]]:
    shape = [spine().num_rows]
    kinds = {"card": "INT64", "amount": "FP64", "event_time": "BYTES"}
    return [
        {"name": name, "shape": shape, "datatype": kind, "data": [row[name] for row in records()]}
        for name, kind in kinds.items()
    ]


def training_rows(platform: OwnPlatform) -> list[list[float]]:
    """Return the columns of the model in the training set, as floats; NaN where they are null."""
    rows = pa.Table.from_batches(list(platform.features.load("training"))).to_pylist()
    return [[math.nan if row[name] is None else float(row[name]) for name in COLUMNS] for row in rows]


def bits(rows: Any) -> list[bytes]:
    return [struct.pack(f"<{len(COLUMNS)}d", *map(float, row)) for row in rows]


def grouped(flat: list[Any]) -> list[list[float]]:
    values = [math.nan if value is None else float(value) for value in flat]
    return [values[at : at + len(COLUMNS)] for at in range(0, len(values), len(COLUMNS))]


@pytest.mark.slow
def test_every_protocol_answers_with_the_bits_of_the_training_set(
    platform: OwnPlatform, http: httpx.Client
) -> None:
    deployed(platform, http, "bits", LOOKUP)
    wanted = bits(training_rows(platform))

    by_json = http.post("/v2/models/bits/infer", json={"inputs": inputs()})
    by_records = http.post("/predict/bits", json={"records": records()})
    by_grpc = ask_by_grpc(platform, "bits")

    assert bits(grouped(json.loads(by_json.text)["outputs"][0]["data"])) == wanted
    assert by_records.status_code == 200, by_records.text
    assert bits(by_records_rows(json.loads(by_records.text))) == wanted
    assert bits(by_grpc.tolist()) == wanted
    described = {each["name"]: each["datatype"] for each in http.get("/v2/models/bits").json()["inputs"]}
    assert described == {"card": "INT64", "amount": "FP64", "event_time": "BYTES"}


def by_records_rows(answer: dict[str, Any]) -> list[list[float]]:
    rows = answer["predictions"]
    flat = [row["y"] if isinstance(row, dict) else row for row in rows]
    return [[math.nan if value is None else float(value) for value in row] for row in flat]


def ask_by_grpc(platform: OwnPlatform, name: str) -> Any:
    address, served = (platform.endpoints.show(name).grpc or "").split()
    token = platform.tokens.issue(purpose="test").secret
    rows = spine()
    arrays = {
        "card": rows["card"].to_numpy(),
        "amount": rows["amount"].to_numpy(),
        "event_time": np.array([row["event_time"].encode() for row in records()], np.object_),
    }
    given = []
    for key, kind in (("card", "INT64"), ("amount", "FP64"), ("event_time", "BYTES")):
        tensor = triton.InferInput(key, [rows.num_rows], kind)
        tensor.set_data_from_numpy(arrays[key])
        given.append(tensor)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer(served, given, headers={"authorization": f"Bearer {token}"})
        return answer.as_numpy("y")


@pytest.mark.slow
def test_computed_values_are_logged_like_other_inputs(platform: OwnPlatform, http: httpx.Client) -> None:
    deployed(platform, http, "logs", LOOKUP)
    body = {"inputs": inputs(), "parameters": {"falaj_logged": True}}

    answer = http.post("/v2/models/logs/infer", json=body).json()

    def logged() -> Any:
        try:
            return platform.endpoints.prediction(f"{answer['id']}.0")
        except NotFound:
            return None

    found = eventually(logged)
    assert found.inputs["ratio"] == 10.0 / 3.0
    assert found.inputs["last_digits"] == 2.0


@pytest.mark.slow
def test_typical_values_of_the_training_set_are_imputed_and_shown(
    platform: OwnPlatform, http: httpx.Client
) -> None:
    lookup = Lookup(views=LOOKUP.views, missing="impute", imputed={"stats__level": 4.0})
    deployed(platform, http, "typical", lookup)

    answer = json.loads(http.post("/v2/models/typical/infer", json={"inputs": inputs()}).text)
    own = platform.endpoints.show("typical").lookup.versions[0]  # type: ignore[union-attr]

    ratios = [10.0 / 3.0, 7.5 / 0.1, 1e-3 / 7.0]
    assert own.imputed["ratio"] == pytest.approx(sum(ratios) / 3)
    assert own.imputed["stats__vip"] == 1.0  # the most frequent
    assert "stats__level" not in own.imputed  # an explicit value wins
    assert own.source == "training set training"
    unknown = grouped(answer["outputs"][0]["data"])[4]
    assert unknown == [own.imputed["ratio"], 0.0, own.imputed["last_digits"], 4.0, 1.0, 3.0]
    kept = platform.endpoints.route("typical", routes=({"version": "1"},))  # type: ignore[arg-type]
    assert kept.lookup is not None
    assert kept.lookup.versions == (own,)


def test_a_version_without_a_training_set_gets_typical_values_of_the_view(platform: OwnPlatform) -> None:
    features = tuple(each for each in COMPUTED if each.name != "unused")
    lookup = Lookup(
        views=(ViewLookup(view="stats", missing="impute"),), request_features=features, missing=0.0
    )

    made = platform.endpoints.deploy("of-view", model="plain@1", lookup=lookup)

    assert made.lookup is not None
    (own,) = made.lookup.versions
    assert own.imputed == {"stats__level": 5.0, "stats__vip": 1.0}
    assert own.source == "view stats"


def test_a_deployment_that_can_impute_nothing_is_refused_with_the_fix(platform: OwnPlatform) -> None:
    empty = FeatureView(name="empty", entities=("card",), columns=VIEW.columns, event_time="at")
    platform.features.apply(views=(empty,))
    lookup = Lookup(views=(ViewLookup(view="empty", name="stats", missing="impute"),), missing=0.0)

    with pytest.raises(InvalidInput) as refused:
        platform.endpoints.deploy("nothing", model="plain@1", lookup=lookup)

    assert "deploy --impute stats__level=NUMBER" in {fault.fix for fault in refused.value.faults}


def test_another_expression_than_that_of_the_training_set_is_refused(platform: OwnPlatform) -> None:
    other = (RequestFeature(name="ratio", expression="amount / (stats__mean + 1)"),)

    with pytest.raises(InvalidInput) as refused:
        platform.endpoints.deploy(
            "skewed", model="echo@1", lookup=LOOKUP.model_copy(update={"request_features": other})
        )

    (fault,) = refused.value.faults
    assert "amount / stats__mean, as in the training set training" in str(fault.allowed)


def test_a_text_cannot_be_a_column_of_the_model(platform: OwnPlatform) -> None:
    wrong = (RequestFeature(name="ratio", expression="where(amount == 'many', 1, 2)"),)

    with pytest.raises(InvalidInput, match="does not fit the model"):
        platform.endpoints.deploy(
            "texts", model="plain@1", lookup=LOOKUP.model_copy(update={"request_features": wrong})
        )


def test_typical_values_are_not_for_who_may_not_read_the_training_set(platform: OwnPlatform) -> None:
    platform.workspaces.create("away")
    blob = platform.blobs.upload(iter([b"card,amount,event_time\n1,2,2026-06-01T12:00:00Z\n"]))
    platform.features.training_set("secret", spine=blob.id, views=("stats",))
    weights = platform.blobs.upload(iter([echo(platform.home.path / "echo.onnx")]), workspace="away")
    platform.models.register(
        "away",
        files=(weights.id,),
        paths=("model.onnx",),
        inputs=(SPEC,),
        workspace="away",
        training_set="default/dataset:secret",
    )
    user = platform.join("guest", Role.DEVELOPER, workspace="away")
    platform.features.apply(entities=(ENTITY,), views=(VIEW,), workspace="away")
    features = tuple(each for each in COMPUTED if each.name != "unused")
    plain = Lookup(views=LOOKUP.views, request_features=features, missing=0.0)

    with acting_as(user):
        platform.endpoints.deploy("away", model="away/away@1", lookup=plain, workspace="away")
        with pytest.raises((Denied, NotFound)):
            platform.endpoints.deploy(
                "away",
                model="away/away@1",
                lookup=plain.model_copy(update={"missing": "impute"}),
                workspace="away",
            )


# ------------------------------------------------------------------------------------ requests alone


class Rows:
    """Features by row number; the key of a row is its number."""

    def __init__(self, rows: pa.Table, features: tuple[str, ...]) -> None:
        self._features = features
        self._values = list(zip(*(rows[f"stats__{name}"].to_pylist() for name in features), strict=True))

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        rows = tuple(OnlineRow(key=key, event_time=NOON, values=self._values[int(key)]) for key in keys)
        return OnlineRows.model_construct(version=1, features=self._features, rows=rows, oldest=None)


def tensor(name: str, datatype: Datatype, values: Any) -> InputTensor:
    made = InputTensor(name=name, shape=[len(values)], datatype=datatype)
    made.data = memoryview(to_bytes(values, datatype))  # type: ignore[assignment]
    return made


PARITY = (
    RequestFeature(name="ratio", expression="amount / stats__mean"),
    RequestFeature(name="shift", expression="stats__large - code % 97"),
    RequestFeature(
        name="bent", expression="log1p(abs(amount)) * exp(min(stats__mean, 2)) - abs(amount) ** 0.3"
    ),
    RequestFeature(name="flag", expression="isnull(stats__large) or stats__large > code"),
)
COUNT = 100_003


def parity_rows() -> pa.Table:
    rng = np.random.default_rng(11)
    special = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324])
    amount, mean = rng.normal(0, 100, COUNT), rng.normal(0, 2, COUNT)
    amount[::7], mean[::11] = rng.choice(special, len(amount[::7])), rng.choice(special, len(mean[::11]))
    return pa.table(
        {
            "amount": amount,
            "code": rng.integers(-(2**63), 2**63 - 1, COUNT),
            "stats__mean": pa.array(mean, mask=rng.random(COUNT) < 0.1),
            "stats__large": pa.array(
                rng.integers(-(2**63), 2**63 - 1, COUNT), pa.int64(), mask=rng.random(COUNT) < 0.1
            ),
        }
    )


def test_a_hundred_thousand_requests_have_the_bits_of_the_training_set() -> None:
    rows = parity_rows()
    features = resolve_features(PARITY, column_types(rows), where="here")
    names = [each.name for each in features]
    offline = add_columns(rows, features).select(names)
    wanted = np.column_stack(
        [offline[name].cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy() for name in names]
    )
    view = ViewLookup(view="stats", name="stats", keys=("row",), features=("mean", "large"))
    lookup = Lookup(
        views=(view,),
        features=tuple(names),
        versions=(VersionLookup(version="1", request_features=features),),
    )
    join = build_join(lookup, (), version="1")
    target = Tensor(name="x", datatype=Datatype.FP64, shape=(-1, len(names)))
    reader, amount, code = Rows(rows, ("mean", "large")), rows["amount"].to_numpy(), rows["code"].to_numpy()

    found, at, number = [], 0, 0
    while at < COUNT:
        end = min(at + (1, 2, 7, 64, 1000, 20_000)[number % 6], COUNT)
        given = [
            tensor("row", Datatype.INT64, np.arange(at, end)),
            tensor("amount", Datatype.FP64, amount[at:end]),
            tensor("code", Datatype.INT64, code[at:end]),
        ]
        found.append(join_rows(given, join, target, reader).block)
        at, number = end, number + 1

    online = np.concatenate(found)
    assert online.shape == wanted.shape
    assert (online.view(np.int64) == wanted.view(np.int64)).all()


def lookup_of(*features: RequestFeature, **more: Any) -> Lookup:
    view = ViewLookup(view="stats", name="stats", keys=("row",), features=("mean", "large"))
    known = {"stats__mean": ColumnType.FLOAT, "stats__large": ColumnType.INTEGER}
    resolved = resolve_features(features, known, where="here", open_names=True)
    own = VersionLookup(version="1", request_features=resolved)
    return Lookup(views=(view,), features=tuple(each.name for each in features), versions=(own,), **more)


READER_ROWS = pa.table({"stats__mean": [2.0, None], "stats__large": [1, 2]})


def joined(lookup: Lookup, *given: InputTensor, kind: Datatype = Datatype.FP64) -> Any:
    join = build_join(lookup, (), version="1")
    target = Tensor(name="x", datatype=kind, shape=(-1, join.width))
    keys = tensor("row", Datatype.INT64, np.array([0, 1]))
    return join_rows([keys, *given], join, target, Rows(READER_ROWS, ("mean", "large")))


RATIO = RequestFeature(name="ratio", expression="amount / stats__mean")


def amounts(*values: float) -> InputTensor:
    return tensor("amount", Datatype.FP64, np.array(values))


def test_a_computed_feature_without_a_value_follows_the_rule_and_is_counted() -> None:
    plain = joined(lookup_of(RATIO), amounts(3.0, 3.0))
    default = joined(lookup_of(RATIO, defaults={"ratio": -1.0}), amounts(3.0, 3.0))
    with pytest.raises(InvalidInput) as refused:
        joined(lookup_of(RATIO, missing="reject"), amounts(3.0, math.nan))

    assert plain.block[0, 0] == 1.5
    assert math.isnan(plain.block[1, 0])
    assert default.block[:, 0].tolist() == [1.5, -1.0]
    assert default.missing["request", "not_computed"] == 1
    assert default.missing_rows == 1
    assert "row 1, feature stats__mean" in refused.value.faults[0].where


def test_an_integer_model_gets_exact_integers() -> None:
    whole = RequestFeature(name="next", expression="code + 1", inputs={"code": ColumnType.INTEGER})
    found = joined(
        lookup_of(whole), tensor("code", Datatype.INT64, np.array([LARGE, -1])), kind=Datatype.INT64
    )

    assert found.block[:, 0].tolist() == [LARGE + 1, 0]


@pytest.mark.parametrize(
    ("expression", "given", "words"),
    [
        ("hour(at)", tensor("at", Datatype.BYTES, np.array(["noon", "x"], np.object_)), "moments, like 2026"),
        ("where(ok, 1, 0)", tensor("ok", Datatype.FP64, np.array([0.5, 1.0])), "true or false"),
        ("where(ok, 1, 0)", tensor("ok", Datatype.INT64, np.array([2, 1])), "true or false"),
        ("amount", tensor("amount", Datatype.BYTES, np.array(["1", "2"], np.object_)), "numbers"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused_by_name(
    expression: str, given: InputTensor, words: str
) -> None:
    feature = RequestFeature(name="f", expression=expression)

    with pytest.raises(InvalidInput) as refused:
        joined(lookup_of(feature), given)

    assert words in f"{refused.value.faults}"
    assert given.name in refused.value.faults[0].where


def test_a_moment_is_read_as_in_a_training_set() -> None:
    feature = RequestFeature(name="f", expression="hour(at) * 10 + weekday(at)")
    texts = np.array(["2026-11-17T02:15:00.1234567+04:00", "2026-11-17"], np.object_)
    by_text = joined(lookup_of(feature), tensor("at", Datatype.BYTES, texts)).block[:, 0].tolist()
    by_number = (
        joined(lookup_of(feature), tensor("at", Datatype.INT64, np.array([0, -1]))).block[:, 0].tolist()
    )

    assert by_text == [220.0, 1.0]
    assert by_number == [3.0, 232.0]


def test_a_view_whose_features_are_only_computed_with_belongs_to_the_lookup() -> None:
    lookup = lookup_of(RATIO)
    version = ModelVersion.model_construct(name="m", number=1, inputs=(), reference="m@1")
    join = build_join(lookup, (), version=str(version.number))

    assert join.columns == ("ratio", "stats__mean")
    assert (join.width, join.inputs) == (1, ("row", "amount"))
