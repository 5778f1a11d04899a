"""Check the programs of torch exports: torch evaluates texts in them, calls functions by name, and makes code of names.

`torch.export.load` gives the sizes of tensors to SymPy, which evaluates them as Python. A target of a node is looked up
below `torch`, and can be any function of any module there; names of inputs and weights become part of a source text
that is compiled. So everything that is not free text has to be in a small language here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from falaj.errors import shorten
from falaj.registry.file_formats.strict_json import parse_json

SCHEMA_MAJOR = 8
"""The version of the format that is known; torch does not read others either."""
PROGRAM_LIMIT = 64 << 20
LONGEST_TEXT = 10_000

NAME = re.compile(r"[\w.\-]*")
"""Names of inputs, weights, types and the like: in a source text they are names still."""

FREE_TEXT = frozenset(
    [
        "as_string",
        "as_strings",
        "custom",
        "from_node",
        "nn_module_stack",
        "source_fn_stack",
        "stack_trace",
        "torch_fn",
        "torch_version",
    ]
)
"""Fields whose texts are used as values only. What else is below such a name is not one of them: a tensor has any."""
SPECIFICATIONS = frozenset({"in_spec", "out_spec", "context"})
"""Fields that are JSON in a text."""

_WORDS = """
    Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality False Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge
    GreaterThan Gt Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod
    ModularIndexing Mul Ne Not Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt
    StrictGreaterThan StrictLessThan Symbol ToFloat True TruncToFloat TruncToInt Unequality Where ceiling
    extended_real finite floor int_oo integer negative nonnegative nonpositive nonzero oo positive precision real
    sqrt zero
"""
_GUARD_WORDS = """
    L None abs and bool ceil device dtype float inf int is isnan log2 math max min ndim not or pow round size
    storage_offset stride sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum torch trunc
"""
_NUMBER, _SYMBOL = r"\d+(?:\.\d*)?(?:[eE][+\-]?\d+)?", r"[a-z]{1,4}\d+"


def _language(words: str, quoted: str, signs: str) -> re.Pattern[str]:
    """Return the texts of numbers, symbols, these words, what may be in quotes, and signs. It never goes back."""
    known = "|".join([_SYMBOL, _NUMBER, *words.split()])
    return re.compile(rf"(?:(?<!\w)(?:{known})(?!\w)|'(?:{quoted})'|[{re.escape(signs)}])*+")


EXPRESSION = _language(_WORDS, rf"{_SYMBOL}|-?{_NUMBER}", " +-*/%(),<>=!&|~")
"""The size of a tensor, as SymPy writes it."""
GUARD = _language(_WORDS + _GUARD_WORDS, r"[\w.\-]*", " +-*/%(),<>=!&|~.[]")
"""A condition on the sizes of inputs."""

_ARITHMETIC = """
    add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor
"""
_HIGHER_ORDER = """
    associative_scan cond flex_attention invoke_subgraph map_impl scan while_loop wrap_with_autocast
    wrap_with_set_grad_enabled
"""
_FILES = "from_file|save"
"""Operators of aten that read or write files."""
TARGET = re.compile(
    rf"""
    torch\.ops\.(?:aten|prims|quantized|quantized_decomposed|torchvision)
        \.(?!(?:{_FILES})\b)(?:_?[a-zA-Z]|__i?(?:and|or|xor|lshift|rshift)__)\w*(?:\.[a-zA-Z]\w*)?
    |torch\.ops\.higher_order\.(?:{"|".join(_HIGHER_ORDER.split())})
    |torch\.sym_[a-z_]+
    |math\.[a-z]\w*
    |_operator\.(?:{"|".join(_ARITHMETIC.split())})
    """,
    re.VERBOSE,
)


def program_fault(text: bytes) -> str | None:
    """Return what is wrong with a program of a torch export; none if nothing in it can run code."""
    if len(text) > PROGRAM_LIMIT:
        return f"a program of more than {PROGRAM_LIMIT >> 20} MiB"
    try:
        program = parse_json(text)
        version = program["schema_version"]["major"]
    except (ValueError, TypeError, KeyError):
        return "a program that cannot be read"
    if version != SCHEMA_MAJOR:
        return f"a program of format {shorten(version)}, where {SCHEMA_MAJOR} is known"
    return next(_faults("", program), None)


def _faults(field: str, value: Any) -> Iterator[str]:
    """Yield what could run code in `value`, which is in a field of that name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not NAME.fullmatch(key):
                yield f"the name {shorten(key)}"
            yield from _faults(key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _faults(field, inner)
    elif isinstance(value, str):
        yield from _text_faults(field, value)


def _text_faults(field: str, text: str) -> Iterator[str]:
    if field in SPECIFICATIONS:
        try:
            yield from _faults("", parse_json(text.encode()))
        except ValueError:
            yield f"{field} {shorten(text)}"
        return
    rule = RULES.get(field, NAME)
    if field in FREE_TEXT:
        return
    if len(text) > LONGEST_TEXT or not rule.fullmatch(text):
        yield f"{field or 'a name'} {shorten(text)}"


RULES = {"expr_str": EXPRESSION, "guards_code": GUARD, "target": TARGET, "as_operator": TARGET}
