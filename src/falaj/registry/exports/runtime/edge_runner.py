"""Run the model of this bundle on rows of CSV or JSON, after its hashes and its signature were verified.

    python run.py --verify --key FINGERPRINT
    python run.py --key FINGERPRINT rows.csv > predictions.csv
    generate-rows | python run.py --key FINGERPRINT --format jsonl -

It needs Python 3.11 or newer, numpy, and the package that signature.json names as engine: onnxruntime or
ai-edge-litert. It opens no connection. Exit status: 0 done, 1 refused or failed, 2 misuse.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
LARGEST_TEXT = 64 << 20
CHUNK_BYTES = 1 << 20
MOST_FAULTS = 20


class BundleError(Exception):
    """The bundle or an input is refused: where, what was given, what is allowed, and the fix."""

    def __init__(self, where: str, given: str, allowed: str, fix: str = "") -> None:
        rows = [("given", given), ("allowed", allowed), ("fix", fix)]
        super().__init__("\n".join([where, *(f"  {name:<8} {words}" for name, words in rows if words)]))


# --------------------------------------------------------------------------- ECDSA on P-256 (FIPS 186-5)

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
KEY_PREFIX = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
"""How the DER of a public key of P-256 begins; its two coordinates follow."""

Point = tuple[int, int, int]
"""X, Y and Z of Jacobian coordinates: x = X/Z², y = Y/Z³; Z is 0 at infinity."""
INFINITY: Point = (1, 1, 0)
GENERATOR: Point = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
    1,
)


def is_signed(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Tell whether `signature` (DER) is that of `message` by `public_key` (DER), with SHA-256.

    Refused besides: points that are not on the curve, numbers outside of the group, and DER that can be shorter.
    """
    key, numbers = _decode_key(public_key), _decode_signature(signature)
    if key is None or numbers is None or not all(0 < number < N for number in numbers):
        return False
    r, s = numbers
    inverse = pow(s, -1, N)
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    x, _, z = _add(_multiply(digest * inverse % N, GENERATOR), _multiply(r * inverse % N, key))
    return z != 0 and x * pow(z, -2, P) % P % N == r


def _decode_key(data: bytes) -> Point | None:
    if len(data) != len(KEY_PREFIX) + 64 or not data.startswith(KEY_PREFIX):
        return None
    x, y = (int.from_bytes(data[start : start + 32], "big") for start in (len(KEY_PREFIX), len(data) - 32))
    return (x, y, 1) if x < P and y < P and (y * y - (x * x * x - 3 * x + B)) % P == 0 else None


def _decode_signature(data: bytes) -> tuple[int, int] | None:
    """Return r and s of a sequence of two integers, in the one encoding that DER permits."""
    if not 8 <= len(data) <= 72:
        return None
    r, s = (int.from_bytes(each, "big") for each in (data[4 : 4 + data[3]], data[6 + data[3] :]))
    content = _integer(r) + _integer(s)
    return (r, s) if data == b"\x30" + bytes([len(content)]) + content else None


def _integer(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "big")
    return b"\x02" + bytes([len(data)]) + data


def _add(one: Point, other: Point) -> Point:
    if not one[2] or not other[2]:
        return other if not one[2] else one
    z1, z2 = one[2] ** 2 % P, other[2] ** 2 % P
    u1, u2 = one[0] * z2 % P, other[0] * z1 % P
    s1, s2 = one[1] * z2 * other[2] % P, other[1] * z1 * one[2] % P
    if u1 == u2:
        return _double(one) if s1 == s2 else INFINITY
    h, r = u2 - u1, s2 - s1
    h3, v = h * h * h % P, u1 * h * h % P
    x = (r * r - h3 - 2 * v) % P
    return (x, (r * (v - x) - s1 * h3) % P, h * one[2] * other[2] % P)


def _double(point: Point) -> Point:
    x, y, z = point
    if not z or not y:
        return INFINITY
    y2, z2 = y * y % P, z * z % P
    slope, s = 3 * (x - z2) * (x + z2) % P, 4 * x * y2 % P
    doubled = (slope * slope - 2 * s) % P
    return (doubled, (slope * (s - doubled) - 8 * y2 * y2) % P, 2 * y * z % P)


def _multiply(times: int, point: Point) -> Point:
    total = INFINITY
    while times:
        if times & 1:
            total = _add(total, point)
        point, times = _double(point), times >> 1
    return total


# ------------------------------------------------------------------------------------------ verification


class Bundle(NamedTuple):
    """A verified bundle: its signed record, its signature, and the bytes of its model, read once."""

    export: dict[str, Any]
    signature: dict[str, Any]
    model: bytes
    fingerprint: str


def open_bundle(folder: Path, *, key: str | None) -> Bundle:
    """Verify the signature and every file of a bundle. `key` is the fingerprint that its signer must have."""
    pem = _bytes(folder, "model.pub")
    fingerprint = hashlib.sha256(pem).hexdigest()
    if key is not None and fingerprint != key:
        fix = "export it again from the platform that you trust, or give the fingerprint that it printed"
        raise BundleError("model.pub", f"the key {fingerprint}", f"the key {key}", fix)
    signed = _signed_files(_bytes(folder, "model.sig"), pem)
    record = _bytes(folder, "export.json")
    if signed.get("export.json") != hashlib.sha256(record).hexdigest():
        raise damaged("export.json", "a list of files that this key has not signed")
    export = _parsed("export.json", record)
    files = {each["path"]: each for each in export["files"]}
    listed = {path: each["sha256"] for path, each in files.items()}
    if listed | {"export.json": signed["export.json"]} != signed:
        raise damaged("model.sig", "a signature of other files than export.json lists")
    _require_only(folder, {*signed, "model.sig"})
    _require_same_files(_parsed("manifest.json", _checked(folder, files, "manifest.json")), files)
    signature = _parsed("signature.json", _checked(folder, files, "signature.json"))
    model = b""
    for path in files:
        if path == signature["file"]:
            model = _checked(folder, files, path)
        else:
            _check(folder, files, path)
    return Bundle(export, signature, model, fingerprint)


def _signed_files(bundle: bytes, pem: bytes) -> dict[str, str]:
    """Return the SHA-256 of each file that model.sig, in the format of OpenSSF model signing, signs by this key."""
    try:
        envelope = json.loads(bundle)["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        _, *lines, _ = pem.decode("ascii").strip().split("\n")
        message = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
        if not is_signed(base64.b64decode("".join(lines), validate=True), message, signature):
            raise damaged("model.sig", "a signature that is not by the key in model.pub")
        statement = json.loads(payload)
        if statement["predicateType"] != PREDICATE_TYPE:
            raise damaged("model.sig", "a signature of something that is no model")
        return {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise damaged("model.sig", "no signature of a model, or model.pub is no public key") from None


def damaged(where: str, given: str) -> BundleError:
    return BundleError(
        where, given, "the bytes that were exported", "copy the bundle again, or export it again"
    )


def _require_only(folder: Path, listed: set[str]) -> None:
    """Raise BundleError for files that nobody signed, links, and anything that is neither file nor folder."""
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        for name in (*folders, *names):
            path = Path(place, name)
            shown = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise BundleError(shown, "a link or a special file", "plain files")
            if path.is_file() and shown not in listed:
                fix = "remove it; keep inputs and outputs outside of the bundle"
                raise BundleError(shown, "a file that is not part of the export", "the signed files", fix)


def _unreadable(error: OSError) -> None:
    raise BundleError(str(error.filename), str(error.strerror), "a readable folder")


def _require_same_files(manifest: dict[str, Any], files: dict[str, Any]) -> None:
    for file in manifest["files"]:
        found = files.get(f"files/{file['path']}")
        if found is None or found["sha256"] != file["sha256"]:
            raise damaged(f"files/{file['path']}", "a file that differs from the registered version")


def _checked(folder: Path, files: dict[str, Any], path: str) -> bytes:
    """Return the bytes of a file that have the signed hash."""
    if path not in files:
        raise damaged(path, "a file that the export does not list")
    content = _bytes(folder, path, limit=files[path]["size_bytes"])
    _compare(path, files[path], len(content), hashlib.sha256(content).hexdigest())
    return content


def _check(folder: Path, files: dict[str, Any], path: str) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with open(folder / path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise damaged(path, f"a file that cannot be read ({error.strerror})") from None
    _compare(path, files[path], size, digest.hexdigest())


def _compare(path: str, listed: dict[str, Any], size: int, digest: str) -> None:
    if size != listed["size_bytes"]:
        raise damaged(path, f"{size} bytes instead of {listed['size_bytes']}")
    if digest != listed["sha256"]:
        raise damaged(path, f"other bytes: sha256 {digest} instead of {listed['sha256']}")


def _bytes(folder: Path, path: str, *, limit: int = LARGEST_TEXT) -> bytes:
    try:
        with open(folder / path, "rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise damaged(path, f"a file that cannot be read ({error.strerror})") from None


def _parsed(path: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise damaged(path, "no JSON") from None
    if not isinstance(found, dict):
        raise damaged(path, "JSON that is no object")
    return found


def require_pinned(pin: Path, fingerprint: str) -> str:
    """Return what the pin says: the fingerprint of the first bundle that was used with it."""
    try:
        with open(pin, "x") as file:
            file.write(f"{fingerprint}\n")
        return f"pinned to {pin} now: this is its first use"
    except FileExistsError:
        pass
    except OSError as error:
        raise BundleError("--pin", f"{pin} ({error.strerror})", "a file that can be written") from None
    pinned = pin.read_text().strip()
    if pinned != fingerprint:
        fix = f"if the platform's key was changed on purpose, remove {pin}"
        raise BundleError("model.pub", f"the key {fingerprint}", f"the pinned key {pinned}", fix)
    return f"pinned in {pin}"


# ------------------------------------------------------------------------------------------------ engines

Run = Callable[[list[Any]], list[Any]]


def open_engine(bundle: Bundle, *, threads: int) -> Run:
    """Load the verified bytes into the engine that signature.json names."""
    inputs = [each["name"] for each in bundle.signature["inputs"]]
    outputs = [each["name"] for each in bundle.signature["outputs"]]
    if bundle.signature["engine"] == "onnxruntime":
        return _onnxruntime(bundle.model, inputs, outputs, threads=threads)
    return _litert(bundle.model, inputs, outputs, threads=threads)


def _onnxruntime(model: bytes, inputs: list[str], outputs: list[str], *, threads: int) -> Run:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before the import: afterwards it is too late
    try:
        import onnxruntime
    except ImportError as error:
        raise missing("onnxruntime", error) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the engine raises types of its own
        raise BundleError(
            "the model", f"onnxruntime cannot load it: {error}", "a model it can load"
        ) from None
    _require_names("inputs", inputs, [each.name for each in session.get_inputs()])
    return lambda arrays: session.run(outputs, dict(zip(inputs, arrays, strict=True)))


def _litert(model: bytes, inputs: list[str], outputs: list[str], *, threads: int) -> Run:
    try:
        engine = importlib.import_module("ai_edge_litert.interpreter")
    except ImportError as error:
        raise missing("ai-edge-litert", error) from None
    try:
        interpreter = engine.Interpreter(model_content=model, num_threads=threads or None)
    except ValueError as error:
        raise BundleError("the model", f"LiteRT cannot load it: {error}", "a model it can load") from None
    takes = {each["name"]: each["index"] for each in interpreter.get_input_details()}
    gives = {each["name"]: each["index"] for each in interpreter.get_output_details()}
    _require_names("inputs", inputs, list(takes))
    _require_names("outputs", outputs, list(gives))

    def run(arrays: list[Any]) -> list[Any]:
        for name, array in zip(inputs, arrays, strict=True):
            interpreter.resize_tensor_input(takes[name], array.shape)
        interpreter.allocate_tensors()
        for name, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(takes[name], array)
        interpreter.invoke()
        return [interpreter.get_tensor(gives[name]) for name in outputs]

    return run


def explained(run: Run) -> Run:
    """Return `run` with the errors of the engine, which raises types of its own, as errors about these rows."""

    def call(arrays: list[Any]) -> list[Any]:
        try:
            return run(arrays)
        except Exception as error:
            raise BundleError(
                "the model", f"{type(error).__name__}: {error}", "rows that it can run on"
            ) from None

    return call


def missing(package: str, error: ImportError) -> BundleError:
    return BundleError(
        "this Python", f"no {package} ({error})", "an environment with it", f"pip install {package}"
    )


def _require_names(which: str, wanted: list[str], found: list[str]) -> None:
    if sorted(wanted) != sorted(found):
        raise damaged("signature.json", f"{which} {wanted}, and the model has {found}")


# --------------------------------------------------------------------------------------------------- rows


class Column(NamedTuple):
    """One column of the input: the tensor that it is part of, its place there, and its type."""

    tensor: int
    place: int | None
    dtype: str


Row = tuple[str, dict[str, Any]]
"""Where a row stands, and its values by column."""


class RowTensors:
    """Turns rows into the arrays of the model, and outputs into rows."""

    def __init__(self, signature: dict[str, Any]) -> None:
        self.inputs, self.outputs = signature["inputs"], signature["outputs"]
        self.columns: dict[str, Column] = {}
        for number, tensor in enumerate(self.inputs):
            for place, name in enumerate(self._names(tensor)):
                self.columns[name] = Column(number, place, tensor["dtype"])
        self.whole = {each["name"]: n for n, each in enumerate(self.inputs)}
        later = [size for tensor in self.inputs for size in tensor["shape"][1:]]
        fixed = any(tensor["shape"][0] == 1 for tensor in self.inputs)
        self.most = 1 if fixed or -1 in later else sys.maxsize
        """Rows that fit in one run."""

    def _names(self, tensor: dict[str, Any]) -> list[str]:
        """Return the columns of a tensor of rows; none where it has more dimensions, or any number of columns."""
        shape = tensor["shape"]
        if len(shape) > 2 or (len(shape) == 2 and shape[1] < 0):
            return []
        width = shape[1] if len(shape) == 2 else 1
        if tensor["features"]:
            return list(tensor["features"])
        return [tensor["name"]] if width == 1 else [f"{tensor['name']}[{place}]" for place in range(width)]

    def check_header(self, where: str, names: Sequence[str], *, ignore_extra: bool) -> None:
        """Raise BundleError unless the columns of a table are those of the model."""
        hard = [each["name"] for each in self.inputs if not self._names(each)]
        if hard:
            fix = "give JSON lines, with each tensor as a nested list: --format jsonl"
            raise BundleError(where, "CSV", f"JSON: {', '.join(hard)} has more dimensions than a table", fix)
        twice = sorted({name for name in names if names.count(name) > 1})
        absent = [name for name in self.columns if name not in names]
        extra = [] if ignore_extra else [name for name in names if name not in self.columns]
        allowed = f"the columns {', '.join(self.columns)}"
        for words, wrong in (("twice", twice), ("without", absent), ("with", extra)):
            if wrong:
                fix = "--ignore-extra leaves them out" if words == "with" else ""
                raise BundleError(where, f"{words} {', '.join(map(repr, wrong[:MOST_FAULTS]))}", allowed, fix)

    def arrays(self, rows: Sequence[Row], *, ignore_extra: bool) -> list[Any]:
        """Return the rows as arrays in the order of the inputs. Raise BundleError with the faults of all rows."""
        faults: list[str] = []
        made = []
        for where, row in rows:
            try:
                made.append(self._row(where, row, ignore_extra=ignore_extra))
            except BundleError as error:
                faults.append(str(error))
                if len(faults) == MOST_FAULTS:
                    break
        if faults:
            raise ValueError("\n".join(faults))
        import numpy as np

        return [
            np.stack([row[number] for row in made]).reshape(-1, *_tail(tensor, made[0][number]))
            for number, tensor in enumerate(self.inputs)
        ]

    def _row(self, where: str, row: dict[str, Any], *, ignore_extra: bool) -> list[Any]:
        """Return one array for each input, from columns or from whole tensors."""
        found: list[Any] = [None] * len(self.inputs)
        for name, value in row.items():
            column = self.columns.get(name)
            if name in self.whole and (column is None or isinstance(value, list)):
                number = self.whole[name]
                found[number] = _tensor(f"{where}, {name}", value, self.inputs[number])
            elif column is not None:
                if found[column.tensor] is None:
                    found[column.tensor] = [None] * len(self._names(self.inputs[column.tensor]))
                found[column.tensor][column.place or 0] = number_of(f"{where}, {name}", value, column.dtype)
            elif not ignore_extra:
                allowed = ", ".join([*self.columns] or [*self.whole])
                raise BundleError(
                    f"{where}, {name}", "an unknown column", allowed, "--ignore-extra leaves it out"
                )
        self._require_all(where, found)
        return [
            _array(values, tensor["dtype"]) if isinstance(values, list) else values
            for values, tensor in zip(found, self.inputs, strict=True)
        ]

    def _require_all(self, where: str, found: list[Any]) -> None:
        for values, tensor in zip(found, self.inputs, strict=True):
            if values is not None and not isinstance(values, list):
                continue  # a whole tensor
            names = self._names(tensor) or [tensor["name"]]
            absent = names if values is None else [n for n, v in zip(names, values, strict=True) if v is None]
            if absent:
                raise BundleError(f"{where}, {absent[0]}", "nothing", f"a value of type {tensor['dtype']}")

    def predictions(self, outputs: Sequence[Any], count: int) -> Iterator[dict[str, Any]]:
        """Yield the outputs row by row; a tensor of several columns has a column for each."""
        for tensor, array in zip(self.outputs, outputs, strict=True):
            if not array.ndim or len(array) != count:
                raise BundleError(
                    f"output {tensor['name']}",
                    f"shape {list(array.shape)} for {count} rows",
                    "one value for each row",
                )
        for number in range(count):
            row: dict[str, Any] = {}
            for tensor, array in zip(self.outputs, outputs, strict=True):
                values = array[number].reshape(-1) if array[number].size == 1 else array[number]
                if values.size == 1:
                    row[tensor["name"]] = values[0].item() if hasattr(values[0], "item") else values[0]
                elif values.ndim == 1:
                    row |= {f"{tensor['name']}[{n}]": each for n, each in enumerate(values.tolist())}
                else:
                    row[tensor["name"]] = values.tolist()
            yield row


def _tail(tensor: dict[str, Any], first: Any) -> tuple[int, ...]:
    """Return the dimensions after the rows."""
    return tuple(first.shape[-(len(tensor["shape"]) - 1) :]) if len(tensor["shape"]) > 1 else ()


def number_of(where: str, value: Any, dtype: str) -> Any:
    """Return one value of a column as its type. Raise BundleError if it does not fit."""
    if dtype == "string":
        if isinstance(value, str):
            return value
    elif dtype == "bool":
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool) or str(value).strip().lower() in words:
            return words[str(value).strip().lower()]
    elif dtype.startswith("float"):
        found = _float(value)
        if found is not None and (not math.isfinite(found) or abs(found) <= LARGEST[dtype]):
            return found
    else:
        found_int = _int(value)
        bits, signed = int(dtype.strip("uint")), not dtype.startswith("u")
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if found_int is not None and low <= found_int <= high:
            return found_int
    empty = value is None or value == ""
    fix = "write nan where it is not known" if empty and dtype.startswith("float") else ""
    raise BundleError(where, "nothing" if empty else repr(value)[:80], f"a value of type {dtype}", fix)


LARGEST = {"float16": 65504.0, "float32": 3.4028235e38, "float64": sys.float_info.max}


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if not isinstance(value, float) else int(value) if value.is_integer() else None
    except (ValueError, OverflowError):
        return None


def _tensor(where: str, value: Any, tensor: dict[str, Any]) -> Any:
    """Return a nested list as the array of one row; it may have the dimension of the rows, of size one."""
    import numpy as np

    flat: list[Any] = []
    shape = _shape(where, value)
    _flatten(where, value, tensor["dtype"], flat)
    wanted = tensor["shape"][1:]
    if shape[:1] == [1] and len(shape) == len(wanted) + 1:
        shape = shape[1:]
    if len(shape) != len(wanted) or any(
        size not in (-1, given) for size, given in zip(wanted, shape, strict=True)
    ):
        raise BundleError(where, f"shape {shape}", f"shape {wanted}; -1 is any number")
    if len(flat) != math.prod(shape):
        raise BundleError(where, "lists of different lengths", f"shape {wanted}")
    return np.array(_array(flat, tensor["dtype"])).reshape(shape)


def _shape(where: str, value: Any) -> list[int]:
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < 33:
        shape.append(len(value))
        if not value:
            raise BundleError(where, "an empty list", "values")
        value = value[0]
    return shape


def _flatten(where: str, value: Any, dtype: str, flat: list[Any]) -> None:
    if not isinstance(value, list):
        flat.append(number_of(where, value, dtype))
        return
    for each in value:
        _flatten(where, each, dtype, flat)


def _array(values: list[Any], dtype: str) -> Any:
    import numpy as np

    return np.array(values, dtype=np.object_ if dtype == "string" else np.dtype(dtype))


def read_rows(file: IO[str], name: str, how: str, rows: RowTensors, *, ignore_extra: bool) -> Iterator[Row]:
    """Yield the rows of CSV with a header, or of JSON lines."""
    if how == "csv":
        yield from _read_csv(file, name, rows, ignore_extra=ignore_extra)
        return
    for number, line in enumerate(file, start=1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BundleError(
                where, f"no JSON ({error})", 'an object on each line, like {"x": 1.5}'
            ) from None
        if not isinstance(row, dict):
            raise BundleError(where, f"a {type(row).__name__}", 'an object on each line, like {"x": 1.5}')
        yield where, row


def _read_csv(file: IO[str], name: str, rows: RowTensors, *, ignore_extra: bool) -> Iterator[Row]:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise BundleError(name, "no line", "a first line with the names of the columns")
        rows.check_header(name, header, ignore_extra=ignore_extra)
        for values in reader:
            where = f"{name} line {reader.line_num}"
            if not values:
                continue
            if len(values) != len(header):
                raise BundleError(where, f"{len(values)} values", f"{len(header)}, as many as columns")
            yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise BundleError(f"{name} line {reader.line_num}", str(error), "CSV as RFC 4180 has it") from None


class Writer:
    """Writes predictions as CSV or JSON lines; the columns of CSV are those of the first row."""

    def __init__(self, file: IO[str], how: str) -> None:
        self._file, self._how = file, how
        self._header: list[str] | None = None
        self._csv = csv.writer(file, lineterminator="\n")

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            if self._how == "jsonl":
                self._file.write(json.dumps(row) + "\n")
                continue
            if self._header is None:
                self._header = list(row)
                self._csv.writerow(self._header)
            if list(row) != self._header:
                raise BundleError("the output", "another number of columns than before", "--format jsonl")
            self._csv.writerow([json.dumps(v) if isinstance(v, list) else v for v in row.values()])


# ----------------------------------------------------------------------------------------------- commands


def predict(arguments: argparse.Namespace, bundle: Bundle, run: Run) -> None:
    """Read rows, and write a prediction for each, a batch at a time."""
    rows = RowTensors(bundle.signature)
    how = arguments.format or (
        "jsonl" if Path(arguments.input).suffix in (".jsonl", ".ndjson", ".json") else "csv"
    )
    batch = max(1, min(arguments.batch, rows.most))
    with opened(arguments.input) as source, written(arguments.output) as target:
        writer = Writer(target, how)
        name = "standard input" if arguments.input == "-" else arguments.input
        read = read_rows(source, name, how, rows, ignore_extra=arguments.ignore_extra)
        try:
            while part := list(itertools.islice(read, batch)):
                arrays = rows.arrays(part, ignore_extra=arguments.ignore_extra)
                writer.write(rows.predictions(run(arrays), len(part)))
        except UnicodeDecodeError as error:
            raise BundleError(name, f"bytes that are not UTF-8 ({error.reason})", "text in UTF-8") from None
        target.flush()


@contextmanager
def opened(given: str) -> Iterator[IO[str]]:
    if given == "-":
        sys.stdin.reconfigure(encoding="utf-8-sig", newline="")  # type: ignore[union-attr]
        yield sys.stdin
        return
    try:
        file = open(given, encoding="utf-8-sig", newline="")  # noqa: SIM115 - only the opening is translated
    except OSError as error:
        raise BundleError(
            "INPUT", f"{given} ({error.strerror})", "a readable file, or - for standard input"
        ) from None
    with file:
        yield file


@contextmanager
def written(given: str | None) -> Iterator[IO[str]]:
    """Yield standard output, or a file that appears under its name when all is written."""
    if given is None:
        yield sys.stdout
        return
    draft = Path(given).with_name(f".{Path(given).name}.{os.getpid()}.part")
    try:
        with open(draft, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(given)
    except OSError as error:
        raise BundleError("--output", f"{given} ({error.strerror})", "a file that can be written") from None
    finally:
        draft.unlink(missing_ok=True)


def bench(bundle: Bundle, run: Run, *, batch: int, seconds: float) -> None:
    """Print the latency of one row, and the rows of a second in batches."""
    import numpy as np

    random, rows = np.random.default_rng(7), RowTensors(bundle.signature)

    def sample(count: int) -> list[Any]:
        made = []
        for tensor in bundle.signature["inputs"]:
            shape = [
                count if tensor["shape"][0] < 0 else 1,
                *(4 if n < 0 else n for n in tensor["shape"][1:]),
            ]
            values = random.random(shape)
            made.append(
                np.full(shape, "0", np.object_)
                if tensor["dtype"] == "string"
                else (values if tensor["dtype"].startswith("float") else values > 0.5).astype(tensor["dtype"])
            )
        return made

    for count in dict.fromkeys([1, max(1, min(batch, rows.most))]):
        arrays, taken = sample(count), list[float]()
        run(arrays)
        until = time.perf_counter() + seconds
        while not taken or time.perf_counter() < until:
            began = time.perf_counter()
            run(arrays)
            taken.append(time.perf_counter() - began)
        taken.sort()
        p50, p99 = taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 99 // 100)]
        rate = count * len(taken) / sum(taken)
        print(f"batch {count}: p50 {p50 * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs, {rate:,.0f} rows/s")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("input", nargs="?", help="a file of rows; - for standard input")
    add("--output", metavar="FILE", help="write predictions there instead of standard output")
    add("--format", choices=["csv", "jsonl"], help="of input and output; else by the name of the input")
    add("--key", metavar="FINGERPRINT", help="refuse a bundle that another key signed")
    add("--pin", metavar="FILE", help="keep the fingerprint there at first use, compare it later")
    add("--verify", action="store_true", help="verify the bundle and end")
    add("--bench", action="store_true", help="measure latency and throughput on random rows")
    add("--ignore-extra", action="store_true", help="leave out columns that the model does not take")
    add("--batch", type=int, default=256, metavar="ROWS", help="rows of a run (default: 256)")
    add("--threads", type=int, default=0, metavar="N", help="threads of the engine (default: its own)")
    add("--seconds", type=float, default=2.0, metavar="S", help="seconds of each part of --bench")
    here = Path(__file__).resolve().parent
    add("--bundle", type=Path, default=here, metavar="DIR", help="the bundle (default: where this file is)")
    arguments = parser.parse_args(words)
    if arguments.input is None and not (arguments.verify or arguments.bench):
        parser.error("give INPUT, --verify or --bench")
    try:
        return _perform(arguments)
    except (BundleError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename or 'standard output'}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return 1


def _perform(arguments: argparse.Namespace) -> int:
    try:
        key = None if arguments.key is None else arguments.key.strip().lower()
        bundle = open_bundle(arguments.bundle, key=key)
    except (KeyError, TypeError, AttributeError):
        raise damaged("export.json", "signed, but not with the fields of an export") from None
    trust = "as --key says"
    if arguments.pin is not None:
        trust = require_pinned(Path(arguments.pin), bundle.fingerprint)
    elif arguments.key is None:
        trust = "NOT CHECKED: the bundle is whole, but anybody may have made it; give --key or --pin"
        print(f"warning: signer {bundle.fingerprint} {trust}", file=sys.stderr)
    if arguments.verify:
        print(f"{bundle.export['version']} is sound: {len(bundle.export['files'])} files, signed")
        print(f"  signer   {bundle.fingerprint}, {trust}")
        print(f"  label    {bundle.export['label']}")
        return 0
    run = explained(open_engine(bundle, threads=arguments.threads))
    if arguments.bench:
        bench(bundle, run, batch=arguments.batch, seconds=arguments.seconds)
    else:
        predict(arguments, bundle, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
