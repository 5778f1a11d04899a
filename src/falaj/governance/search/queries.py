"""Searches: conditions and orders as SQL, and pages that begin behind an object in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Select,
    and_,
    func,
    literal,
    not_,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from falaj.errors import InvalidInput
from falaj.governance.objects import LISTED, stored_object
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.pagination import VisiblePage, visible_page
from falaj.governance.search.filters import (
    Condition,
    Entity,
    Order,
    Vocabulary,
    parse_filter,
    parse_orders,
)
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.tracking import Lifecycle

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


@dataclass(frozen=True)
class KeyedValues:
    """A table of values by owner and key: tags, parameters or metrics.

    `several`: an owner may have more than one value of a key; of those the highest counts in an order.
    """

    table: FromClause
    owner: str
    value: str = "value"
    several: bool = False


@dataclass(frozen=True)
class Searched:
    """A kind of object that is searched: its query, its attributes by name, and where its keyed values are.

    `tags` are those that stand for attributes, and `tags_besides` those that an attribute may have, too; `fields` has
    tables whose columns conditions name; `deleted` are the moments of which one is set if it is deleted.
    """

    kind: str
    words: Vocabulary
    query: Select[Any]
    id: ColumnElement[str]
    attributes: Mapping[str, ColumnElement[Any]]
    deleted: tuple[ColumnElement[Any], ...] = ()
    values: Mapping[Entity, KeyedValues] = field(default_factory=dict)
    fields: Mapping[Entity, FromClause] = field(default_factory=dict)
    tags: Mapping[str, ColumnElement[Any]] = field(default_factory=dict)
    tags_besides: Mapping[str, ColumnElement[Any]] = field(default_factory=dict)


def listed_query(*columns: ColumnElement[Any]) -> Select[Any]:
    """Return the query of stored objects that are not deleted, with further columns."""
    return select(*LISTED, *columns).where(objects.c.deleted_at.is_(None))


class Scope(NamedTuple):
    """Where to search: conditions, and the id by which an index has the objects in order."""

    conditions: tuple[ColumnElement[bool], ...]
    id: ColumnElement[str]
    workspace: str | None


def search_scope(
    searched: Searched, named: Sequence[StoredObject], target: StoredObject, *, of: ColumnElement[Any]
) -> Scope:
    """Return the scope of the `named` experiments, by their column `of`; without any that of the whole workspace."""
    if not named:
        inside = objects.c.workspace == target.home, objects.c.kind == searched.kind
        return Scope(inside, objects.c.id, target.home)
    places = {each.workspace for each in named}
    only = of == named[0].id if len(named) == 1 else of.in_([each.id for each in named])
    return Scope((only,), searched.id, places.pop() if len(places) == 1 else None)


def search(
    gate: Gate,
    searched: Searched,
    scope: Scope,
    *,
    where: str,
    order_by: Sequence[str],
    view: Lifecycle,
    after: str,
    limit: int,
) -> VisiblePage:
    """Return a page of the objects in `scope` that the caller may see and that meet the conditions.

    Without an order the newest come first. A page begins behind an object: what comes or goes moves nothing else.
    """
    tx = current_call().tx
    conditions = [condition_clause(searched, each) for each in parse_filter(where, searched.words)]
    orders = _Orders(searched, parse_orders(order_by, searched.words), scope.id)
    query = orders.join(searched.query).where(*scope.conditions, *_lifecycle(searched, view), *conditions)

    def fetch(
        visible: Sequence[ColumnElement[bool]], position: str, count: int
    ) -> list[tuple[StoredObject, Any]]:
        found = query.where(*visible)
        if position:
            found = found.where(orders.behind(tx, position))
        result = tx.execute(found.order_by(*orders.clauses()).limit(count))
        keys = [*result.keys()]
        rows = [dict(zip(keys, row, strict=True)) for row in result]
        return [(stored_object(row), row) for row in rows]

    return visible_page(
        gate, fetch, after=after, limit=limit, kinds=[searched.kind], workspace=scope.workspace
    )


def _lifecycle(searched: Searched, view: Lifecycle) -> list[ColumnElement[bool]]:
    if view == "all":
        return []
    active: list[ColumnElement[bool]] = [column.is_(None) for column in searched.deleted]
    return active if view == "active" else [not_(and_(*active))]


# ------------------------------------------------------------------------------------------- conditions


def condition_clause(searched: Searched, condition: Condition) -> ColumnElement[bool]:
    """Return a condition as SQL. An object without the key meets no comparison of it, not even '!='."""
    entity, key = condition.entity, condition.key
    if entity == "attributes":
        return _compared(searched.attributes[key], condition)
    if entity == "tags" and key in searched.tags:
        return _compared(searched.tags[key], condition)
    if entity in searched.fields:
        table = searched.fields[entity]
        return _has(table, table.c["run"] == searched.id, _compared(table.c[key], condition))
    kept = _kept(searched, entity, key, where="filter")
    named = kept.table.c[kept.owner] == searched.id, kept.table.c["key"] == key
    if condition.operator in ("IS NULL", "IS NOT NULL"):
        known = _has(kept.table, *named)
        return known if condition.operator == "IS NOT NULL" else not_(known)
    found = _has(kept.table, *named, _compared(kept.table.c[kept.value], condition))
    if entity == "tags" and key in searched.tags_besides:
        return or_(found, _compared(searched.tags_besides[key], condition))
    return found


def _kept(searched: Searched, entity: Entity, key: str, *, where: str) -> KeyedValues:
    if entity not in searched.values:
        raise InvalidInput.at(where, given=f"{entity}.{key}", allowed=f"no {entity} of a {searched.kind}")
    return searched.values[entity]


def _has(table: FromClause, *met: ColumnElement[bool]) -> ColumnElement[bool]:
    return select(literal(1)).select_from(table).where(*met).correlate_except(table).exists()


def _compared(column: ColumnElement[Any], condition: Condition) -> ColumnElement[bool]:
    operator, value = condition.operator, condition.value
    match operator, value:
        case (("IS NULL" | "IS NOT NULL"), _):
            return column.is_(None) if operator == "IS NULL" else column.is_not(None)
        case "LIKE", str():
            return CaseSensitiveLike(column, literal(value))
        case "ILIKE", str():
            return column.ilike(value)
        case "IN", tuple():
            return column.in_(value)
        case "NOT IN", tuple():
            return column.not_in(value)
        case _, (int() as start, int() as end):
            return _moment(type_coerce(column, BigInteger), operator, start, end)
        case _, float():
            return _COMPARE[operator](type_coerce(column, Double), value)  # type: ignore[no-any-return]
        case _:
            return _COMPARE[operator](column, value)  # type: ignore[no-any-return]


def _moment(column: ColumnElement[int], operator: str, start: int, end: int) -> ColumnElement[bool]:
    """Compare a moment with all of a millisecond, which is as exact as clients of MLflow are."""
    match operator:
        case "=":
            return column.between(start, end)
        case "!=":
            return not_(column.between(start, end))
        case ">" | "<=":
            return _COMPARE[operator](column, end)  # type: ignore[no-any-return]
        case _:
            return _COMPARE[operator](column, start)  # type: ignore[no-any-return]


class CaseSensitiveLike(FunctionElement[bool]):
    """LIKE that tells upper from lower case on every database: on SQLite it does not, but GLOB does."""

    inherit_cache = True


@compiles(CaseSensitiveLike)
def _compile_like(element: Any, compiler: Any, **options: Any) -> str:
    column, pattern = element.clauses
    return str(compiler.process(column.like(pattern), **options))


@compiles(CaseSensitiveLike, "sqlite")
def _compile_glob(element: Any, compiler: Any, **options: Any) -> str:
    column, pattern = element.clauses
    for plain, escaped in (("[", "[[]"), ("*", "[*]"), ("?", "[?]"), ("%", "*"), ("_", "?")):
        pattern = func.replace(pattern, plain, escaped)
    return str(compiler.process(column.op("GLOB", is_comparison=True)(pattern), **options))


# ---------------------------------------------------------------------------------------------- orders


class _Orders:
    """What objects are sorted by; at last by id, the newest first."""

    def __init__(self, searched: Searched, orders: Sequence[Order], ident: ColumnElement[str]) -> None:
        self._searched = searched
        self._id = ident
        self._orders = orders
        self._joins: list[tuple[Any, ColumnElement[bool]]] = []
        self._values = [self._value(each) for each in orders]

    def _value(self, order: Order) -> ColumnElement[Any]:
        searched, key = self._searched, order.key
        if order.entity == "attributes":
            return searched.attributes[key]
        if order.entity == "tags" and key in searched.tags:
            return searched.tags[key]
        kept = _kept(searched, order.entity, key, where="order_by")
        if kept.several:
            table = kept.table
            highest = select(func.max(table.c[kept.value])).where(
                table.c[kept.owner] == searched.id, table.c["key"] == key
            )
            return highest.correlate_except(table).scalar_subquery()
        joined = kept.table.alias()
        self._joins.append((joined, and_(joined.c[kept.owner] == searched.id, joined.c["key"] == key)))
        return joined.c[kept.value]

    def join(self, query: Select[Any]) -> Select[Any]:
        for table, on in self._joins:
            query = query.outerjoin(table, on)
        return query

    def clauses(self) -> list[ColumnElement[Any]]:
        found: list[ColumnElement[Any]] = []
        for order, value in zip(self._orders, self._values, strict=True):
            found += [value.is_(None), value.desc() if order.descending else value.asc()]
        return [*found, self._id.desc()]

    def behind(self, tx: Transaction, position: str) -> ColumnElement[bool]:
        """Return the condition that an object comes behind the one with the id `position`, as that is now."""
        ident = self._id
        if not self._values:
            return ident < position
        labelled = [value.label(f"key{number}") for number, value in enumerate(self._values)]
        query = self.join(self._searched.query.with_only_columns(*labelled)).where(ident == position)
        row = tx.execute(query).one_or_none()
        if row is None:
            raise InvalidInput.at(
                "after", given="a page behind an object that is gone", allowed="begin with the first page"
            )
        met, same = [], []
        for order, value, there in zip(self._orders, self._values, row, strict=True):
            if there is None:
                same.append(value.is_(None))
                continue
            beyond = value < there if order.descending else value > there
            met.append(and_(*same, or_(value.is_(None), beyond)))
            same.append(value == there)
        return or_(*met, and_(*same, ident < position))
