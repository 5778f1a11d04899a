"""Locked requirements: files in which every package has one version, and perhaps the hashes of its wheels. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from falaj.errors import Fault, InvalidInput, shorten

LIMIT_BYTES = 4 << 20
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?P<extras>\[[A-Za-z0-9._, -]+\])?"
    r"\s*===?\s*(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)\s*(?P<marker>;.*)?"
)
_HASH = re.compile(r"\s--hash[= ]\s*(\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
FIX = "lock the file again, for example by: uv pip compile --generate-hashes, or pip freeze"


@dataclass(frozen=True)
class Pin:
    """A package of a lock. `text` is its requirement without hashes; `hashes` are those of its files, if it has any."""

    name: str
    version: str
    text: str
    hashes: frozenset[str] = frozenset()

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


def read_lock(path: Path) -> list[Pin]:
    """Read a locked requirements file; InvalidInput names every line that is not a pinned package."""
    try:
        data = path.read_bytes() if path.is_file() else None
        text = None if data is None or len(data) > LIMIT_BYTES else data.decode()
    except (OSError, UnicodeDecodeError):
        text = None
    if text is None:
        allowed = f"a requirements file (text of at most {LIMIT_BYTES >> 20} MiB)"
        raise InvalidInput.at("--environment", given=str(path), allowed=allowed)
    return parse_lock(text, name=path.name)


def parse_lock(text: str, *, name: str) -> list[Pin]:
    """Return the packages of a lock, in its order."""
    pins, faults = list[Pin](), list[Fault]()
    for number, line in _logical_lines(text):
        words = _refusal(line)
        if words is None:
            pins.append(_pin(line))
        else:
            where, given = f"{name}:{number}", shorten(line)
            faults.append(Fault(where=where, given=given, allowed=words, fix=FIX))
    faults += _contradictions(pins, name)
    if not pins and not faults:
        faults.append(Fault(where=name, allowed="at least one line like numpy==2.4.6"))
    if faults:
        raise InvalidInput(f"{name} is not a locked requirements file", faults=faults)
    return pins


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unlocked(found: Iterable[Pin], *, known: Mapping[str, str]) -> list[str]:
    """Return the packages that are not among the `known`, or have another version."""
    return [each.pin for each in found if known.get(normalized(each.name)) != each.version.partition("+")[0]]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers: continued ones joined, without comments."""
    began, parts = 0, list[str]()
    for number, raw in enumerate([*text.splitlines(), ""], start=1):
        line = re.sub(r"(^|\s)#.*$", "", raw)
        began = number if not parts else began
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            joined = " ".join(part.strip() for part in parts if part.strip())
            parts = []
            if joined:
                yield began, joined


def _refusal(line: str) -> str | None:
    """Return what is allowed instead of `line`; none if it is a pinned package."""
    bare = _HASH.sub("", line).strip()
    if line.startswith("-"):
        return "packages only: options such as indexes belong to pip's own configuration"
    if "://" in bare or " @ " in bare or bare.startswith((".", "/")) or bare.endswith((".whl", ".tar.gz")):
        return "a package of an index with its version, like numpy==2.4.6; no address and no path"
    if " -" in bare:
        return "no options other than --hash"
    found = _PIN.fullmatch(bare)
    if found is None or "*" in bare.partition(";")[0]:
        return "one version, like numpy==2.4.6"
    if any(_SHA256.fullmatch(each) is None for each in _HASH.findall(line)):
        return "hashes as --hash=sha256: and 64 hex digits"
    return None


def _pin(line: str) -> Pin:
    bare = _HASH.sub("", line).strip()
    found = _PIN.fullmatch(bare)
    assert found is not None  # noqa: S101 - it was checked
    hashes = frozenset(each.removeprefix("sha256:") for each in _HASH.findall(line))
    return Pin(found["name"], found["version"], bare, hashes)


def _contradictions(pins: Iterable[Pin], name: str) -> list[Fault]:
    """Return a fault for each package that has two versions without markers that tell them apart."""
    seen, faults = dict[str, str](), list[Fault]()
    for each in pins:
        if ";" in each.text:
            continue
        before = seen.setdefault(normalized(each.name), each.version)
        if before != each.version:
            given = f"{before} and {each.version}"
            faults.append(
                Fault(where=f"{name}: {each.name}", given=given, allowed="one version of a package")
            )
    return faults
