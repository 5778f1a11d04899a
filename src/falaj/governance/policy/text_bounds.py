"""Bounds on Cedar text, checked before Cedar parses it: its parser recurses, and a stack overflow ends the process.

Measured with cedarpy 4: a bracket takes 13 KiB of stack, an operator of a chain 0.5 KiB, and a chain is written with a
bracket per operator when a parsed policy becomes text. Depth 60 fits in a stack of 1 MiB; the API's threads have 8 MiB,
or 2 MiB where the limit of the stack is unlimited. Cedar's JSON allows no more than depth 60 either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from falaj.errors import PolicyInvalid

MAX_DEPTH = 60
MAX_TOKENS = 50_000
MAX_BYTES = 800_000

_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n\r]*)
    |(?P<text>"(?:\\.|[^"\\])*")
    |(?P<word>[A-Za-z_]\w*|\d+)
    |(?P<sign>&&|\|\||[=!<>]=|::|.)""",
    re.VERBOSE | re.DOTALL,
)

_STRENGTH = (
    {"when": 0, "unless": 0, "if": 1, "||": 2, "&&": 3}
    | dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "in", "like", "has", "is"), 4)
    | {"+": 5, "-": 5, "*": 6, "!": 7, ".": 8}
)
"""How strongly an operator binds: one that binds less ends the chains of those that bind more."""

_STRONGEST = 8
_OPENING, _CLOSING, _ENDING = frozenset("([{"), frozenset(")]}"), frozenset(",;@")
_BRANCHES = frozenset({"then", "else"})


def require_bounded(name: str, text: str) -> None:
    """Raise PolicyInvalid if `text` is longer or nested more deeply than Cedar can safely parse."""
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise _beyond(name, f"{size} bytes", f"up to {MAX_BYTES} bytes", "split the policy")
    depth, tokens = measure(text)
    if tokens > MAX_TOKENS:
        raise _beyond(
            name, f"more than {MAX_TOKENS} tokens", f"up to {MAX_TOKENS} tokens", "split the policy"
        )
    if depth > MAX_DEPTH:
        raise _beyond(
            name,
            "brackets or operators nested too deeply",
            f"depth {MAX_DEPTH}: brackets and the operators of a chain count",
            'split the policy, or compare with a set: [User::"a", User::"b"].contains(principal)',
        )


def measure(text: str) -> tuple[int, int]:
    """Return how deeply the expressions of `text` nest, at most, and its tokens; stop where either is too large."""
    levels, tokens, depth = [_Level()], 0, 0
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "skipped":
            continue
        tokens += 1
        if kind == "text":
            continue
        if token in _OPENING:
            levels.append(_Level())
        elif token in _CLOSING and len(levels) > 1:
            levels[-2].hold(1 + levels.pop().depth())
        elif token in _ENDING:
            levels[-1].end_operand()
        elif token in _STRENGTH:
            levels[-1].chain(_STRENGTH[token])
        elif token in _BRANCHES:
            levels[-1].end_chains(stronger_than=_STRENGTH["if"])
        depth = max(depth, len(levels), levels[-1].depth())
        if depth > MAX_DEPTH or tokens > MAX_TOKENS:
            return depth, tokens
    while len(levels) > 1:  # brackets that are never closed
        levels[-2].hold(1 + levels.pop().depth())
    return max(depth, levels[0].depth()), tokens


@dataclass
class _Level:
    """What stands between two brackets. Its depth is the sum of the longest chains of each strength, and of the deepest
    bracket in it: no path through its tree is longer."""

    chains: list[int] = field(default_factory=lambda: [0] * (_STRONGEST + 1))
    longest: list[int] = field(default_factory=lambda: [0] * (_STRONGEST + 1))
    inner: int = 0
    before: int = 0

    def chain(self, strength: int) -> None:
        self.chains[strength] += 1
        self.longest[strength] = max(self.longest[strength], self.chains[strength])
        self.end_chains(stronger_than=strength)

    def end_chains(self, *, stronger_than: int) -> None:
        for strength in range(stronger_than + 1, _STRONGEST + 1):
            self.chains[strength] = 0

    def hold(self, depth: int) -> None:
        """Take in a bracket of `depth`; one that follows an operand is an index or a call, and chains as a dot does."""
        self.inner = max(self.inner, depth)
        self.chain(_STRONGEST)

    def end_operand(self) -> None:
        """Start anew after a comma, a semicolon or an annotation: what follows is a sibling."""
        self.before = self.depth()
        self.chains = [0] * (_STRONGEST + 1)
        self.longest = [0] * (_STRONGEST + 1)
        self.inner = 0

    def depth(self) -> int:
        return max(self.before, sum(self.longest) + self.inner)


def _beyond(name: str, given: str, allowed: str, fix: str) -> PolicyInvalid:
    return PolicyInvalid.at(name, given=given, allowed=allowed, fix=fix)
