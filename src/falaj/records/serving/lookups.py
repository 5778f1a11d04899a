"""Feature lookup: which features an endpoint reads from views, and what becomes of those without a value."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.features import ColumnType, RequestFeatures
from falaj.records.names import Name, Reference
from falaj.records.record import Record
from falaj.records.serving.tensors import Datatype, Finite, TensorName

MissingRule = Finite | Literal["reject", "impute"] | None
"""What becomes of a feature without a value: a number; the request is rejected; an imputed value; none: NaN."""


class ViewLookup(Record):
    """Features of `view`, by the key in the request's inputs `keys`; unless given, those named like its key columns.

    A model calls them `name__feature`, where `name` is the view's unless given. `missing` is the rule for features of
    this view without a value, unless it is that of the lookup. Values older than `max_age` count as missing.
    """

    view: Reference
    keys: Annotated[tuple[TensorName, ...], Field(max_length=8)] = ()
    name: Name | None = None
    features: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Which features the view has; the platform fills this in."""
    types: Annotated[tuple[ColumnType, ...], Field(max_length=1000)] = ()
    """Their types; the platform fills this in."""
    key_types: Annotated[tuple[Datatype, ...], Field(max_length=8)] = ()
    """The types of `keys` in a request; the platform fills this in."""
    missing: MissingRule = None
    max_age: Annotated[timedelta, Field(gt=timedelta(0))] | None = None


class VersionLookup(Record):
    """What the training set of a version says of its features; the platform fills this in when it is deployed.

    `request_features` are computed as they were for training. `imputed` are what features without a value get where the
    rule is to impute: the same on all replicas. `source` says where these come from.
    """

    version: Name
    request_features: RequestFeatures = ()
    imputed: Annotated[dict[TensorName, Finite], Field(max_length=10_000)] = {}
    source: str = ""


class Lookup(Record):
    """The assembly of a model's one input from feature views and the request's other inputs.

    Its columns are `features`, in the model's order (none: as the version says). Each is computed, if it is one of the
    request-time features, comes from the view that has it, or else from the request's input of that name. A feature
    that is not known gets its value in `defaults`, by its name among the model's columns; without one, the rule of its
    view decides, else `missing`: a number (none: NaN), the value in `imputed`, by default a typical one of the training
    set, or the request is rejected. A feature of the request that has a default may be left out.

    `request_features` are those of the version's training set, and these; an expression sees values as they are stored,
    and not what replaces them where they are missing.
    """

    views: Annotated[tuple[ViewLookup, ...], Field(min_length=1, max_length=50)]
    features: Annotated[tuple[TensorName, ...], Field(max_length=10_000)] = ()
    missing: MissingRule = None
    defaults: Annotated[dict[TensorName, Finite], Field(max_length=10_000)] = {}
    imputed: Annotated[dict[TensorName, Finite], Field(max_length=10_000)] = {}
    request_features: RequestFeatures = ()
    versions: Annotated[tuple[VersionLookup, ...], Field(max_length=1000)] = ()
    """What differs between the versions that are served; the platform fills this in."""

    def version(self, number: str) -> VersionLookup:
        """Return what is particular to a version."""
        return next((each for each in self.versions if each.version == number), VersionLookup(version=number))


class MissingReason(StrEnum):
    """Why a feature has no value: no row of the key, a row older than the view's ttl or than the endpoint allows, null
    in the row, or not materialized with the view's newest version."""

    UNKNOWN_KEY = "unknown_key"
    EXPIRED = "expired"
    STALE = "stale"
    NULL = "null"
    NOT_ONLINE = "not_online"


class MissingFeatures(Record):
    """Features that a lookup did not find for a row of a request; the model got the endpoint's defaults for them."""

    row: int
    view: str
    key: str
    reason: MissingReason
    features: tuple[str, ...]
