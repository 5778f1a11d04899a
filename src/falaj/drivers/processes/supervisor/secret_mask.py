"""Replaces the values of secrets in the output of user code, also where a value arrives in several chunks."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator

MIN_SECRET_LENGTH = 4
"""Shorter values occur in ordinary text, and masking them would hide nothing."""
MIN_LINE_LENGTH = 8
REPLACEMENT = b"***"


class SecretMask:
    """Masks a stream of output. A possible beginning of a secret is held back until more arrives."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._words = maskable_spellings(secrets)
        self._held = b""

    def add(self, chunk: bytes) -> bytes:
        """Return the output that is safe to show by now."""
        whole = self._held + chunk
        shown, done = self._hidden(whole, self._safe_length(whole))
        self._held = whole[done:]
        return shown

    def flush(self) -> bytes:
        """Return what was held back, masked: no more output follows."""
        held, self._held = self._held, b""
        return self.hide(held)

    def hide(self, data: bytes) -> bytes:
        return self._hidden(data, len(data))[0]

    def _hidden(self, data: bytes, safe: int) -> tuple[bytes, int]:
        """Return `data` masked up to `safe`, or to the end of a secret that begins before it, and how far that was."""
        shown, done = [], 0
        for start, end in self._places(data):
            if start >= safe:
                break
            shown += [data[done:start], REPLACEMENT]
            done = end
        safe = max(safe, done)
        return b"".join([*shown, data[done:safe]]), safe

    def _places(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield start and end of each secret: the leftmost first, and of those that begin together the longest.

        Each is searched for by itself: one pattern of all could take hours for adversarial text.
        """
        found = [(at, -len(word), word) for word in self._words if (at := data.find(word)) >= 0]
        heapq.heapify(found)
        done = 0
        while found:
            start, length, word = found[0]
            if start >= done:
                done = start - length
                yield start, done
            again = data.find(word, done)
            if again < 0:
                heapq.heappop(found)
            else:
                heapq.heapreplace(found, (again, length, word))

    def _safe_length(self, data: bytes) -> int:
        """Return where the suffix of `data` begins that could be the beginning of a secret."""
        return len(data) - max((overlap(data, word) for word in self._words), default=0)


def overlap(data: bytes, word: bytes) -> int:
    """Return the length of the longest suffix of `data` that is a proper prefix of `word`."""
    for length in range(min(len(word) - 1, len(data)), 0, -1):
        if word[length - 1] == data[-1] and data.endswith(word[:length]):
            return length
    return 0


def maskable_spellings(secrets: Iterable[str]) -> set[bytes]:
    """Return the values as they may be printed: whole, and the long lines of multi-line values such as keys."""
    shown = set[str]()
    for value in secrets:
        whole = value.strip()
        lines = [line.strip() for line in whole.splitlines()] if "\n" in whole else []
        shown |= {line for line in lines if len(line) >= MIN_LINE_LENGTH}
        shown |= {whole} if len(whole) >= MIN_SECRET_LENGTH else set()
    spelled = {spelling for each in shown for spelling in spellings(each)}
    return {each.encode(errors="surrogateescape") for each in spelled}


def spellings(word: str) -> set[str]:
    """Return a word, also as Python and JSON quote it, as in a dump of the whole environment."""
    in_json = (json.dumps(word, ensure_ascii=ascii_only) for ascii_only in (True, False))
    return {word, *(quoted[1:-1] for quoted in (repr(word), *in_json))}
