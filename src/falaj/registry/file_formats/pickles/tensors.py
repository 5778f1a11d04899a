"""Recognize archives of torch.save that hold tensors and plain containers, and nothing that runs code.

torch.export.save keeps example inputs so. Their pickle is followed opcode by opcode, and never loaded: it may name the
functions that put tensors together, call those, and build tuples, lists and dicts. Whoever unpickles it, with or
without `weights_only`, can call nothing else.
"""

from __future__ import annotations

import pickletools
import re
import zipfile

MEMBER = re.compile(
    r"[^/]+/(?:data\.pkl|data/\d{1,6}|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
PICKLE_LIMIT = 16 << 20
GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        *(
            f"torch {kind}Storage"
            for kind in (
                *("Float", "Double", "Half", "BFloat16", "Bool", "Byte"),
                *("Char", "Short", "Int", "Long", "ComplexFloat", "ComplexDouble"),
            )
        ),
    }
)
_OPCODES = """
    PROTO STOP GLOBAL REDUCE BINPERSID MARK BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
"""
OPCODES = frozenset(_OPCODES.split())


def tensors_fault(archive: zipfile.ZipFile) -> str | None:
    """Return what an archive has beside tensors in plain containers; none if nothing."""
    names = [member.filename for member in archive.infolist()]
    strange = next((name for name in names if not MEMBER.fullmatch(name)), None)
    if strange is not None:
        return f"a member that torch.save does not write, {strange}"
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1 or len({name.partition("/")[0] for name in names}) != 1:
        return "not one pickle of tensors"
    if archive.getinfo(pickles[0]).file_size > PICKLE_LIMIT:
        return f"a pickle of more than {PICKLE_LIMIT >> 20} MiB"
    return _pickle_fault(archive.read(pickles[0]))


def _pickle_fault(content: bytes) -> str | None:
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in OPCODES:
                return f"a pickle that could run code, by {opcode.name}"
            if opcode.name == "GLOBAL" and argument not in GLOBALS:
                return f"a pickle that names {argument}"
    except (ValueError, IndexError, UnicodeDecodeError):
        return "a pickle that cannot be followed"
    return None
