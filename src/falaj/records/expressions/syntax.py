"""The grammar of expressions: arithmetic, comparisons, and, or, not, and a short list of functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

MAX_CHARACTERS = 2000
MAX_DEPTH = 32
MAX_NODES = 200
MAX_NAME = 256
LARGEST_INTEGER = 2**63 - 1

FUNCTIONS = {
    "abs": (1, 1),
    "ceil": (1, 1),
    "coalesce": (2, 8),
    "exp": (1, 1),
    "floor": (1, 1),
    "hour": (1, 1),
    "isnull": (1, 1),
    "log": (1, 1),
    "log1p": (1, 1),
    "max": (2, 8),
    "min": (2, 8),
    "round": (1, 1),
    "sqrt": (1, 1),
    "weekday": (1, 1),
    "where": (3, 3),
}
"""Functions, and how many arguments they take: at least, and at most."""

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
_BINARY = {
    "or": 1,
    "and": 2,
    **dict.fromkeys(COMPARISONS, 4),
    "+": 5,
    "-": 5,
    "*": 6,
    "/": 6,
    "%": 6,
    "**": 8,
}
"""Operators by how strongly they bind; `not` binds with 3, the sign with 7."""
_NOT, _SIGN = 3, 7
_WORDS = frozenset({"and", "or", "not", "true", "false"})

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |"(?P<quoted>[^"]*)"
    |'(?P<text>(?:[^']|'')*)'
    |(?P<sign>\*\*|==|!=|<=|>=|[-+*/%<>=(),])""",
    re.VERBOSE,
)


class ExpressionError(ValueError):
    """An expression that is not valid: at which character, what was given, what is allowed, and the fix."""

    def __init__(self, at: int, given: str, allowed: str, fix: str | None = None) -> None:
        self.at, self.given, self.allowed, self.fix = at, given, allowed, fix
        super().__init__(f"character {at + 1}: given {given}, allowed {allowed}{'; ' + fix if fix else ''}")


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, a text, or true or false, and the character at which it begins."""

    value: int | float | bool | str
    at: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A name: an input of the request, a looked up feature, or an earlier request-time feature."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Application:
    """A function or an operator with its arguments; the sign of a number is `negative`."""

    function: str
    arguments: tuple[Node, ...]
    at: int


Node = Constant | Variable | Application


@lru_cache(maxsize=4096)
def parse(text: str) -> Node:
    """Return the tree of an expression. Raise ExpressionError with the character at which it is not valid."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(
            MAX_CHARACTERS, f"{len(text)} characters", f"at most {MAX_CHARACTERS}", "divide it into several"
        )
    return _Parser(text).whole()


def names_of(node: Node) -> tuple[str, ...]:
    """Return the names that an expression uses, each once, in their order."""
    return tuple(dict.fromkeys(_names(node)))


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, Variable):
        yield node.name
    elif isinstance(node, Application):
        for argument in node.arguments:
            yield from _names(argument)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            if text[at] in "\"'":
                raise ExpressionError(
                    at, f"{text[at]} without an end", "a text or name that ends in the same"
                )
            allowed = "numbers, names, 'texts', + - * / % ** == != < <= > >= and ( ) ,"
            raise ExpressionError(at, repr(text[at]), allowed)
        kind = str(found.lastgroup)
        if kind != "space":
            yield _Token(kind, found[kind], at)
        at = found.end()


class _Parser:
    """Precedence climbing over the tokens; depth and number of nodes are bounded."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), _Token("end", "", len(text))]
        self._next = 0
        self._nodes = 0

    def whole(self) -> Node:
        found = self._expression(0, 0)
        if self._token.kind != "end":
            self._refuse("an operator, or the end")
        return found

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += token.kind != "end"
        return token

    def _refuse(self, allowed: str, fix: str | None = None) -> NoReturn:
        token = self._token
        given = "the end of the expression" if token.kind == "end" else repr(token.text[:40])
        raise ExpressionError(token.at, given, allowed, fix)

    def _expression(self, strength: int, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._refuse_size(f"more than {MAX_DEPTH} levels of nesting", f"at most {MAX_DEPTH}")
        left = self._operand(depth)
        while (binds := self._strength()) > strength:
            operator = self._take()
            name = "==" if operator.text == "=" else operator.text
            right = self._expression(binds - (name == "**"), depth + 1)  # 2 ** 3 ** 2 is 2 ** 9
            left = self._made(Application(name, (left, right), operator.at))
            if name in COMPARISONS and self._strength() == binds:
                self._refuse("one comparison", "write a < b and b < c")
        return left

    def _strength(self) -> int:
        token = self._token
        if token.kind == "sign":
            return _BINARY.get("==" if token.text == "=" else token.text, 0)
        return _BINARY.get(token.text, 0) if token.kind == "word" else 0

    def _operand(self, depth: int) -> Node:
        token = self._token
        if token.kind == "sign" and token.text == "-":
            self._take()
            return self._made(Application("negative", (self._expression(_SIGN, depth + 1),), token.at))
        if token.kind == "word" and token.text == "not":
            self._take()
            return self._made(Application("not", (self._expression(_NOT, depth + 1),), token.at))
        if token.kind == "sign" and token.text == "(":
            self._take()
            inner = self._expression(0, depth + 1)
            self._expect(")")
            return inner
        if token.kind == "word" and token.text not in _WORDS and self._follows("("):
            return self._function(depth)
        return self._made(self._atom())

    def _follows(self, sign: str) -> bool:
        following = self._tokens[self._next + 1]
        return following.kind == "sign" and following.text == sign

    def _function(self, depth: int) -> Node:
        name = self._token
        if name.text not in FUNCTIONS:
            fix = {"if": "write where(condition, then, else)"}.get(name.text)
            self._refuse(f"the functions {', '.join(FUNCTIONS)}", fix)
        self._take()
        self._take()
        arguments = [self._expression(0, depth + 1)]
        while self._token.kind == "sign" and self._token.text == ",":
            self._take()
            arguments.append(self._expression(0, depth + 1))
        self._expect(")")
        least, most = FUNCTIONS[name.text]
        if not least <= len(arguments) <= most:
            allowed = f"{least}" if least == most else f"{least} to {most}"
            given = f"{len(arguments)} argument{'s' * (len(arguments) != 1)} of {name.text}"
            raise ExpressionError(name.at, given, allowed)
        return self._made(Application(name.text, tuple(arguments), name.at))

    def _atom(self) -> Node:
        token = self._token
        if token.kind == "number":
            value = _number(token)
            self._take()
            return Constant(value, token.at)
        if token.kind == "text":
            self._take()
            return Constant(token.text.replace("''", "'"), token.at)
        if token.kind == "quoted":
            if not 0 < len(token.text) <= MAX_NAME or not token.text.isprintable():
                self._refuse(f'a name of 1 to {MAX_NAME} printable characters between " and "')
            self._take()
            return Variable(token.text, token.at)
        if token.kind != "word" or token.text in _WORDS - {"true", "false"}:
            self._refuse("a number, a name, a 'text', a function or (")
        if len(token.text) > MAX_NAME:
            self._refuse(f"a name of at most {MAX_NAME} characters")
        self._take()
        is_word = token.text in _WORDS
        return Constant(token.text == "true", token.at) if is_word else Variable(token.text, token.at)

    def _expect(self, sign: str) -> None:
        if self._token.kind != "sign" or self._token.text != sign:
            self._refuse(f"an operator, or '{sign}'")
        self._take()

    def _made(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._refuse_size(f"more than {MAX_NODES} names, numbers and operators", f"at most {MAX_NODES}")
        return node

    def _refuse_size(self, given: str, allowed: str) -> NoReturn:
        raise ExpressionError(self._token.at, given, allowed, "divide it into several request-time features")


def _number(token: _Token) -> int | float:
    if token.text.isdigit():
        value = int(token.text) if len(token.text) <= 20 else LARGEST_INTEGER + 1
        if value > LARGEST_INTEGER:
            fix = "write it with a decimal point, as a float" if len(token.text) <= 20 else None
            given = f"the number {token.text[:40]}"
            raise ExpressionError(token.at, given, f"integers up to {LARGEST_INTEGER}", fix)
        return value
    number = float(token.text[:64]) if len(token.text) <= 64 else float("inf")
    if number in (float("inf"), float("-inf")):
        raise ExpressionError(token.at, f"the number {token.text[:40]}", "numbers that a 64-bit float holds")
    return number
