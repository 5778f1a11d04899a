"""MLflow's filter language: reads conditions and orders as typed values, or says where they are wrong. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple, NoReturn

from falaj.errors import InvalidInput
from falaj.ports.metadata import to_micros

Entity = Literal["metrics", "params", "tags", "attributes", "datasets"]
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "LIKE", "ILIKE", "IN", "NOT IN", "IS NULL", "IS NOT NULL"]

MOST_CONDITIONS = 100
MOST_VALUES = 1000
"""Values of one IN list."""

ENTITIES: dict[str, Entity] = {
    **dict.fromkeys(("metrics", "metric"), "metrics"),
    **dict.fromkeys(("params", "param", "parameters", "parameter"), "params"),
    **dict.fromkeys(("tags", "tag"), "tags"),
    **dict.fromkeys(("attributes", "attribute", "attr", "run"), "attributes"),
    **dict.fromkeys(("datasets", "dataset"), "datasets"),
}


class ValueKind(Enum):
    """What an attribute is compared with."""

    TEXT = "a text in quotes"
    STATUS = "a status in quotes"
    TIME = "milliseconds since 1970, or a moment in quotes like '2026-05-03T12:00Z'"
    NUMBER = "a number"


NUMBER_OPERATORS: tuple[Operator, ...] = ("=", "!=", "<", "<=", ">", ">=")
TEXT_OPERATORS: tuple[Operator, ...] = ("=", "!=", "LIKE", "ILIKE", "IN", "NOT IN")
KEYED_OPERATORS: tuple[Operator, ...] = (*TEXT_OPERATORS, "IS NULL", "IS NOT NULL")
DATASET_FIELDS = ("name", "digest", "context")


@dataclass(frozen=True)
class Vocabulary:
    """What conditions on one kind of object can name: the entities, and attributes with the column of each."""

    entities: frozenset[Entity]
    attributes: Mapping[str, str]
    kinds: Mapping[str, ValueKind] = field(default_factory=dict)

    def kind(self, column: str) -> ValueKind:
        return self.kinds.get(column, ValueKind.TEXT)


@dataclass(frozen=True)
class Condition:
    """One comparison; `key` of an attribute is its column. Moments are ranges of microseconds: from, and up to."""

    entity: Entity
    key: str
    operator: Operator
    value: float | str | tuple[str, ...] | tuple[int, int] | None = None


@dataclass(frozen=True)
class Order:
    """What to sort by; what has no value comes last either way."""

    entity: Entity
    key: str
    descending: bool = False


def parse_filter(text: str, words: Vocabulary) -> tuple[Condition, ...]:
    """Return the conditions that `text` joins by AND; InvalidInput names the position of what is wrong."""
    parser = _Parser("where", text, words)
    return parser.conditions() if parser.tokens[0].kind != "end" else ()


def parse_orders(texts: Sequence[str], words: Vocabulary) -> tuple[Order, ...]:
    """Return the orders, each like `metrics.auc DESC`."""
    return tuple(_Parser(f"order_by.{number}", text, words).order() for number, text in enumerate(texts))


# ---------------------------------------------------------------------------------------------- parser


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf(?:inity)?)\b", re.IGNORECASE)
_LEXER = re.compile(
    r"""(?P<space>\s+)
    |(?P<number>(?<![\w`"])[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")*"|`[^`]*`)
    |(?P<operator><=|>=|!=|<>|=|<|>)
    |(?P<mark>[(),.])
    |(?P<word>[^\s'"`<>=!(),.]+)""",
    re.VERBOSE,
)


def _tokens(where: str, text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _LEXER.match(text, at)
        if match is None:
            closed = "a closing quote" if text[at] in "'\"`" else "a condition like metrics.auc > 0.9"
            _refuse(where, text, at, closed)
        if match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match.group(), at))
        at = match.end()
    return [*found, _Token("end", "", len(text))]


def _refuse(where: str, text: str, at: int, allowed: str) -> NoReturn:
    rest = text[at : at + 40]
    given = f"{rest!r} at position {at + 1}" if rest else f"the end at position {at + 1}"
    raise InvalidInput.at(where, given=given, allowed=allowed)


class _Parser:
    """Reads one filter or order, word by word."""

    def __init__(self, where: str, text: str, words: Vocabulary) -> None:
        self._where, self._text, self._words = where, text, words
        self.tokens = _tokens(where, text)
        self._next = 0

    def conditions(self) -> tuple[Condition, ...]:
        found = [self._condition()]
        while self._take_word("AND"):
            found.append(self._condition())
            if len(found) > MOST_CONDITIONS:
                self._fail(f"at most {MOST_CONDITIONS} conditions")
        if self._peek().kind != "end":
            self._fail("AND and another condition, or the end; there is no OR and there are no parentheses")
        return tuple(found)

    def order(self) -> Order:
        entity, key = self._identifier()
        descending = self._take_word("DESC")
        if not descending:
            self._take_word("ASC")
        if self._peek().kind != "end":
            self._fail("ASC, DESC or the end")
        return Order(entity, key, descending)

    def _condition(self) -> Condition:
        entity, key = self._identifier()
        at = self._peek()
        operator = self._operator()
        allowed = self._allowed(entity, key)
        if operator not in allowed:
            self._fail(f"one of {', '.join(allowed)} for {entity}.{key}", at)
        if operator in ("IS NULL", "IS NOT NULL"):
            return Condition(entity, key, operator)
        if operator in ("IN", "NOT IN"):
            return Condition(entity, key, operator, self._list(entity, key))
        return Condition(entity, key, operator, self._value(entity, key))

    def _allowed(self, entity: Entity, key: str) -> tuple[Operator, ...]:
        if entity == "metrics":
            return NUMBER_OPERATORS
        if entity == "attributes":
            counted = self._words.kind(key) in (ValueKind.TIME, ValueKind.NUMBER)
            return NUMBER_OPERATORS if counted else TEXT_OPERATORS
        return TEXT_OPERATORS if entity == "datasets" else KEYED_OPERATORS

    def _identifier(self) -> tuple[Entity, str]:
        start = self._peek()
        if start.kind not in ("word", "quoted"):
            self._fail(f"a name like {self._names()}")
        first = self._part()
        entity = ENTITIES.get(first.casefold()) if start.kind == "word" else None
        if entity is None or not self._take_mark("."):
            return "attributes", self._attribute(self._rest(first), start)
        key_at = self._peek()
        if key_at.kind not in ("word", "quoted", "number"):
            self._fail(f"a name behind {first}., in quotes or backticks if it has spaces")
        key = self._rest(self._part())
        if entity not in self._words.entities:
            self._fail(f"a name like {self._names()}", start)
        if entity == "attributes":
            return entity, self._attribute(key, key_at)
        if entity == "datasets" and key not in DATASET_FIELDS:
            self._fail(f"datasets.{', datasets.'.join(DATASET_FIELDS)}", key_at)
        return entity, key

    def _part(self) -> str:
        token = self._take()
        return token.text[1:-1].replace('""', '"') if token.kind == "quoted" else token.text

    def _rest(self, first: str) -> str:
        """Return a name with the further parts that follow it without spaces: `a.b.c`."""
        found = first
        while self._peek().text == "." and self._is_joined(self._next) and self._is_joined(self._next + 1):
            self._take()
            found += "." + self._part()
        return found

    def _is_joined(self, index: int) -> bool:
        """Tell whether there is no space before a token."""
        before, token = self.tokens[index - 1], self.tokens[index]
        return token.kind != "end" and before.at + len(before.text) == token.at

    def _attribute(self, name: str, at: _Token) -> str:
        column = self._words.attributes.get(name.casefold())
        if column is None:
            self._fail(f"a name like {self._names()}", at)
        return column

    def _names(self) -> str:
        keyed = (
            f"{entity}.KEY" for entity in ("metrics", "params", "tags") if entity in self._words.entities
        )
        named = (name for name in self._words.attributes if " " not in name)
        datasets = ["datasets.name"] if "datasets" in self._words.entities else []
        return ", ".join([*keyed, *datasets, *named])

    def _operator(self) -> str:
        token = self._take()
        if token.kind == "operator":
            return "!=" if token.text == "<>" else token.text
        word = token.text.upper() if token.kind == "word" else ""
        if word in ("LIKE", "ILIKE", "IN"):
            return word
        if word == "NOT" and self._take_word("IN"):
            return "NOT IN"
        if word == "IS":
            negated = self._take_word("NOT")
            if self._take_word("NULL"):
                return "IS NOT NULL" if negated else "IS NULL"
        self._fail(
            "a comparison: =, !=, <, <=, >, >=, LIKE, ILIKE, IN, NOT IN, IS NULL or IS NOT NULL", token
        )

    def _list(self, entity: Entity, key: str) -> tuple[str, ...]:
        if not self._take_mark("("):
            self._fail("a list like ('a', 'b')")
        found = [self._text_value(entity, key)]
        while self._take_mark(","):
            found.append(self._text_value(entity, key))
            if len(found) > MOST_VALUES:
                self._fail(f"at most {MOST_VALUES} values")
        if not self._take_mark(")"):
            self._fail("',' and another value, or ')'")
        return tuple(found)

    def _value(self, entity: Entity, key: str) -> float | str | tuple[int, int]:
        if entity == "metrics":
            return self._number()
        if entity == "attributes" and self._words.kind(key) is ValueKind.TIME:
            return self._moment()
        if entity == "attributes" and self._words.kind(key) is ValueKind.NUMBER:
            return self._number()
        return self._text_value(entity, key)

    def _text_value(self, entity: Entity, key: str) -> str:
        token = self._take()
        if token.kind == "text":
            found = token.text[1:-1].replace("''", "'")
        elif token.kind == "quoted" and token.text[0] == '"':
            found = token.text[1:-1].replace('""', '"')
        else:
            self._fail("a text in quotes, like 'adam'", token)
        is_status = entity == "attributes" and self._words.kind(key) is ValueKind.STATUS
        return found.lower() if is_status else found

    def _number(self) -> float:
        token = self._take()
        text = token.text[1:-1] if token.kind in ("text", "quoted") else token.text
        if _NUMBER.fullmatch(text) is None:
            self._fail("a number, like 0.9", token)
        return float(text)

    def _moment(self) -> tuple[int, int]:
        token = self._take()
        try:
            if token.kind == "number":
                start = int(float(token.text) * 1000) if "." in token.text else int(token.text) * 1000
                if abs(start) < 2**62:
                    return start, start + 999
            elif token.kind in ("text", "quoted"):
                moment = to_micros(datetime.fromisoformat(token.text[1:-1]))
                return moment, moment
        except (ValueError, TypeError):  # not a moment, or one without its zone
            pass
        self._fail(ValueKind.TIME.value, token)

    def _peek(self) -> _Token:
        return self.tokens[self._next]

    def _take(self) -> _Token:
        token = self.tokens[self._next]
        self._next = min(self._next + 1, len(self.tokens) - 1)
        return token

    def _take_word(self, word: str) -> bool:
        token = self._peek()
        if token.kind == "word" and token.text.upper() == word:
            self._take()
            return True
        return False

    def _take_mark(self, mark: str) -> bool:
        if self._peek().text == mark and self._peek().kind == "mark":
            self._take()
            return True
        return False

    def _fail(self, allowed: str, token: _Token | None = None) -> NoReturn:
        _refuse(self._where, self._text, (token or self._peek()).at, allowed)
