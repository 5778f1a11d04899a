"""Inspect zip archives: accept torch exports and NumPy archives, reject pickles and everything else."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator

from falaj.errors import shorten
from falaj.records.registry import FileFormat
from falaj.registry.numpy_arrays import holds_objects, is_array
from falaj.registry.pickles import is_pickle
from falaj.registry.range_reader import RangeReader

MEMBERS_LIMIT = 10_000
MEMBER_HEAD_BYTES = 4096
CONFIG_LIMIT = 8 << 20
"""Largest list of weights that is read."""

ENCRYPTED = 0x1
MAGIC = b"PK\x03\x04"
END = b"PK\x05\x06"
END_BYTES = 22
USE_INSTEAD = "export it: torch.onnx.export, torch.export.save, or safetensors for weights alone"
WITHOUT_EXAMPLES = "set exported._example_inputs = None before torch.export.save: it pickles them"


def archive_format(reader: RangeReader) -> FileFormat:
    """Return the format of a zip archive. Raise InvalidInput with the member's name if it may contain code."""
    if not reader.at(reader.size_bytes - END_BYTES, END_BYTES).startswith(END):
        raise reader.rejection("a zip archive that is truncated or has data after its end")
    try:
        with zipfile.ZipFile(reader) as archive:
            members = _checked_members(reader, archive)
            heads = dict(_heads(reader, archive, members))
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, EOFError, ValueError) as error:
        raise reader.rejection(f"a damaged zip archive: {shorten(error)}") from None
    for name, head in heads.items():
        _refuse_code(reader, name, head, complete=archive.getinfo(name).file_size <= len(head))
    if any(name.endswith("/archive_format") and head == b"pt2" for name, head in heads.items()):
        _refuse_pickled_weights(reader, heads)
        return FileFormat.TORCH_EXPORT
    if heads and all(is_array(head) for head in heads.values()):
        return FileFormat.NUMPY
    raise reader.rejection("a zip archive that is neither a torch export nor made of NumPy arrays")


def _checked_members(reader: RangeReader, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members, if every zip reader would find the same ones."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    if not members or len(members) > MEMBERS_LIMIT:
        raise reader.rejection(f"a zip archive of {len(members)} members", fix=f"1 to {MEMBERS_LIMIT}")
    if members[0].header_offset != 0 or archive.comment:
        raise reader.rejection("a zip archive with data outside its members")
    if len({member.filename for member in members}) != len(members):
        raise reader.rejection("a zip archive with duplicate member names")
    for member in members:
        if member.flag_bits & ENCRYPTED:
            raise reader.rejection(f"a zip archive with an encrypted member, {shorten(member.filename)}")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise reader.rejection(f"a zip archive with an unusual compression of {shorten(member.filename)}")
    return members


def _heads(
    reader: RangeReader, archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]
) -> Iterator[tuple[str, bytes]]:
    """Yield the first bytes of each member, which limits decompression bombs; lists of weights are read whole."""
    for member in members:
        with archive.open(member) as content:
            whole = member.filename.endswith("_config.json")
            yield member.filename, content.read(CONFIG_LIMIT if whole else MEMBER_HEAD_BYTES)


def _refuse_code(reader: RangeReader, name: str, head: bytes, *, complete: bool) -> None:
    examples = "/sample_inputs/" in name
    if head.startswith(MAGIC):
        why = f"a zip archive that holds another one, {shorten(name)}; it could contain a pickle"
        raise reader.rejection(why, fix=WITHOUT_EXAMPLES if examples else USE_INSTEAD)
    if name.endswith((".pkl", ".pickle")) or is_pickle(head, complete=complete):
        raise reader.rejection(
            f"a zip archive that holds a pickle, {shorten(name)}; loading it runs code", fix=USE_INSTEAD
        )
    if "/aotinductor/" in name or head.startswith(b"\x7fELF"):
        raise reader.rejection(f"a zip archive that holds machine code, {shorten(name)}", fix=USE_INSTEAD)
    if is_array(head) and holds_objects(head):
        raise reader.rejection(
            f"a NumPy array that can hold Python objects, {shorten(name)}, is read as a pickle",
            fix=USE_INSTEAD,
        )


def _refuse_pickled_weights(reader: RangeReader, heads: dict[str, bytes]) -> None:
    """Reject a torch export that lists pickled weights: they are unpickled whatever their bytes look like."""
    for name, text in heads.items():
        if not name.endswith("_config.json"):
            continue
        try:
            listed = json.loads(text)["config"].values()
            pickled = [entry["path_name"] for entry in listed if entry["use_pickle"] is not False]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise reader.rejection(
                f"a torch export whose list of weights, {shorten(name)}, cannot be read"
            ) from None
        if pickled:
            raise reader.rejection(
                f"a torch export with pickled weights, {shorten(pickled[0])}", fix=USE_INSTEAD
            )
