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
    """A LiteRT model: version 3, one empty graph, no operators, one buffer."""
    table = flat_table([4, 4, 4, 4, 4], struct.pack("<I", 3) + bytes(16))
    root = 8 + len(table) - 24
    data = bytearray(struct.pack("<I", root) + b"TFL3" + table)
    struct.pack_into("<I", data, root + 4 + 4 * 3, len(data) - root - 16)
    data += bytes(4)  # an empty description
    for field_number, tables in ((1, []), (2, [flat_table([], b"")]), (4, [flat_table([], b"")])):
        add_vector(data, root + 4 + 4 * field_number, tables)
    return bytes(data)


def catboost(*, form: bytes = b"FlabuffersModel_v1", more: bytes = b"") -> bytes:
    """A CatBoost model: its form, and a table of trees."""
    table = flat_table([4, 4], bytes(8))
    root = 4 + len(table) - 12
    data = bytearray(struct.pack("<I", root) + table)
    struct.pack_into("<I", data, root + 4, len(data) - root - 4)
    data += struct.pack("<I", len(form)) + form + bytes(-len(form) % 4)
    inner = flat_table([], b"")
    struct.pack_into("<I", data, root + 8, len(data) + len(inner) - 4 - root - 8)
    data += inner
    return b"CBM1" + struct.pack("<I", len(data)) + data + more


def flat_table(sizes: list[int], values: bytes) -> bytes:
    """A table of a flatbuffer after its layout: fields of these sizes, one after the other, with these bytes."""
    offsets = [4 + sum(sizes[:number]) for number in range(len(sizes))]
    layout = struct.pack(f"<{2 + len(sizes)}H", 4 + 2 * len(sizes), 4 + sum(sizes), *offsets)
    layout += bytes(-len(layout) % 4)
    return layout + struct.pack("<i", len(layout)) + values


def add_vector(data: bytearray, place: int, tables: list[bytes]) -> None:
    """Append a list and its tables to a flatbuffer, and write at `place` how far away the list is."""
    struct.pack_into("<I", data, place, len(data) - place)
    slots = len(data) + 4
    data += struct.pack("<I", len(tables)) + bytes(4 * len(tables))
    for number, table in enumerate(tables):
        slot = slots + 4 * number
        data += table
        struct.pack_into("<I", data, slot, len(data) - 4 - slot)


def lightgbm(tree: bytes = b"Tree=0\nnum_leaves=1\nleaf_value=1\n\n\n") -> bytes:
    header = b"tree\nversion=v4\nnum_class=1\nmax_feature_idx=2\nfeature_names=a b c\n"
    return (
        header + b"tree_sizes=%d\n\n" % len(tree) + tree + b"end of trees\n\nparameters:\nend of parameters\n"
    )


def xgboost_json() -> bytes:
    learner = '{"attributes":{},"gradient_booster":{},"learner_model_param":{},"objective":{}}'
    return b'{"learner":%s,"version":[3,0,0]}' % learner.encode()


def xgboost_ubj() -> bytes:
    learner = b"".join(
        ubj_text(key) + b"{}" for key in (b"gradient_booster", b"learner_model_param", b"objective")
    )
    version = b"[#L" + struct.pack(">q", 3) + b"i\x03i\x00i\x00"
    return b"{" + ubj_text(b"learner") + b"{" + learner + b"}" + ubj_text(b"version") + version + b"}"


def ubj_text(text: bytes) -> bytes:
    return b"L" + struct.pack(">q", len(text)) + text


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
