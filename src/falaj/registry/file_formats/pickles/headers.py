"""Detect pickles without loading them."""

from __future__ import annotations

import io
import pickletools
from typing import BinaryIO

RUNS_CODE = frozenset(
    {
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "REDUCE",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
    }
)
OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
LINES = {"INST": 2, "GLOBAL": 2}
"""Opcodes whose argument is more than one line."""
PIECE_BYTES = 1 << 20


class _NotAPickle(Exception):
    pass


def has_pickle_header(head: bytes) -> bool:
    """Return whether the first bytes are those of a binary pickle, protocol 2 or later."""
    return len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 15


def is_pickle(content: bytes | BinaryIO) -> bool:
    """Return whether `content` begins with a pickle that runs code, or consists of pickles, of any protocol.

    Follows the opcodes and their effect on the stack to the end, as an unpickler would, without running any. An
    argument is skipped and not judged, because unpicklers differ in what they accept. So every stream that an unpickler
    can read is recognized; text and numbers that begin like a pickle by chance stop being one.
    """
    stream: BinaryIO = io.BytesIO(content) if isinstance(content, bytes) else content
    code, runs_code = stream.read(1), False
    try:
        while not runs_code:
            runs_code = _walk_one(stream, code)
            code = _next_code(stream)
            if not code:
                return True
    except _NotAPickle:
        return False
    return True


def _walk_one(stream: BinaryIO, code: bytes) -> bool:
    """Follow one pickle, which begins with `code`, to its end; return whether it runs code."""
    stack: list[bool] = []
    runs_code = False
    while True:
        opcode = OPCODES.get(code)
        if opcode is None:
            raise _NotAPickle
        _skip_argument(stream, opcode)
        if opcode.name == "STOP":
            if not stack:
                raise _NotAPickle
            return runs_code
        _apply(opcode, stack)
        runs_code |= opcode.name in RUNS_CODE
        code = stream.read(1)


def _next_code(stream: BinaryIO) -> bytes:
    """Skip white space; return the first byte of what another call of an unpickler would read, empty at the end."""
    while (byte := stream.read(1)) and byte in b" \t\r\n\0":
        pass
    return byte


def _skip_argument(stream: BinaryIO, opcode: pickletools.OpcodeInfo) -> None:
    if opcode.arg is None:
        return
    size: int = opcode.arg.n
    if size == pickletools.UP_TO_NEWLINE:
        for _ in range(LINES.get(opcode.name, 1)):
            _skip_line(stream)
        return
    if size in LENGTH_BYTES:
        size = int.from_bytes(_exactly(stream, LENGTH_BYTES[size]), "little")
    while size > 0:
        size -= len(_exactly(stream, min(size, PIECE_BYTES)))


def _skip_line(stream: BinaryIO) -> None:
    while True:
        line = stream.readline(PIECE_BYTES)
        if line.endswith(b"\n"):
            return
        if not line:
            raise _NotAPickle


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise _NotAPickle
    return found


def _apply(opcode: pickletools.OpcodeInfo, stack: list[bool]) -> None:
    """Apply an opcode to `stack`, where True is a mark; raise _NotAPickle where an unpickler would fail."""
    wanted = list(opcode.stack_before)
    if pickletools.markobject in wanted:
        if True not in stack:
            raise _NotAPickle
        while not stack.pop():
            pass
        wanted = wanted[: wanted.index(pickletools.markobject)]
    if len(stack) < len(wanted):
        raise _NotAPickle
    del stack[len(stack) - len(wanted) :]
    stack += [kind is pickletools.markobject for kind in opcode.stack_after]
