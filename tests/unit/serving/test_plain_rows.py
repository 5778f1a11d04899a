"""Plain rows: the V1 protocol, and JSON records, CSV and Arrow to /predict, with good and bad input."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from falaj.apps.model_server.inference.plain_rows.formats import (
    MAX_ROWS,
    RowFormat,
    accepted_format,
    read_csv,
    read_json,
    write_csv,
    write_json,
)
from falaj.apps.model_server.inference.plain_rows.rows import RowSchema, build_request
from falaj.apps.model_server.limits import ServerLimits
from falaj.errors import InvalidInput, TooLarge
from falaj.governance import arrow_ipc
from falaj.records.features import OnlineRow, OnlineRows
from falaj.records.serving.endpoints import Deployment
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from model_servers import (
    RawClient,
    RunningServer,
    deployment,
    model,
    outer_sum,
    request,
    save,
    serving,
    tabular,
)

ARROW, CSV = "application/vnd.apache.arrow.stream", "text/csv"


class Riders:
    """Trips of riders by their number."""

    def read(self, view: str, keys: list[str]) -> OnlineRows:
        rows = (OnlineRow(key=key, event_time=None, values=(float(key),)) for key in keys)
        return OnlineRows(version=1, features=("trips",), rows=tuple(rows))


def weighted(path: Path) -> Path:
    """Write a model that returns a + 10 b + 100 c of its columns."""
    return save(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
        {"w": np.array([[1], [10], [100]], np.float32)},
    )


def echo(path: Path, kind: int, width: int) -> Path:
    made = model(
        [helper.make_node("Identity", ["x"], ["y"])], {"x": ["n", width]}, {"y": ["n", width]}, kind=kind
    )
    onnx.save(made, path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    onnx.save(outer_sum(), folder / "sum.onnx")
    made = deployment(
        ("m", "1", weighted(folder / "m.onnx")),
        ("nameless", "1", weighted(folder / "n.onnx")),
        ("t", "1", tabular(folder / "t.onnx")),
        ("wide", "1", echo(folder / "wide.onnx", TensorProto.FLOAT, 3)),
        ("texts", "1", echo(folder / "texts.onnx", TensorProto.STRING, 2)),
        ("small", "1", echo(folder / "small.onnx", TensorProto.INT8, 2)),
        ("sum", "1", folder / "sum.onnx"),
        ("looked", "1", weighted(folder / "l.onnx")),
        ("forbidden", "1", weighted(folder / "f.onnx")),
    )
    named = [
        file.model_copy(update={"features": ("a", "b", "c")}) if file.model in ("m", "looked") else file
        for file in made.models
    ]
    riders = ViewLookup(view="riders", name="r", keys=("rider",), features=("trips",))
    lookup = Lookup(views=(riders,), features=("r__trips", "b", "c"))
    endpoints = [
        each.model_copy(update={"lookup": lookup}) if each.name == "looked" else each
        for each in made.endpoints
    ]
    with serving(
        Deployment(models=tuple(named), endpoints=tuple(endpoints)),
        features=Riders(),
        limits=ServerLimits(body_bytes=2_000_000),
        read_arrow=lambda content, owner: arrow_ipc.read_table(content, where="body", limit_bytes=2**20),
    ) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


def ask(client: RawClient, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Return the status and the answer, parsed if it is JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, found, answer = client.ask(request(path=path, body=content, **headers))
    return status, json.loads(answer) if found["content-type"] == "application/json" else answer


def stream(**columns: Any) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


# ------------------------------------------------------------------------------------------------- V1


def test_instances_are_rows_or_named_columns(client: RawClient) -> None:
    path = "/v1/models/m:predict"

    assert ask(client, path, {"instances": [[1, 2, 3], [4, 5, 6]]}) == (
        200,
        {"predictions": [[321.0], [654.0]]},
    )
    assert ask(client, path, {"instances": [{"c": 3, "a": 1, "b": 2}]}) == (200, {"predictions": [[321.0]]})
    assert ask(client, "/v1/models/m%3Apredict", {"instances": [[1, 2, 3]]})[0] == 200
    assert ask(client, "/v1/models/m/versions/1:predict", {"instances": [[1, 2, 3]]})[0] == 200


def test_several_outputs_are_named(client: RawClient) -> None:
    rows = {"instances": [{"amount": 1, "category": 0}, {"amount": 7.5, "category": 4}]}

    assert ask(client, "/v1/models/t:predict", rows) == (
        200,
        {"predictions": [{"score": 2.0, "high": False}, {"score": 19.0, "high": True}]},
    )


def test_models_are_listed_for_those_who_may_call_them(client: RawClient) -> None:
    listed = json.loads(client.ask(request("GET", "/v1/models"))[2])["models"]

    assert {"m", "t", "looked"} <= set(listed)
    assert "forbidden" not in listed
    assert json.loads(client.ask(request("GET", "/v1/models/m"))[2]) == {"name": "m", "ready": True}
    for path in ("/v1/models/forbidden", "/v1/models/nothing", "/v1/models/m/versions/9"):
        assert client.ask(request("GET", path))[0] == 404
    status, answer = ask(client, "/v1/models/nothing:predict", {"instances": [1]})
    assert (status, "no endpoint 'nothing' that you may call" in answer["error"]) == (404, True)
    assert client.ask(request("GET", "/v1/models/m:predict"))[0] == 405


# --------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("path", ["/predict/m", "/predict?endpoint=m", "/predict/m/versions/1"])
def test_records_get_records(client: RawClient, path: str) -> None:
    rows = [{"a": 1, "b": 2, "c": 3}, {"c": 6, "b": 5, "a": 4}]

    status, answer = ask(client, path, rows)

    assert (status, answer["predictions"]) == (200, [{"y": 321.0}, {"y": 654.0}])
    assert (answer["model_name"], answer["model_version"]) == ("m", "1")
    assert ask(client, path, {"records": rows, "id": "mine"})[1]["id"] == "mine"
    assert ask(client, path, {"a": 1, "b": 2, "c": 3})[1]["predictions"] == [{"y": 321.0}]


def test_null_and_nan_are_missing_numbers(client: RawClient) -> None:
    status, _, answer = client.ask(request(path="/predict/wide", body=b'[{"a":null,"b":NaN,"c":-Infinity}]'))

    assert (status, b'"predictions":[{"y":[NaN,NaN,-Infinity]}]' in answer) == (200, True), answer


def test_columns_without_names_go_by_their_order(client: RawClient) -> None:
    assert ask(client, "/predict/nameless", [{"x1": 1, "x2": 2, "x3": 3}])[1]["predictions"] == [{"y": 321.0}]
    assert ask(client, "/predict/m", [[1, 2, 3]])[1]["predictions"] == [{"y": 321.0}]


def test_keys_are_looked_up(client: RawClient) -> None:
    rows = [{"rider": 7, "b": 2, "c": 3}]

    assert ask(client, "/predict/looked", rows)[0] == 200
    assert ask(client, "/predict/looked", b"rider,b,c\n7,2,3\n", Content_Type=CSV)[0] == 200
    assert ask(client, "/predict/looked", stream(rider=[7], b=[2.0], c=[3.0]), Content_Type=ARROW)[0] == 200
    status, answer = ask(client, "/predict/looked", [{"rider": 7.5, "b": 2, "c": 3}])
    assert (status, "column 'rider'" in answer["error"]) == (400, True)


def test_texts_and_whole_numbers(client: RawClient) -> None:
    assert ask(client, "/predict/texts", [["a", "ü"]])[1]["predictions"] == [{"y": ["a", "ü"]}]
    assert ask(client, "/predict/small", [[1, -128]])[1]["predictions"] == [{"y": [1, -128]}]


def test_no_rows_get_no_rows(client: RawClient) -> None:
    empty = pa.array([], pa.float64())

    assert ask(client, "/predict/m", b"a,b,c\n", Content_Type=CSV) == (200, b"y\n")
    assert ask(client, "/predict/m", stream(a=empty, b=empty, c=empty), Content_Type=ARROW)[0] == 200


@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        ("m", {"a": [1], "b": [1], "c": ["x"]}, "column 'c'"),
        ("m", {"a": [1], "b": [1], "c": pa.array([1e300])}, "column 'c': given a number that FP32"),
        ("m", {"a": [1], "b": [1], "c": [[1.0]]}, "column 'c': given lists"),
        ("t", {"amount": [1.0], "category": [1.5]}, "column 'category': given a column of float64"),
        ("t", {"amount": [1.0], "category": pa.array([2**63], pa.uint64())}, "cannot hold"),
        ("texts", {"x": [["a", "b", "c"]]}, "given shape [1, 3]"),
    ],
)
def test_arrow_columns_of_other_types_are_refused(
    client: RawClient, name: str, columns: Any, words: str
) -> None:
    status, answer = ask(client, f"/predict/{name}", stream(**columns), Content_Type=ARROW)

    assert (status, words in answer["error"]) == (400, True), answer


def test_arrow_texts_and_lists(client: RawClient) -> None:
    status, answer = ask(
        client, "/predict/texts", stream(x=[["a", "b"]]), Content_Type=ARROW, Accept="application/json"
    )
    many = stream(x=pa.array([["a"] * 600_000]))

    assert (status, answer["predictions"]) == (200, [{"y": ["a", "b"]}])
    assert ask(client, "/predict/texts", many, Content_Type=ARROW)[0] in (400, 413)


# ------------------------------------------------------------------------------------- CSV and Arrow


def test_csv_gets_csv(client: RawClient) -> None:
    sent = b"\xef\xbb\xbfb,a,c\r\n2,1,3\r\n5,4,\r\n"

    status, answer = ask(client, "/predict/m", sent, Content_Type="text/csv; charset=utf-8")

    assert status == 200
    assert pd.read_csv(io.BytesIO(answer))["y"].tolist()[0] == 321.0
    assert answer == b"y\n321.0\nnan\n"


def test_csv_without_a_header_goes_by_order(client: RawClient) -> None:
    sent = {"body": b"1,2,3\n4,5,6\n", "Content_Type": "text/csv; header=absent"}

    assert ask(client, "/predict/m", **sent) == (200, b"y\n321.0\n654.0\n")


def test_a_row_of_several_values_becomes_columns(client: RawClient) -> None:
    assert ask(client, "/predict/wide", b"a,b,c\n1,2,3\n", Content_Type=CSV) == (
        200,
        b"y_0,y_1,y_2\n1.0,2.0,3.0\n",
    )


def test_arrow_gets_arrow(client: RawClient) -> None:
    sent = stream(b=[2, 5], a=[1.0, None], c=pa.array([3, 6], pa.int8()))

    status, answer = ask(client, "/predict/m", sent, Content_Type=ARROW)

    table = pa.ipc.open_stream(answer).read_all()
    assert (status, table.column_names) == (200, ["y"])
    assert table["y"][0].as_py() == 321.0
    assert np.isnan(table["y"][1].as_py())


def test_the_caller_chooses_the_format_of_the_answer(client: RawClient) -> None:
    rows = [{"a": 1, "b": 2, "c": 3}]

    assert ask(client, "/predict/m", rows, Accept=CSV) == (200, b"y\n321.0\n")
    arrow = ask(client, "/predict/wide", rows, Accept=f"{ARROW};q=0.9")[1]
    assert pa.ipc.open_stream(arrow).read_all().to_pylist() == [{"y": [1.0, 2.0, 3.0]}]
    assert ask(client, "/predict/m", b"a,b,c\n1,2,3\n", Content_Type=CSV, Accept="application/json")[1][
        "predictions"
    ] == [{"y": 321.0}]
    assert ask(client, "/predict/m", rows, Accept="image/png")[0] == 406
    assert ask(client, "/predict/m", rows, Content_Type="image/png")[0] == 415
    assert ask(client, "/predict/m", rows, Content_Type="application/x-www-form-urlencoded")[0] == 200


# ------------------------------------------------------------------------------------------ bad input


BAD_JSON: list[tuple[str, Any, str]] = [
    ("m", b"", "not JSON"),
    ("m", b"\xff", "not JSON"),
    ("m", b"[" * 1000, "not JSON"),
    ("m", 3, "not a list of rows"),
    ("m", [{"a": 1, "b": 2}], "column 'c': given nothing"),
    ("m", [{"a": 1, "b": 2, "c": 3, "d": 4}], "column 'd': given an unknown name"),
    ("m", [{"a": "1", "b": 2, "c": 3}], "column 'a': given 1 (str), allowed numbers"),
    ("m", [{"a": True, "b": 2, "c": 3}], "column 'a': given True (bool)"),
    ("m", [{"a": [1], "b": 2, "c": 3}], "column 'a'"),
    ("m", [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}], "row 1: its columns differ"),
    ("m", [{"a": 1, "b": 2, "c": 3}, [1, 2, 3]], "objects and other values"),
    ("m", [[1, 2]], "given shape [1, 2]"),
    ("m", [[1, 2, 3], [1, 2]], "lists of different lengths"),
    ("m", [[1, 2, [3]]], "rows"),
    ("m", [[1e300, 2, 3]], "rows"),
    ("m", {"records": 3}, "not a list of rows"),
    ("m", {"records": [], "id": 3}, "id: given 3"),
    ("nameless", [{"a": 1, "b": 2}], "columns: given 2, allowed 3"),
    ("t", [[1, 2]], "values without names"),
    ("t", [{"amount": 1, "category": 1.5}], "whole numbers"),
    ("t", [{"amount": 1, "category": None}], "whole numbers"),
    ("small", [[1, 200]], "rows"),
    ("small", [[1, 2**70]], "rows"),
    ("texts", [[1, 2]], "allowed texts"),
    ("sum", [[1.0], [2.0]], "ask by the V2 protocol"),
]


@pytest.mark.parametrize(("name", "body", "words"), BAD_JSON)
def test_bad_records_are_explained(client: RawClient, name: str, body: Any, words: str) -> None:
    status, answer = ask(client, f"/predict/{name}", body)

    assert (status, words in answer["error"]) == (400, True), answer
    assert ask(client, "/predict/m", [[1, 2, 3]])[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body has no line"),
        (b"a,b,c\n1,2\n", "line 2: given 2 values, allowed 3"),
        (b"a,a,c\n1,2,3\n", "names a column twice"),
        (b"a,b,c\n1,x,3\n", "column 'b'"),
        (b"a,b,c\n1,1_0,3\n", "column 'b': given 1_0"),
        (b"a,b\n1,2\n", "column 'c': given nothing"),
        (b"a,b,c\n1,\xff,3\n", "not UTF-8"),
        (b'a,b,c\n1,"2,3\n', "not CSV"),
        (b"a,b,c\n1," + b"9" * 200_000 + b",3\n", "not CSV"),
        (b"a,b,c\n1," + b"9" * 1000 + b",3\n", "column 'b'"),
    ],
)
def test_bad_csv_is_explained(client: RawClient, body: bytes, words: str) -> None:
    status, answer = ask(client, "/predict/m", body, Content_Type=CSV)

    assert (status, words in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("cut", [0, 1, 8, 60, 200])
def test_cut_arrow_is_refused(client: RawClient, cut: int) -> None:
    sent = stream(a=[1.0], b=[2.0], c=[3.0])[:cut]

    assert ask(client, "/predict/m", sent, Content_Type=ARROW)[0] == 400


def test_many_rows_are_refused_before_they_are_made(client: RawClient) -> None:
    rows = b"[" + b",".join([b"[]"] * (MAX_ROWS * 3)) + b"]"
    lines = b"a,b,c\n" + b"1,2,3\n" * (MAX_ROWS + 1)

    assert ask(client, "/predict/m", rows)[0] == 413
    assert ask(client, "/predict/m", lines, Content_Type=CSV)[0] == 400


# ----------------------------------------------------------------------------------------------- fuzz


SCHEMA = RowSchema(
    ServedModel(
        name="m",
        version="1",
        platform="onnx",
        inputs=(Tensor(name="x", datatype=Datatype.FP32, shape=(DYNAMIC, 2)),),
        outputs=(Tensor(name="y", datatype=Datatype.FP32, shape=(DYNAMIC, 1)),),
    ),
    features=("a", "b"),
)
cells = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
rows_of_any_kind = st.lists(
    st.lists(cells, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), cells) | cells, max_size=5
)


@given(rows_of_any_kind | st.dictionaries(st.text(max_size=5), cells))
def test_any_json_is_rows_or_refused(body: Any) -> None:
    with suppress(InvalidInput):
        rows, _ = read_json(json.dumps(body).encode(), key="records")
        built = build_request(rows, SCHEMA)
        assert all(len(tensor.shape) >= 1 for tensor in built.inputs)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_rows_or_refused(body: bytes, has_header: bool) -> None:
    with suppress(InvalidInput, TooLarge):
        build_request(read_json(body, key="records")[0], SCHEMA)
    with suppress(InvalidInput, TooLarge):
        build_request(read_csv(body, has_header=has_header), SCHEMA)


@given(st.text(alphabet='ab,"\n\r0.5e- ', max_size=80), st.booleans())
def test_any_csv_is_rows_or_refused(text: str, has_header: bool) -> None:
    with suppress(InvalidInput):
        build_request(read_csv(text.encode(), has_header=has_header), SCHEMA)


@given(st.lists(st.floats(width=32), max_size=8))
def test_what_is_written_can_be_read(values: list[float]) -> None:
    array = np.array(values, np.float32).reshape(-1, 1)

    records = json.loads(write_json({"y": array}, facts={"id": "1"}, notes=b""))["predictions"]
    lines = write_csv({"y": array}).decode().splitlines()[1:]

    np.testing.assert_array_equal(np.array([r["y"] for r in records], np.float32), array.ravel())
    np.testing.assert_array_equal(np.array(lines, np.float32), array.ravel())


@given(st.binary(max_size=60))
def test_any_accept_header_is_understood(header: bytes) -> None:
    with suppress(InvalidInput):
        assert accepted_format(header, RowFormat.CSV) in RowFormat
