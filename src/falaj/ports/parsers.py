"""The port for parsing what callers sent, in a process that holds no key and no token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

ReadRange = Callable[[int, int], bytes]
"""Reads `length` bytes from `offset`; fewer at the end."""


class ByteSource(NamedTuple):
    """Bytes that are read by ranges, such as a blob that is decrypted as far as it is read."""

    size_bytes: int
    read_range: ReadRange


@dataclass(frozen=True)
class Parsed:
    """The result of a parser: `facts`, which JSON can hold, and `content`, such as rows as an Arrow stream.

    A parser process made both from bytes of a caller: check them as if the caller had sent them.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    content: Any = b""
    """An object with the buffer protocol."""


Parser = Callable[[Sequence[ByteSource], Mapping[str, Any]], Parsed]
"""A pure function of the sources and the options. It raises InvalidInput, or one of its subclasses, for bad bytes."""

Reserve = Callable[[int], None]
"""Called with the size of the content before it is read; raises to refuse it."""


class ParserPool(Protocol):
    """Runs registered parsers, each call in a process of its own without keys, tokens, network or environment.

    A parser that crashes, hangs or exceeds its memory limit ends alone: the call raises InvalidInput or TooLarge.
    Unavailable where no parser process can be started, or all stay busy.
    """

    @property
    def isolation(self) -> str:
        """The sandbox that parsers run in; starts one to find out."""
        ...

    def parse(
        self,
        name: str,
        sources: Sequence[ByteSource] = (),
        options: Mapping[str, Any] | None = None,
        *,
        owner: str,
        reserve: Reserve | None = None,
    ) -> Parsed:
        """Run the parser that is registered as `name`. One `owner`, such as a user, never takes all turns."""
        ...

    def close(self) -> None: ...
