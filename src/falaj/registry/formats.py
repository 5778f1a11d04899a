"""Recognize file formats by content; reject files that could run code when they are loaded.

Whatever a file looks like, it is refused if an unpickler could read it. Formats that are listed here are parsed as far
as it takes to know what a reader would do with them; everything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from falaj.errors import Fault, InvalidInput
from falaj.ports.parsers import ByteSource, Parsed
from falaj.records.registry import FileFormat, TensorSpec
from falaj.registry.file_formats import archives, numpy_arrays
from falaj.registry.file_formats.archives import archive_format, pickle_rejection
from falaj.registry.file_formats.flatbuffers import CATBOOST_MARK, LITERT_MARK, catboost_fault, litert_fault
from falaj.registry.file_formats.onnx_files import is_onnx
from falaj.registry.file_formats.pickles.headers import has_pickle_header, is_pickle
from falaj.registry.file_formats.pickles.packed import (
    HEAD_BYTES,
    SAFE_WAY,
    FoundPickle,
    find_pickle,
    package_of,
    packing_of,
    safe_way,
)
from falaj.registry.file_formats.python_code import is_python_model, require_definition
from falaj.registry.file_formats.range_reader import READ_LIMIT, RangeReader
from falaj.registry.file_formats.strict_json import parse_json
from falaj.registry.file_formats.tensor_files import is_safetensors
from falaj.registry.file_formats.tree_models import LIGHTGBM, is_xgboost, lightgbm_fault, xgboost_fault

SCANNED_BYTES = 512
TEXT_LIMIT = 64 << 20
"""Largest JSON or text; it is read as a whole."""


def parse_model_file(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of model files, see ports/parsers.py: the format of the one source, whose `path` is an option.

    With the option `defines`, the source is Python that defines that name.
    """
    (source,) = sources
    reader = RangeReader(options["path"], source.size_bytes, source.read_range)
    found = recognize(reader)
    if options.get("defines"):
        require_definition(reader, options["defines"])
    return Parsed({"format": found.value})


def parse_pickled_file(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of files that may be pickles, where a policy allows them: they are recognized, and never loaded."""
    (source,) = sources
    reader = RangeReader(options["path"], source.size_bytes, source.read_range)
    try:
        return parse_model_file(sources, options)
    except InvalidInput:
        head = reader.at(0, SCANNED_BYTES)
        pickled = has_pickle_header(head) or is_pickle(reader.buffered())
        if pickled or find_pickle(reader.buffered()) is not None:
            return Parsed({"format": FileFormat.PICKLE.value})
        raise


def recognize(reader: RangeReader) -> FileFormat:
    """Return the format of a file. Raise InvalidInput, with a fix, if it is not allowed."""
    head = reader.at(0, SCANNED_BYTES)
    if has_pickle_header(head) or is_pickle(reader.buffered()):
        raise pickle_rejection(reader, FoundPickle("", package_of(reader.at(0, HEAD_BYTES))))
    if head.startswith(archives.MAGIC):
        return archive_format(reader)
    if packing_of(head) == "tar":
        raise _packed(reader, "tar")
    if numpy_arrays.is_array(head):
        return _array(reader)
    found = _by_magic(reader, head)
    if found is not None:
        return found
    if is_safetensors(reader, head):
        return FileFormat.SAFETENSORS
    if is_python_model(reader):
        return FileFormat.PYTHON
    if is_onnx(reader):
        return FileFormat.ONNX
    return _text(reader, head)


def model_format(found: Sequence[FileFormat]) -> FileFormat:
    """Return the format of a version from the formats of its files. Raise InvalidInput unless there is exactly one.

    Python source reads the other files of its version, so these may be models, too. Beside a pickle nothing counts.
    """
    for alone in (FileFormat.PICKLE, FileFormat.PYTHON):
        if alone in found:
            return alone
    models = sorted({each for each in found if each.is_model})
    if len(models) == 1:
        return models[0]
    given = " and ".join(models) if models else ", ".join(sorted(set(found)))
    raise InvalidInput.at("files", given=given, allowed="files of exactly one model format")


def require_signature(found: FileFormat, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise InvalidInput if a version has no signature, and its file cannot tell it."""
    if found is not FileFormat.PYTHON:
        return
    faults = [
        Fault(
            where=where,
            given="nothing" if not given else "a tensor without a shape",
            allowed="each tensor with its name, dtype and shape; -1 is a dimension of any size",
            fix=f'{where}=[{{"name": "x", "dtype": "float32", "shape": [-1, 4]}}]',
        )
        for where, given in (("inputs", inputs), ("outputs", outputs))
        if not given or not all(spec.shape for spec in given)
    ]
    if faults:
        raise InvalidInput("a model that is Python code needs a signature", faults=faults)


def _array(reader: RangeReader) -> FileFormat:
    fault = numpy_arrays.array_fault(reader.at(0, numpy_arrays.HEAD_BYTES), reader.size_bytes)
    if fault is not None:
        raise reader.rejection(fault, fix=safe_way("numpy"))
    return FileFormat.NUMPY


def _by_magic(reader: RangeReader, head: bytes) -> FileFormat | None:
    """Recognize formats whose readers run no code, by how they begin and end."""
    size_bytes = reader.size_bytes
    end = reader.at(max(0, size_bytes - 8), 8)
    if head[4:8] == LITERT_MARK:
        return _sound(reader, FileFormat.LITERT, litert_fault(reader))
    if head.startswith(CATBOOST_MARK):
        return _sound(reader, FileFormat.CATBOOST, catboost_fault(reader))
    if head.startswith(b"PAR1") and end.endswith(b"PAR1") and size_bytes >= 12:
        return FileFormat.PARQUET
    if head.startswith(b"ARROW1\x00\x00") and end.endswith(b"ARROW1") and size_bytes >= 20:
        return FileFormat.ARROW
    if head.startswith(b"\xff\xff\xff\xff"):
        return FileFormat.ARROW
    if head.startswith(LIGHTGBM):
        return _sound(reader, FileFormat.LIGHTGBM, lightgbm_fault(reader))
    return _sound(reader, FileFormat.XGBOOST, xgboost_fault(reader, head)) if is_xgboost(head) else None


def _sound(reader: RangeReader, found: FileFormat, fault: str | None) -> FileFormat:
    """Return the format. Raise InvalidInput for a file that begins like one, and is something else."""
    if fault is not None:
        raise reader.rejection(f"a model of {found.value} that is {fault}")
    return found


def _packed(reader: RangeReader, packing: str) -> InvalidInput:
    found = find_pickle(reader.buffered())
    if found is not None:
        return pickle_rejection(reader, found)
    why = f"compressed ({packing}), so its content cannot be inspected; joblib stores pickles this way"
    return reader.rejection("a tar archive" if packing == "tar" else why, fix=SAFE_WAY)


def _text(reader: RangeReader, head: bytes) -> FileFormat:
    """Recognize JSON or text, all of it; reject everything else."""
    packing = packing_of(head)
    if packing is not None:
        raise _packed(reader, packing)
    if reader.size_bytes > TEXT_LIMIT:
        raise reader.rejection(f"of an unknown format, or JSON or text of more than {TEXT_LIMIT >> 20} MiB")
    places = range(0, reader.size_bytes, READ_LIMIT)
    content = b"".join(reader.at(place, READ_LIMIT) for place in places)
    if not _is_text(content):
        raise reader.rejection("of an unknown format")
    if content.lstrip()[:1] not in (b"{", b"["):
        return FileFormat.TEXT
    try:
        parse_json(content)
    except ValueError as error:
        raise reader.rejection(f"JSON that cannot be read: {error}") from None
    return FileFormat.JSON


def _is_text(content: bytes) -> bool:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return all(line.isprintable() for line in re.split("[\t\n\r\f]", text))
