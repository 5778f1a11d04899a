"""Check request-time features against the columns that they are computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.expressions.syntax import ExpressionError, names_of, parse
from falaj.records.expressions.types import FLOAT, guess_types, require_feature_type
from falaj.records.features import ColumnType, RequestFeature
from falaj.records.names import repeated_names


def resolve_features(
    features: Sequence[RequestFeature],
    known: Mapping[str, ColumnType],
    *,
    where: str,
    open_names: bool = False,
) -> tuple[RequestFeature, ...]:
    """Return `features` with the types of their inputs. Raise InvalidInput with all faults.

    An expression uses names of `known` and of features before it. With `open_names`, others are inputs of a request:
    of the type that a feature declares for them, or that the expressions tell.
    """
    faults = _name_faults(features, known, where)
    types = (_input_types(features, known, where, faults) if open_names else {}) | dict(known)
    found = []
    for each in features:
        node = parse(each.expression)
        try:
            kind = require_feature_type(node, types)
        except ExpressionError as error:
            faults.append(_fault(error, where, each))
            kind = FLOAT  # so that features after it have no fault for it
        else:
            inputs = {name: types[name] for name in names_of(node)}
            found.append(each.model_copy(update={"inputs": inputs}))
        types[each.name] = kind
    if faults:
        raise InvalidInput(f"{where}: request-time features are not valid", faults=faults[:50])
    return tuple(found)


def _fault(error: ExpressionError, where: str, feature: RequestFeature) -> Fault:
    place = f"{where}: {feature.name} = {shorten(feature.expression)}, character {error.at + 1}"
    return Fault(where=place, given=error.given, allowed=error.allowed, fix=error.fix)


def _name_faults(
    features: Sequence[RequestFeature], known: Mapping[str, ColumnType], where: str
) -> list[Fault]:
    own = {each.name for each in features}
    return [
        Fault(
            where=f"{where}: {name}",
            given="a name that is taken",
            allowed="a name that differs by more than case from other columns and request-time features",
        )
        for name in sorted(set(repeated_names([*known, *(each.name for each in features)])) & own)
    ]


def _input_types(
    features: Sequence[RequestFeature], known: Mapping[str, ColumnType], where: str, faults: list[Fault]
) -> dict[str, ColumnType]:
    """Return the types of names that are not known: as declared, else as the expressions tell."""
    found: dict[str, ColumnType] = {}
    made: set[str] = set()
    for each in features:
        guessed = guess_types(parse(each.expression)) | each.inputs
        for name, kind in guessed.items():
            if name in known or name in made:
                continue
            is_told = name in each.inputs or kind is not FLOAT
            if is_told and found.get(name, FLOAT) not in (FLOAT, kind):
                given = f"{name} as {found[name]} and as {kind}"
                faults.append(Fault(where=f"{where}: {each.name}", given=given, allowed="one type"))
            if is_told or name not in found:
                found[name] = kind
        made.add(each.name)
    return found
