"""File formats are recognized by content; pickles are rejected in every disguise."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_files as files
from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat
from falaj.registry.formats import model_format, recognize
from falaj.registry.pickles import is_pickle
from falaj.registry.range_reader import RangeReader


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
        (files.onnx(graph=bytes(100)), FileFormat.ONNX),
        (files.safetensors(), FileFormat.SAFETENSORS),
        (files.safetensors(b'{"a":1}   '), FileFormat.SAFETENSORS),
        (files.litert(), FileFormat.LITERT),
        (files.lightgbm(), FileFormat.LIGHTGBM),
        (files.xgboost_json(), FileFormat.XGBOOST),
        (files.xgboost_ubj(), FileFormat.XGBOOST),
        (b"CBM1" + bytes(20), FileFormat.CATBOOST),
        (files.torch_export(), FileFormat.TORCH_EXPORT),
        (files.array(), FileFormat.NUMPY),
        (files.array("'|S10'", version=2), FileFormat.NUMPY),
        (files.archive({"a.npy": files.array(), "b.npy": files.array()}), FileFormat.NUMPY),
        (b"ARROW1\0\0" + bytes(20), FileFormat.ARROW),
        (b"PAR1" + bytes(20), FileFormat.PARQUET),
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
    data = files.onnx(graph=b"")[:-6] + b"\x3a" + b"\x80\x80\x80\x10" + bytes(32 << 20) + b"\x42\x00"
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
        b"I1\nI2\ncos\nsystem\n(S'true'\ntR.",  # leaves more than one value: an unpickler does not mind
        b"(dp0\nS'a'\np1\nI1\ns.",
    ],
)
def test_a_pickle_that_is_plain_text_is_refused(code: bytes) -> None:
    assert "a pickle" in refusal(code)


@pytest.mark.parametrize(
    ("data", "says"),
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
        (zlib.compress(pickle.dumps(Bomb())), "joblib"),
        (b"ZF0x1f" + bytes([0x8F]) * 30, "joblib"),
        (b"\x1f\x8b\x08" + bytes(30), "gzip"),
        (b"\x89HDF\r\n\x1a\n" + bytes(30), "unknown format"),
    ],
)
def test_a_pickle_in_disguise_is_refused_with_its_place_and_a_way_out(data: bytes, says: str) -> None:
    assert says in refusal(data)


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
def test_no_pickle_goes_unnoticed_whole_or_cut_off(value: object, protocol: int, cut: int) -> None:
    data = pickle.dumps((os.system, value), protocol=protocol)

    assert is_pickle(data, complete=True)
    assert is_pickle(data[: max(len(data) - cut, 20)], complete=False)


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


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bomb_archive(), "neither"),
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
        (files.array("'<f4'" + " " * 4000), "Python objects"),
    ],
)
def test_hostile_files_give_typed_errors(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_an_archive_with_two_members_of_one_name_is_refused() -> None:
    assert "duplicate member names" in refusal(twins())
