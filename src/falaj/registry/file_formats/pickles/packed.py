"""Find pickles in archives within archives, to name them and the safe way to store what made them.

What is found here is refused in any case: nothing compressed is a model format. So everything is bounded, and a search
that gives up costs a clearer sentence, and no more.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, cast

from falaj.registry.file_formats.pickles.headers import has_pickle_header, is_pickle

HEAD_BYTES = 1 << 20
UNPACKED_LIMIT = 64 << 20
"""Bytes that are unpacked in all."""
DEPTH_LIMIT = 5
MEMBERS_LIMIT = 1000
TAR_MARK = slice(257, 262)
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x5d\x00\x00": "lzma",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"ZF0x": "joblib",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
MODULE = re.compile(rb"(sklearn|torch|xgboost|lightgbm|catboost|keras|tensorflow|numpy)(?![A-Za-z0-9])")
SAFE_WAYS = {
    "sklearn": "save it by skops (skops.io.dump), or convert it to ONNX: fj.export_onnx, or skl2onnx",
    "torch": "export it: torch.export.save, torch.onnx.export, or safetensors for weights alone",
    "xgboost": "save it as UBJ or JSON: model.save_model('model.ubj')",
    "lightgbm": "save it as text: booster.save_model('model.txt')",
    "catboost": "save it as model.save_model('model.cbm')",
    "keras": "convert it to LiteRT or ONNX",
    "tensorflow": "convert it to LiteRT or ONNX",
    "numpy": "save plain arrays: numpy.save(path, array, allow_pickle=False)",
}
SAFE_WAY = (
    "export it: skops for scikit-learn, torch.export.save or safetensors for PyTorch, ONNX for all of them, "
    "or the own format of XGBoost, LightGBM and CatBoost"
)


class FoundPickle(NamedTuple):
    """Where a pickle is, and the package whose objects it holds, if it names one."""

    path: str
    package: str | None


def safe_way(package: str | None) -> str:
    """Return how to store what a pickle holds."""
    return SAFE_WAYS.get(package or "", SAFE_WAY)


def package_of(head: bytes) -> str | None:
    """Return the package that the beginning of a pickle names; NumPy only where nothing else is named."""
    found = [name.decode() for name in MODULE.findall(head)]
    return next((name for name in found if name != "numpy"), found[0] if found else None)


def packing_of(head: bytes) -> str | None:
    """Return how a file is packed, by its first bytes."""
    if head[TAR_MARK] == b"ustar":
        return "tar"
    return next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)


def find_pickle(content: BinaryIO) -> FoundPickle | None:
    """Return the first pickle in a packed file, also in files within it; none if there is none within the limits."""
    try:
        return _search(content, "", _Budget(), 0)
    except (_Exhausted, OSError, EOFError, ValueError, lzma.LZMAError, zlib.error):
        return None
    except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None


class _Exhausted(Exception):
    pass


class _Budget:
    def __init__(self) -> None:
        self.left_bytes = UNPACKED_LIMIT
        self.left_members = MEMBERS_LIMIT

    def take(self, content: BinaryIO) -> bytes:
        """Return the rest of a file, as far as the limit goes."""
        found = content.read(self.left_bytes + 1)
        self.left_bytes -= len(found)
        if self.left_bytes < 0:
            raise _Exhausted
        return found


def _search(content: BinaryIO, path: str, budget: _Budget, depth: int) -> FoundPickle | None:
    """Search a file that is at its beginning. `path` is its name, in the files that it lies in."""
    if depth > DEPTH_LIMIT:
        raise _Exhausted
    head = content.read(512)
    content.seek(0)
    if head.startswith(b"PK\x03\x04"):
        inner = _zip_members(content)
    elif head[TAR_MARK] == b"ustar":
        inner = _tar_members(content)
    elif (packing := packing_of(head)) is not None:
        inner = iter([("", _unpacked(content, packing))])
    else:
        data = budget.take(content)
        pickled = has_pickle_header(data) or is_pickle(data)
        return FoundPickle(path, package_of(data[:HEAD_BYTES])) if pickled and data else None
    for name, member in inner:
        budget.left_members -= 1
        if budget.left_members < 0:
            raise _Exhausted
        found = _search(io.BytesIO(budget.take(member)), f"{path}/{name}".strip("/"), budget, depth + 1)
        if found is not None:
            return found
    return None


def _zip_members(content: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    with zipfile.ZipFile(content) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                yield member.filename, cast(BinaryIO, archive.open(member))


def _tar_members(content: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    with tarfile.open(fileobj=content, mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield member.name, cast(BinaryIO, file)


def _unpacked(content: BinaryIO, packing: str) -> BinaryIO:
    if packing == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=content))
    if packing == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(content))
    if packing in ("xz", "lzma"):
        return cast(BinaryIO, lzma.LZMAFile(content))
    if packing == "zlib":
        made = zlib.decompressobj().decompress(content.read(UNPACKED_LIMIT), UNPACKED_LIMIT)
        return io.BytesIO(made)
    raise _Exhausted
