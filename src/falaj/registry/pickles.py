"""Detect pickles without loading them."""

from __future__ import annotations

import io
import pickletools

HEAD_BYTES = 64 << 10
"""Bytes of a file that are scanned; ordinary text stops being a valid pickle after a few bytes."""

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


def has_pickle_header(head: bytes) -> bool:
    """Return whether the first bytes are those of a binary pickle, protocol 2 or later."""
    return len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 15


def is_pickle(head: bytes, *, complete: bool) -> bool:
    """Return whether `head`, or the file that it begins, is a pickle of any protocol.

    Follows the opcodes and their effect on the stack as an unpickler would, without running any. So every stream that
    an unpickler can read is recognized, and raw numbers that begin like a pickle by chance are not.
    """
    stream, stack = io.BytesIO(head), list[bool]()
    walked, runs_code = 0, False
    try:
        for opcode, _, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                at_end = complete and not head[stream.tell() :].strip()
                return bool(stack) and (runs_code or at_end or has_pickle_header(head))
            if not _apply(opcode, stack):
                return False
            walked += 1
            runs_code |= opcode.name in RUNS_CODE
    except ValueError:
        cut_off = not complete and stream.tell() == len(head)
        return cut_off and walked > 0
    return False


def _apply(opcode: pickletools.OpcodeInfo, stack: list[bool]) -> bool:
    """Apply an opcode to `stack`, where True is a mark; return False if an unpickler would fail."""
    wanted = list(opcode.stack_before)
    if pickletools.markobject in wanted:
        if True not in stack:
            return False
        while not stack.pop():
            pass
        wanted = wanted[: wanted.index(pickletools.markobject)]
    if len(stack) < len(wanted):
        return False
    del stack[len(stack) - len(wanted) :]
    stack += [kind is pickletools.markobject for kind in opcode.stack_after]
    return True
