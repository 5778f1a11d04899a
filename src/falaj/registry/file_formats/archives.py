"""Inspect zip archives: accept torch exports, models of skops and NumPy arrays, reject pickles and everything else."""

from __future__ import annotations

import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from falaj.errors import InvalidInput, shorten
from falaj.records.registry import FileFormat
from falaj.registry.file_formats.numpy_arrays import array_fault, is_array
from falaj.registry.file_formats.pickles.headers import is_pickle
from falaj.registry.file_formats.pickles.packed import (
    SAFE_WAY,
    FoundPickle,
    find_pickle,
    package_of,
    packing_of,
    safe_way,
)
from falaj.registry.file_formats.pickles.tensors import tensors_fault
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.file_formats.skops_files import SCHEMA, SCHEMA_LIMIT, is_skops, skops_fault
from falaj.registry.file_formats.strict_json import parse_json
from falaj.registry.file_formats.torch_exports import PROGRAM_LIMIT, program_fault

MEMBERS_LIMIT = 10_000
MEMBER_HEAD_BYTES = 4096
TRUSTED_TYPES = "keep to estimators of scikit-learn, without functions of your own; or convert it to ONNX"
CONFIG_LIMIT = 8 << 20
"""Largest list of weights that is read."""

UNPACKED_LIMIT = 1 << 30
UNPACKED_RATIO = 64
"""An archive unpacks to at most so many times its size, or to `UNPACKED_LIMIT`."""

ENCRYPTED = 0x1
LOCAL_BYTES = 30
MAGIC = b"PK\x03\x04"
END = b"PK\x05\x06"
END_BYTES = 22
EXPORT_FOLDERS = ("data/weights/", "data/constants/", "data/sample_inputs/", "models/", ".data/", "extra/")
PROGRAMS = "models/"
TENSOR_FILE = re.compile(r"(?:weight|tensor)_\d+")
"""Files of a torch export with other names are unpickled, whatever the list of weights says."""
EXPORT_FILES = ("archive_format", "archive_version", "byteorder", "version")
SAMPLE_INPUTS = re.compile(r"[^/]+/data/sample_inputs/[^/]+\.pt")
EXAMPLES_LIMIT = 64 << 20
NESTED_LIMIT = 256 << 20
"""Largest archive of sparse arrays in a model of skops: it is read as a whole."""
WITHOUT_EXAMPLES = "set exported._example_inputs = None before torch.export.save: it pickles them"


def archive_format(reader: RangeReader) -> FileFormat:
    """Return the format of a zip archive. Raise InvalidInput with the member's name if it may contain code."""
    _require_end(reader)
    try:
        with zipfile.ZipFile(reader) as archive:
            members = _checked_members(reader, archive)
            heads = dict(_heads(reader, archive, members))  # raises unless each is where it is said to be
            sizes = {member.filename: member.file_size for member in members}
            nested = _nested_archives(reader, archive, heads)
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, EOFError, ValueError) as error:
        raise reader.rejection(f"a damaged zip archive: {shorten(error)}") from None
    for name, head in heads.items():
        if name not in nested:
            _refuse_code(reader, name, head, sizes[name])
    if is_skops(heads):
        if (fault := skops_fault(heads)) is not None:
            raise reader.rejection(f"a model of skops with {fault}", fix=TRUSTED_TYPES)
        return FileFormat.SKOPS
    if _is_export(heads):
        _refuse_strange_members(reader, heads)
        _refuse_pickled_weights(reader, heads)
        _refuse_programs_with_code(reader, heads)
        return FileFormat.TORCH_EXPORT
    if heads and all(is_array(head) for head in heads.values()):
        return FileFormat.NUMPY
    found = find_pickle(reader.buffered())
    if found is not None:
        raise pickle_rejection(reader, found)
    raise reader.rejection(
        "a zip archive that is no torch export, no model of skops, and not made of NumPy arrays"
    )


def _require_end(reader: RangeReader) -> None:
    if not reader.at(reader.size_bytes - END_BYTES, END_BYTES).startswith(END):
        raise reader.rejection("a zip archive that is truncated or has data after its end")


def pickle_rejection(reader: RangeReader, found: FoundPickle) -> InvalidInput:
    """Return the error for a file that has a pickle in it, with the safe way to store what made it."""
    what = "" if found.package is None else f" of {found.package}"
    where = (
        f"an archive that holds a pickle{what}, {shorten(found.path)}" if found.path else f"a pickle{what}"
    )
    return reader.rejection(f"{where}; loading it runs code", fix=safe_way(found.package))


def _checked_members(reader: RangeReader, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members in their order, if every zip reader would find the same names."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    if not members or len(members) > MEMBERS_LIMIT:
        raise reader.rejection(f"a zip archive of {len(members)} members", fix=f"1 to {MEMBERS_LIMIT}")
    if members[0].header_offset != 0 or archive.comment:
        raise reader.rejection("a zip archive with data outside its members")
    if len({member.filename.casefold() for member in members}) != len(members):
        raise reader.rejection("a zip archive with duplicate member names, or names that differ in case only")
    if sum(member.file_size for member in members) > max(UNPACKED_LIMIT, UNPACKED_RATIO * reader.size_bytes):
        raise reader.rejection("a zip archive that unpacks to very much more than its size")
    for member in members:
        if member.flag_bits & ENCRYPTED:
            raise reader.rejection(f"a zip archive with an encrypted member, {shorten(member.filename)}")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise reader.rejection(f"a zip archive with an unusual compression of {shorten(member.filename)}")
    return members


def _require_plain(reader: RangeReader, member: zipfile.ZipInfo, end: int) -> None:
    """Raise InvalidInput unless the member is a file inside the archive, described once and on its own bytes."""
    path, name = PurePosixPath(member.filename), shorten(member.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
        raise reader.rejection(f"a zip archive with a path that leads out of it, {name}")
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG) or member.is_dir():
        raise reader.rejection(f"a zip archive with a link or folder, {name}")
    local = reader.at(member.header_offset, LOCAL_BYTES)
    method = int.from_bytes(local[8:10], "little")
    lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if method != member.compress_type:
        raise reader.rejection(f"a zip archive that describes {name} in two ways")
    if member.header_offset + LOCAL_BYTES + lengths + member.compress_size > end:
        raise reader.rejection(f"a zip archive with members that overlap, {name}")


def _heads(
    reader: RangeReader, archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]
) -> Iterator[tuple[str, bytes]]:
    """Yield the first bytes of each member, which limits decompression bombs; programs and lists of weights are read
    whole. A member is checked and read at once: to come back to its part of a large file takes as long again."""
    ends = [*(member.header_offset for member in members[1:]), archive.start_dir]
    for member, end in zip(members, ends, strict=True):
        _require_plain(reader, member, end)
        with archive.open(member) as content:
            pickled = is_pickle(cast(BinaryIO, content))
        with archive.open(member) as content:
            head = content.read(_wanted_bytes(member.filename))
        if pickled:
            raise pickle_rejection(reader, FoundPickle(member.filename, package_of(head)))
        yield member.filename, head


def _wanted_bytes(name: str) -> int:
    if name == SCHEMA:
        return SCHEMA_LIMIT + 1
    if name.partition("/")[2].startswith(PROGRAMS):
        return PROGRAM_LIMIT + 1
    return CONFIG_LIMIT if name.endswith("_config.json") else MEMBER_HEAD_BYTES


def _is_export(heads: dict[str, bytes]) -> bool:
    return any(name.endswith("/archive_format") and head == b"pt2" for name, head in heads.items())


def _nested_archives(
    reader: RangeReader, archive: zipfile.ZipFile, heads: dict[str, bytes]
) -> frozenset[str]:
    """Return the members that are archives, as far as those hold data alone."""
    if is_skops(heads):
        return _sparse_arrays(reader, archive, heads)
    return _example_inputs(reader, archive, heads) if _is_export(heads) else frozenset()


def _example_inputs(reader: RangeReader, archive: zipfile.ZipFile, heads: dict[str, bytes]) -> frozenset[str]:
    """Return the example inputs of a torch export that are tensors, and hold nothing else."""
    names = [name for name, head in heads.items() if SAMPLE_INPUTS.fullmatch(name) and head.startswith(MAGIC)]
    for name in names:
        if archive.getinfo(name).file_size > EXAMPLES_LIMIT:
            raise reader.rejection(f"a torch export with example inputs of more than 64 MiB, {shorten(name)}")
        content = archive.read(name)
        inner = RangeReader(f"{reader.name}: {name}", len(content), _slices(content))
        _require_end(inner)
        with zipfile.ZipFile(inner) as examples:
            _checked_members(inner, examples)
            fault = tensors_fault(examples)
        if fault is not None:
            raise reader.rejection(
                f"a torch export whose example inputs, {shorten(name)}, hold {fault}", fix=WITHOUT_EXAMPLES
            )
    return frozenset(names)


def _sparse_arrays(reader: RangeReader, archive: zipfile.ZipFile, heads: dict[str, bytes]) -> frozenset[str]:
    """Return the members of a model of skops that are archives of NumPy arrays, and hold nothing else."""
    names = frozenset(name for name in heads if name.endswith(".npz"))
    for name in names:
        if archive.getinfo(name).file_size > NESTED_LIMIT:
            raise reader.rejection(f"a model of skops with a sparse array of more than 256 MiB, {name}")
        content = archive.read(name)
        inner = RangeReader(f"{reader.name}: {name}", len(content), _slices(content))
        if not content.startswith(MAGIC) or archive_format(inner) is not FileFormat.NUMPY:
            raise reader.rejection(f"a model of skops with a sparse array that is none, {name}")
    return names


def _slices(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: content[offset : offset + length]


def _refuse_code(reader: RangeReader, name: str, head: bytes, size_bytes: int) -> None:
    examples = "/sample_inputs/" in name
    if packing_of(head) == "tar":
        raise reader.rejection(f"a zip archive that holds another archive, {shorten(name)}", fix=SAFE_WAY)
    if head.startswith(MAGIC):
        why = f"a zip archive that holds another one, {shorten(name)}; it could contain a pickle"
        raise reader.rejection(why, fix=WITHOUT_EXAMPLES if examples else SAFE_WAY)
    if name.endswith((".pkl", ".pickle")):
        raise pickle_rejection(reader, FoundPickle(name, package_of(head)))
    if "/aotinductor/" in name or head.startswith(b"\x7fELF"):
        raise reader.rejection(f"a zip archive that holds machine code, {shorten(name)}", fix=SAFE_WAY)
    fault = array_fault(head, size_bytes) if is_array(head) else None
    if fault is not None:
        raise reader.rejection(f"{shorten(name)} is {fault}", fix=SAFE_WAY)


def _refuse_strange_members(reader: RangeReader, heads: dict[str, bytes]) -> None:
    """Reject a torch export with anything that torch.export.save does not write."""
    for name in heads:
        inside = name.partition("/")[2]
        if not inside.startswith(EXPORT_FOLDERS) and inside not in EXPORT_FILES:
            raise reader.rejection(f"a torch export with a member that is not known, {shorten(name)}")


def _refuse_pickled_weights(reader: RangeReader, heads: dict[str, bytes]) -> None:
    """Reject a torch export that lists pickled weights: they are unpickled whatever their bytes look like."""
    for name, text in heads.items():
        if not name.endswith("_config.json"):
            continue
        try:
            listed = parse_json(text)["config"].values()
            pickled = [
                entry["path_name"]
                for entry in listed
                if entry["use_pickle"] is not False or not TENSOR_FILE.fullmatch(entry["path_name"])
            ]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise reader.rejection(
                f"a torch export whose list of weights, {shorten(name)}, cannot be read"
            ) from None
        if pickled:
            raise reader.rejection(
                f"a torch export with pickled weights, {shorten(pickled[0])}", fix=SAFE_WAY
            )


def _refuse_programs_with_code(reader: RangeReader, heads: dict[str, bytes]) -> None:
    """Reject a torch export that would run code of its own when it is loaded, or when it computes."""
    for name, text in heads.items():
        if name.partition("/")[2].startswith(PROGRAMS) and (fault := program_fault(text)) is not None:
            raise reader.rejection(
                f"a torch export whose program, {shorten(name)}, could run code: {fault}", fix=SAFE_WAY
            )
