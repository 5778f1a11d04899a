"""Minimal model files and look-alikes, built by hand without any framework."""

from __future__ import annotations

import io
import json
import struct
import zipfile

PLAIN_WEIGHTS = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": False}}})
PICKLED_WEIGHTS = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": True}}})


def onnx(graph: bytes = b"\x0a\x03abc") -> bytes:
    """An ONNX model: its format version, its producer, a graph and an operator set."""
    return b"\x08\x0a" + _field(0x12, b"falaj") + _field(0x3A, graph) + _field(0x42, b"\x0a\x00\x10\x15")


def safetensors(header: bytes = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0\0\0\0"


def litert() -> bytes:
    return b"\x1c\0\0\0TFL3" + bytes(64)


def lightgbm() -> bytes:
    return b"tree\nversion=v4\nnum_class=1\n"


def xgboost_json() -> bytes:
    return b'{"learner":{"attributes":{},"feature_names":[]},"version":[3,0,0]}'


def xgboost_ubj() -> bytes:
    return b"{L\0\0\0\0\0\0\0\x07learner{L\0\0\0\0\0\0\0\x0aattributes{}}}"


def torch_export(**members: bytes | str) -> bytes:
    """Return a torch export without example inputs; `members` are added, with `__` for `/` in their names."""
    basic: dict[str, bytes | str] = {
        "data__weights__weight_0": struct.pack("<2f", 0.5, -1.0),
        "data__weights__model_weights_config.json": PLAIN_WEIGHTS,
        "models__model.json": '{"graph_module": {}}',
        "data__sample_inputs__model.pt": b"",
        "archive_format": b"pt2",
    }
    return archive({f"m/{name.replace('__', '/')}": data for name, data in (basic | members).items()})


def array(descr: str = "'<f4'", *, version: int = 1) -> bytes:
    """A NumPy array file."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + bytes(4)


def archive(members: dict[str, bytes | str], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return data.getvalue()


def _field(tag: int, content: bytes) -> bytes:
    return bytes([tag, len(content)]) + content
