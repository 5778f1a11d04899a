"""Check the models of XGBoost (JSON and UBJ) and of LightGBM (text) to their end."""

from __future__ import annotations

import codecs
import json
import re
import struct
from collections.abc import Iterator

from falaj.registry.file_formats.range_reader import READ_LIMIT, RangeReader
from falaj.registry.file_formats.strict_json import unique_keys

LIGHTGBM = b"tree\nversion="
XGBOOST_JSON = re.compile(rb'\{\s*"learner"')
XGBOOST_UBJ = re.compile(rb"\{(?:L\0{7}\x07|i\x07)learner")
"""The first key, with a long or a short length."""
LEARNER = ("gradient_booster", "learner_model_param", "objective")
JSON_LIMIT = 128 << 20
HEADER_LIMIT = READ_LIMIT
DEPTH_LIMIT = 64
MOST_VALUES = 20_000_000
NUMBERS = {b"i": ">b", b"U": ">B", b"I": ">h", b"l": ">i", b"L": ">q"}
FIXED_BYTES = {b"Z": 0, b"N": 0, b"T": 0, b"F": 0, b"C": 1, b"d": 4, b"D": 8} | {
    mark: struct.calcsize(kind) for mark, kind in NUMBERS.items()
}


def is_xgboost(head: bytes) -> bool:
    return XGBOOST_JSON.match(head) is not None or XGBOOST_UBJ.match(head) is not None


def xgboost_fault(reader: RangeReader, head: bytes) -> str | None:
    """Return what is wrong with an XGBoost model; none if it is one to its end."""
    if XGBOOST_UBJ.match(head):
        try:
            found = UbjWalk(reader).members()
        except (EOFError, struct.error, UnicodeDecodeError):
            return "UBJ that is damaged, or goes on after its end"
        learner = found.get("learner", [])
    else:
        if reader.size_bytes > JSON_LIMIT:
            return f"JSON of more than {JSON_LIMIT >> 20} MiB; save it as UBJ: save_model('model.ubj')"
        try:
            document = json.loads(_content(reader).decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            return f"JSON that cannot be read: {error}"
        learner = list(document["learner"]) if isinstance(document.get("learner"), dict) else []
    missing = [key for key in LEARNER if key not in learner]
    return f"without {missing[0]}" if missing else None


class UbjWalk:
    """Follows the values of a UBJSON file to its end; numbers in typed arrays are passed over and not read."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._place = 0
        self._values = 0

    def members(self) -> dict[str, list[str]]:
        """Return the keys of the object that is the file, each with those of its value. Raise EOFError if unsound."""
        if self._take(1) != b"{":
            raise EOFError
        found: dict[str, list[str]] = {}
        for key in self._keys():
            mark = self._take(1)
            inner: list[str] = []
            if mark == b"{":
                for each in self._keys():
                    inner.append(each)
                    self._pass(self._take(1), 0)
            else:
                self._pass(mark, 0)
            if key in found or len(set(inner)) != len(inner):
                raise EOFError
            found[key] = inner
        if self._place != self._reader.size_bytes:
            raise EOFError
        return found

    def _keys(self) -> Iterator[str]:
        """Yield the keys of an object; the caller passes each value before it asks for the next."""
        while self._peek() != b"}":
            yield self._text()
        self._take(1)

    def _pass(self, mark: bytes, depth: int) -> None:
        self._values += 1
        if depth > DEPTH_LIMIT or self._values > MOST_VALUES:
            raise EOFError
        if mark in FIXED_BYTES:
            self._skip(FIXED_BYTES[mark])
        elif mark in (b"S", b"H"):
            self._skip(self._length())
        elif mark == b"{":
            for _ in self._keys():
                self._pass(self._take(1), depth + 1)
        elif mark == b"[":
            self._pass_array(depth)
        else:
            raise EOFError

    def _pass_array(self, depth: int) -> None:
        kind = b""
        if self._peek() == b"$":
            self._take(1)
            kind = self._take(1)
            if kind not in FIXED_BYTES:
                raise EOFError
        if self._peek() == b"#":
            self._take(1)
            count = self._length()
            if kind:
                self._skip(count * FIXED_BYTES[kind])
                return
            for _ in range(count):
                self._pass(self._take(1), depth + 1)
            return
        if kind:
            raise EOFError
        while self._peek() != b"]":
            self._pass(self._take(1), depth + 1)
        self._take(1)

    def _text(self) -> str:
        length = self._length()
        if length > READ_LIMIT:
            raise EOFError
        return self._take(length).decode()

    def _length(self) -> int:
        kind = NUMBERS.get(self._take(1))
        if kind is None:
            raise EOFError
        length = int(struct.unpack(kind, self._take(struct.calcsize(kind)))[0])
        if length < 0:
            raise EOFError
        return length

    def _peek(self) -> bytes:
        return self._reader.at(self._place, 1)

    def _take(self, length: int) -> bytes:
        found = self._reader.at(self._place, length)
        self._skip(length)
        return found

    def _skip(self, length: int) -> None:
        self._place += length
        if self._place > self._reader.size_bytes:
            raise EOFError


def lightgbm_fault(reader: RangeReader) -> str | None:
    """Return what is wrong with a LightGBM model; none if it is text, with each tree where its header says."""
    header, blank, _ = reader.at(0, HEADER_LIMIT).partition(b"\n\n")
    fields = dict(line.partition(b"=")[::2] for line in header.split(b"\n"))
    sizes = fields.get(b"tree_sizes", b"").split()
    if not blank or not {b"num_class", b"max_feature_idx", b"feature_names"} <= set(fields):
        return "without a complete header"
    if not all(re.fullmatch(rb"[0-9]{1,10}", size) for size in sizes):
        return "with a list of trees that cannot be read"
    place = len(header) + len(blank)
    for number, size in enumerate(map(int, sizes)):
        mark = b"Tree=%d\n" % number
        if reader.at(place, len(mark)) != mark:
            return f"without tree {number} where its header says"
        place += size
    if not reader.at(place, 64).lstrip(b"\n").startswith(b"end of trees\n"):
        return "without the end of its trees"
    return _text_fault(reader)


def _text_fault(reader: RangeReader) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in _pieces(reader):
            if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", decoder.decode(piece)):
                return "with characters that are not text"
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not text"
    return None


def _content(reader: RangeReader) -> bytes:
    return b"".join(_pieces(reader))


def _pieces(reader: RangeReader) -> Iterator[bytes]:
    for place in range(0, reader.size_bytes, READ_LIMIT):
        yield reader.at(place, READ_LIMIT)
