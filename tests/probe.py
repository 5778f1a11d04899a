"""A service for tests: its operations fail, crash and break off on request, through the real gate and interfaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from falaj.errors import FalajError, Fault
from falaj.governance.operations.operation import ArrowStream, ByteStream, Mode, OperationPerformer, operation
from falaj.records.names import DataClass
from falaj.records.record import Record
from polling import PATIENCE_S

SECRET = "a secret of the crash, in /var/lib/secret.py"

Count = Annotated[int, Field(ge=0, le=100_000)]
End = Literal["well", "conflict", "crash"]


class Note(Record):
    number: int
    text: str = ""


class Probe:
    """A service that anyone may call."""

    def __init__(self, gate: OperationPerformer) -> None:
        self.gate = gate
        self.waiting: list[int] = []
        self.go_on = threading.Event()

    @operation("probe.fail", resource="platform", allow="anyone")
    def fail(self, code: str) -> Note:
        """Raise the error that has `code`, with faults and details."""
        fault = Fault(where="here", given="7 days", allowed="a duration", fix='"7d"')
        bare = Fault(where="there")
        raise FalajError.types[code](
            f"this is {code}", faults=[fault, bare], details={"path": ["a", "b"], "n": 1, "deep": {"x": None}}
        )

    @operation("probe.crash", resource="platform", allow="anyone")
    def crash(self) -> Note:
        """Raise an exception that is not a FalajError."""
        raise RuntimeError(SECRET)

    @operation("probe.echo", resource="platform", mode=Mode.READ, allow="anyone")
    def echo(
        self, *, names: tuple[DataClass, ...] = (), number: int = 0, half: float = 0.0, sure: bool = False
    ) -> Note:
        """Return what was given, as text."""
        return Note(number=number, text=f"{','.join(names)} {half} {sure}")

    @operation("probe.wait", resource="platform", mode=Mode.FREE, allow="anyone")
    def wait(self) -> Note:
        """Return when the test says `go_on`."""
        self.waiting.append(1)
        self.go_on.wait(PATIENCE_S)
        return Note(number=len(self.waiting))

    @operation("probe.notes", resource="platform", mode=Mode.READ, allow="anyone")
    def notes(self, *, count: Count, text: str = "", end: End = "well") -> Iterator[Note]:
        """Stream `count` notes, and then the end."""
        return ending((Note(number=n, text=text) for n in range(count)), end)

    @operation("probe.pieces", resource="platform", mode=Mode.READ, allow="anyone")
    def pieces(self, *, count: Count, end: End = "well") -> ByteStream:
        """Stream `count` chunks of 64 KiB, without support for an offset."""
        return ending((bytes([n % 256]) * 65536 for n in range(count)), end)

    @operation("probe.table", resource="platform", mode=Mode.READ, allow="anyone")
    def table(self, *, count: Count, end: End = "well") -> ArrowStream:
        """Stream `count` batches of 10,000 rows."""
        import pyarrow as pa

        schema = pa.schema([("n", pa.int64())])
        batches = (
            pa.RecordBatch.from_arrays([pa.array(range(n, n + 10_000))], schema=schema) for n in range(count)
        )
        reader: ArrowStream = pa.RecordBatchReader.from_batches(schema, ending(batches, end))
        return reader


def ending(items: Iterator, end: End) -> Iterator:
    yield from items
    if end == "conflict":
        raise FalajError.types["object.conflict"]("the stream met a conflict", details={"at": "the end"})
    if end == "crash":
        raise RuntimeError(SECRET)
