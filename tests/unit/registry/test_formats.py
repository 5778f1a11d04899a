"""File formats are recognized by content; pickles are rejected in every disguise."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_files as files
from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat
from falaj.registry.file_formats.pickles.headers import is_pickle
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.formats import model_format, recognize

CODE = b"cos\nsystem\n(S'true'\ntR."


class Bomb:
    def __reduce__(self):
        return os.system, ("true",)


def reader(data: bytes) -> RangeReader:
    return RangeReader("model.bin", len(data), lambda offset, length: data[offset : offset + length])


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidInput) as refused:
        recognize(reader(data))
    (fault,) = refused.value.faults
    assert fault.where == "model.bin"
    return f"{fault.given} / {fault.fix}"


# -------------------------------------------------------------------------------------------- recognized


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (files.onnx(), FileFormat.ONNX),
        (files.onnx(graph=files.field(5, files.field(9, bytes(100)))), FileFormat.ONNX),
        (files.safetensors(), FileFormat.SAFETENSORS),
        (files.safetensors(b'{"__metadata__":{"a":"1"}}   ', b""), FileFormat.SAFETENSORS),
        (files.litert(), FileFormat.LITERT),
        (files.lightgbm(), FileFormat.LIGHTGBM),
        (files.xgboost_json(), FileFormat.XGBOOST),
        (files.xgboost_ubj(), FileFormat.XGBOOST),
        (files.catboost(), FileFormat.CATBOOST),
        (files.torch_export(), FileFormat.TORCH_EXPORT),
        (files.array(), FileFormat.NUMPY),
        (files.array("'|S10'", version=2, data=bytes(10)), FileFormat.NUMPY),
        (files.archive({"a.npy": files.array(), "b.npy": files.array()}), FileFormat.NUMPY),
        (b"ARROW1\0\0" + bytes(20) + b"ARROW1", FileFormat.ARROW),
        (b"PAR1" + bytes(20) + b"PAR1", FileFormat.PARQUET),
        (b' {"labels": ["late", "on time"]}', FileFormat.JSON),
        ("عربي: تأخر\nN. Y.\n".encode(), FileFormat.TEXT),
        (b"", FileFormat.TEXT),
        (b"hello.", FileFormat.TEXT),
        (b"N. Y. is a name\n" * 10_000, FileFormat.TEXT),
    ],
    ids=lambda value: value.value if isinstance(value, FileFormat) else "",
)
def test_a_file_is_recognized_by_its_content(data: bytes, found: FileFormat) -> None:
    assert recognize(reader(data)) is found


def test_weights_that_begin_like_a_pickle_by_chance_are_weights() -> None:
    chance = b"\x80\x04\xff\xff" + bytes(60)

    assert recognize(reader(files.torch_export(data__weights__weight_1=chance))) is FileFormat.TORCH_EXPORT


def test_little_of_a_large_file_is_read() -> None:
    data = files.onnx(files.field(5, files.field(9, bytes(32 << 20))))
    read = []

    def read_range(offset: int, length: int) -> bytes:
        read.append(length)
        return data[offset : offset + length]

    assert recognize(RangeReader("m", len(data), read_range)) is FileFormat.ONNX
    assert sum(read) < 256 << 10


def test_a_version_has_one_model_format() -> None:
    assert model_format([FileFormat.ONNX, FileFormat.JSON, FileFormat.ONNX]) is FileFormat.ONNX
    for wrong in ([FileFormat.JSON], [FileFormat.ONNX, FileFormat.SAFETENSORS]):
        with pytest.raises(InvalidInput, match="one model format"):
            model_format(wrong)


# ----------------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value", [Bomb(), {"w": [1.5, "x"]}, list(range(50_000))], ids=["bomb", "data", "large"]
)
def test_every_protocol_is_refused(protocol: int, value: object) -> None:
    refusal(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cos\nsystem\n(S'true'\ntR. and then some text",
        b"(S'true'\nios\nsystem\n.",
        b"I1\nI2\ncos\nsystem\n(S'true'\ntR.",  # leaves more than one value, which an unpickler accepts
        b"(dp0\nS'a'\np1\nI1\ns.",
        b"I0x10\n0" + CODE,  # unpicklers know hexadecimal numbers
        b"N. \n" + CODE,  # a second call of an unpickler
    ],
)
def test_a_pickle_that_is_plain_text_is_refused(code: bytes) -> None:
    assert "a pickle" in refusal(code)


@pytest.mark.parametrize(
    "disguise",
    [
        b"S'" + b"x" * 70_000 + b"'\n0",
        b"V" + b"a long first line " * 10_000 + b"\n0",
        b"N0" * 40_000,
        b"CBM1" + b"x" * 64 + b"0",
        b"U\x06xxTFL3" + b"0",
    ],
    ids=["behind a text", "behind a line", "behind nothing", "as CatBoost", "as LiteRT"],
)
def test_a_pickle_behind_anything_is_refused(disguise: bytes) -> None:
    """Each of these ran its code in an unpickler."""
    ran: list[str] = []

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return lambda *given: ran.append(f"{module}.{name}")

    Recording(io.BytesIO(disguise + CODE)).load()

    assert ran == ["os.system"]
    assert "a pickle" in refusal(disguise + CODE)
    assert "a.bin" in refusal(files.archive({"a.bin": disguise + CODE}, compression=zipfile.ZIP_DEFLATED))


HOLE = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}'
OVERLAP = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (HOLE, "hole"),
        (OVERLAP, "overlap"),
        (TWICE, "twice"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "shape says"),
        (b'{"a":{"dtype":"O","shape":[1],"data_offsets":[0,4]}}', "unknown dtype"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "unknown dtype, shape"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "2 bytes in 4 bytes"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}', "not a tensor"),
        (b'{"__metadata__":{"a":1}}', "not text"),
        (b'{"a":' + b"[" * 5000, "unsound"),
    ],
)
def test_safetensors_fill_their_data_once(header: bytes, says: str) -> None:
    assert says in refusal(files.safetensors(header))


EXTERNAL = files.external_tensor(b"../../etc/passwd")


@pytest.mark.parametrize(
    "model",
    [
        files.onnx(files.field(5, EXTERNAL)),
        files.onnx(files.field(15, files.field(1, EXTERNAL))),
        files.onnx(files.field(1, files.field(5, files.field(5, EXTERNAL)))),
        files.onnx(files.field(1, files.field(5, files.field(6, files.field(5, EXTERNAL))))),
        files.onnx(more=files.field(25, files.field(7, files.field(5, files.field(10, EXTERNAL))))),
        files.onnx(more=files.field(20, files.field(2, files.field(5, EXTERNAL)))),
        files.onnx(files.field(5, files.field(8, b"w") + b"\x70\x01")),
        files.onnx(files.field(5, files.field(8, b"w") + b"\x70\x81\x80\x80\x80\x10")),
    ],
    ids=[
        *("initializer", "sparse", "attribute", "subgraph", "function", "training", "without a path"),
        "a large number",
    ],
)
def test_an_onnx_model_names_no_other_files(model: bytes) -> None:
    assert "from other files" in refusal(model)


def test_no_tag_of_an_onnx_model_exceeds_what_its_readers_keep_of_it(tmp_path: Path) -> None:
    """They drop the upper bits of a tag: what is written as an unknown field is that of external data for them."""
    onnxruntime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    model = onnx.ModelProto(ir_version=8, opset_import=[onnx.OperatorSetIdProto(version=17)])
    model.graph.node.add(op_type="Add", input=["x", "w"], output=["y"])
    for value in (model.graph.input.add(name="x"), model.graph.output.add(name="y")):
        value.type.tensor_type.elem_type = 1
        value.type.tensor_type.shape.dim.add(dim_value=1)
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=1)
    tensor.external_data.add(key="location", value="weights.bin")
    content = tensor.SerializeToString()
    hidden = content.replace(b"\x6a", b"\xea\x80\x80\x80\x10").replace(
        b"\x70\x01", b"\xf0\x80\x80\x80\x10\x01"
    )
    data = model.SerializeToString() + files.field(7, files.field(5, hidden))
    (tmp_path / "weights.bin").write_bytes(np.float32(42).tobytes())
    (tmp_path / "m.onnx").write_bytes(data)

    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])

    assert session.run(None, {"x": np.zeros(1, np.float32)})[0] == [42]
    assert "unknown format" in refusal(data)


def test_an_onnx_model_is_none_of_the_other_format_of_its_runtime() -> None:
    assert "unknown format" in refusal(b"\x08\x08\x12\x04ORTM" + files.onnx())


def test_onnx_models_of_its_library_are_recognized() -> None:
    onnx = pytest.importorskip("onnx")
    weights = onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, 1, [None, 3]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", [values[0]], [values[1]], [weights])
    model = onnx.helper.make_model(graph)

    assert recognize(reader(model.SerializeToString())) is FileFormat.ONNX
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location="weights.bin")
    assert "from other files" in refusal(model.SerializeToString())


@pytest.mark.parametrize("kind", ["?", "i1", "<u8", ">f4", "f8", "c16", "S3", "U4", "M8[us]", "m8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_that_numpy_writes_are_recognized(kind: str, shape: tuple[int, ...]) -> None:
    written, many = io.BytesIO(), io.BytesIO()
    array = np.zeros(shape, kind)
    np.save(written, array)
    np.savez_compressed(many, first=array, second=array)

    assert recognize(reader(written.getvalue())) is FileFormat.NUMPY
    assert recognize(reader(many.getvalue())) is FileFormat.NUMPY


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (files.archive({"m/data.pkl": pickle.dumps(Bomb()), "m/data/0": bytes(8)}), "data.pkl"),
        (files.archive({"weights.bin": pickle.dumps(Bomb())}), "weights.bin"),
        (files.archive({"weights.bin": pickle.dumps(Bomb(), protocol=0)}), "weights.bin"),
        (files.archive({"weights.bin": pickle.dumps(list(range(9999)))}), "weights.bin"),
        (
            files.archive({"w.bin": pickle.dumps({"w": "x" * 99})}, compression=zipfile.ZIP_DEFLATED),
            "w.bin",
        ),
        (files.archive({"data.pkl": b"renamed or not"}), "data.pkl"),
        (files.archive({"inner.pt": files.archive({"data.pkl": pickle.dumps(1)})}), "inner.pt"),
        (
            files.torch_export(data__sample_inputs__model__pt=files.archive({"data.pkl": pickle.dumps(1)})),
            "_example_inputs = None",
        ),
        (
            files.torch_export(**{"data__weights__model_weights_config.json": files.PICKLED_WEIGHTS}),
            "pickled weights",
        ),
        (files.torch_export(data__aotinductor__model__so=b"\x7fELF"), "machine code"),
        (files.array("'|O'"), "Python objects"),
        (files.array("[('a', '|O')]"), "Python objects"),
        (files.array("'|O'", version=2), "Python objects"),
        (files.archive({"a.npy": files.array("'|O'")}), "a.npy"),
        (zlib.compress(pickle.dumps(Bomb())), "a pickle"),
        (b"ZF0x1f" + bytes([0x8F]) * 30, "joblib"),
        (b"\x1f\x8b\x08" + bytes(30), "gzip"),
        (b"\x89HDF\r\n\x1a\n" + bytes(30), "unknown format"),
    ],
)
def test_a_disguised_pickle_is_refused_with_its_location_and_a_fix(data: bytes, message: str) -> None:
    assert message in refusal(data)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_format_or_a_typed_refusal(data: bytes) -> None:
    for disguised in (data, files.archive({"a": b""})[:30] + data, b"\x08" + data, b"\x93NUMPY" + data):
        try:
            recognize(reader(disguised))
        except InvalidInput:
            continue


SIMPLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@settings(max_examples=30)
@given(SIMPLE, st.integers(0, pickle.HIGHEST_PROTOCOL), st.integers(0, 100))
def test_no_pickle_goes_unnoticed_first_or_behind_others(value: object, protocol: int, behind: int) -> None:
    data = pickle.dumps((os.system, value), protocol=protocol)

    assert is_pickle(data)
    assert is_pickle(b"N." * behind + data)


# ----------------------------------------------------------------------------------------------- hostile


def bomb_archive() -> bytes:
    return files.archive({"m/weights": bytes(64 << 20)}, compression=zipfile.ZIP_DEFLATED)


def twins() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("a.npy", files.array())
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a.npy", files.array())
    return data.getvalue()


def encrypted() -> bytes:
    data = bytearray(files.archive({"a.npy": files.array()}))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def linked() -> bytes:
    data, link = io.BytesIO(), zipfile.ZipInfo("a.npy")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(data, "w") as file:
        file.writestr(link, "/etc/passwd")
    return data.getvalue()


def overlapping() -> bytes:
    """The first member claims the bytes of the second, too."""
    data = bytearray(files.archive({"a.npy": files.array(), "b.npy": files.array()}))
    entry = data.index(b"PK\x01\x02")
    size = int.from_bytes(data[entry + 20 : entry + 24], "little") + 8
    data[entry + 20 : entry + 28] = size.to_bytes(4, "little") * 2
    return bytes(data)


def described_twice() -> bytes:
    """Stored by the directory, deflated by the member's own header, which some readers believe."""
    data = bytearray(files.archive({"a.npy": files.array()}))
    data[8] = zipfile.ZIP_DEFLATED
    return bytes(data)


TWICE_PICKLED = '{"config": {"w": {"path_name": "weight_0", "use_pickle": true, "use_pickle": false}}}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bomb_archive(), "no torch export"),
        (files.torch_export()[:-10], "truncated"),
        (files.torch_export() + b"tail", "truncated"),
        (files.torch_export()[:40] + files.torch_export()[60:], "data outside"),
        (files.torch_export()[:32] + b"?" + files.torch_export()[33:], "damaged"),
        (b"PK\x03\x04", "truncated"),
        (encrypted(), "encrypted"),
        (files.archive({"a.npy": files.array()}, compression=zipfile.ZIP_LZMA), "compression"),
        (files.archive({f"{n}": b"" for n in range(10_001)}), "10001 members"),
        (b"\xff\xff\xff\x7f\0\0\0\0{" + bytes(20), "header of 2147483647"),
        (b"\xff\xff\0\0\0\0\0\0{" + bytes(20), "truncated"),
        (files.onnx()[:-1], "unknown format"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "unknown format"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "unknown format"),
        (files.torch_export(**{"data__weights__model_weights_config.json": "[" * 50_000}), "list of weights"),
        (files.array("'<f4'" + " " * 4000), "too long"),
        (files.array(data=bytes(5)), "more or fewer bytes"),
        (
            files.array(header="{'descr': '<f4', 'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
            "not the one",
        ),
        (
            files.array(header="{'descr': '<f4', **{'descr': '|O'}, 'fortran_order': 0, 'shape': ()}"),
            "not the one",
        ),
        (files.array(header="{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "not the one"),
        (files.array(header="(" * 2900), "not the one"),
        (files.array(header="-" * 2900 + "1"), "not the one"),
        (
            files.array(header="{'descr': __import__('os'), 'fortran_order': False, 'shape': ()}"),
            "not the one",
        ),
        (files.archive({"a.npy": files.array(), "A.NPY": files.array()}), "differ in case"),
        (files.archive({"/etc/a.npy": files.array()}), "leads out"),
        (files.archive({"../a.npy": files.array()}), "leads out"),
        (files.archive({"C:a.npy": files.array()}), "leads out"),
        (files.archive({"folder/": b"", "a.npy": files.array()}), "link or folder"),
        (linked(), "link or folder"),
        (overlapping(), "overlap"),
        (described_twice(), "two ways"),
        (files.torch_export(**{"data__tools__install.py": b"print(1)"}), "not known"),
        (
            files.torch_export(**{"data__weights__model_weights_config.json": TWICE_PICKLED}),
            "list of weights",
        ),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "JSON that cannot be read"),
        (b"some text and then \xff", "unknown format"),
        (b"fine\n" * 20_000 + b"\x00 not", "unknown format"),
        (b"CBM1\xff\xff\xff\xff", "truncated"),
        (b"PAR1" + bytes(20), "unknown format"),
    ],
)
def test_hostile_files_give_typed_errors(data: bytes, message: str) -> None:
    assert message in refusal(data)


def test_an_archive_with_two_members_of_one_name_is_refused() -> None:
    assert "duplicate member names" in refusal(twins())
