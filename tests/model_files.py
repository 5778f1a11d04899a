"""Minimal model files and look-alikes, built by hand without any framework."""

from __future__ import annotations

import io
import json
import struct
import zipfile

PLAIN_WEIGHTS = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": False}}})
PICKLED_WEIGHTS = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": True}}})


def onnx(graph: bytes = b"\x12\x03abc", *, more: bytes = b"") -> bytes:
    """An ONNX model: its format version, its producer, a graph (by default one with a name) and an operator set."""
    basic = b"\x08\x0a" + field(2, b"falaj") + field(7, graph) + field(8, b"\x0a\x00\x10\x15")
    return basic + more


def external_tensor(location: bytes) -> bytes:
    """A tensor of an ONNX model whose values lie in another file."""
    return field(8, b"w") + field(13, field(1, b"location") + field(2, location)) + b"\x70\x01"


def safetensors(
    header: bytes = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data: bytes = bytes(4)
) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def litert() -> bytes:
    return b"\x1c\0\0\0TFL3" + bytes(64)


def lightgbm() -> bytes:
    return b"tree\nversion=v4\nnum_class=1\n"


def xgboost_json() -> bytes:
    return b'{"learner":{"attributes":{},"feature_names":[]},"version":[3,0,0]}'


def xgboost_ubj() -> bytes:
    return b"{L\0\0\0\0\0\0\0\x07learner{L\0\0\0\0\0\0\0\x0aattributes{}}}"


def torch_program(*, target: str = "torch.ops.aten.relu.default", **more: object) -> str:
    """Return the program of a torch export with one node; `more` are fields of the whole."""
    graph = {"inputs": [], "outputs": [], "nodes": [{"target": target, "inputs": [], "outputs": []}]}
    return json.dumps({"graph_module": {"graph": graph}, "schema_version": {"major": 8, "minor": 20}, **more})


def torch_export(**members: bytes | str) -> bytes:
    """Return a torch export without example inputs; `members` are added, with `__` for `/` in their names."""
    basic: dict[str, bytes | str] = {
        "data__weights__weight_0": struct.pack("<2f", 0.5, -1.0),
        "data__weights__model_weights_config.json": PLAIN_WEIGHTS,
        "models__model.json": torch_program(),
        "data__sample_inputs__model.pt": b"",
        "archive_format": b"pt2",
    }
    return archive({f"m/{name.replace('__', '/')}": data for name, data in (basic | members).items()})


def array(descr: str = "'<f4'", *, version: int = 1, data: bytes = bytes(4), header: str = "") -> bytes:
    """A NumPy array file of one value."""
    text = (header or f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n").encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def archive(members: dict[str, bytes | str], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return data.getvalue()


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds bytes or another message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
