"""Tables of serving."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime


def _endpoint_key() -> Column[str]:
    return Column("endpoint", Text, ForeignKey("governance_objects.id"), primary_key=True)


revision = Table(  # one row; it grows with every change of an endpoint, and servers poll it
    "serving_revision",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    info=UNRECORDED,
)

endpoints = Table(
    "serving_endpoints",
    METADATA,
    object_key(),
    Column("model", Text, nullable=False),
    Column("routes", JsonText, nullable=False),
    Column("previous", JsonText, nullable=False),
    Column("lookup", JsonText),
    Column("scoring", Text),
    Column("changed_at", UtcTime, nullable=False),
    Column("sticky", Text),  # where the key is that decides about the version; see StickyKey
)

protections = Table(  # by name, so that an endpoint that is removed and made again is protected as before
    "serving_protections",
    METADATA,
    Column("workspace", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("alias", Text),
    Column("independent", Boolean, nullable=False),
    Column("by", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("at", UtcTime, nullable=False),
)

settings = Table(  # how the versions of an endpoint run, where an operator has said so
    "serving_settings",
    METADATA,
    _endpoint_key(),
    Column("settings", JsonText, nullable=False),
)

measurements = Table(  # what the model server measured when it loaded a version
    "serving_measurements",
    METADATA,
    _endpoint_key(),
    Column("version", Text, primary_key=True),
    Column("measured", JsonText, nullable=False),
    info=UNRECORDED,
)

problems = Table(  # versions that the model server could not load
    "serving_problems",
    METADATA,
    _endpoint_key(),
    Column("version", Text, primary_key=True),
    Column("problem", Text, nullable=False),
    Column("at", UtcTime, nullable=False),
    info=UNRECORDED,
)

counts = Table(  # requests of a version in the minute that begins at `at`
    "serving_counts",
    METADATA,
    _endpoint_key(),
    Column("version", Text, primary_key=True),
    Column("at", UtcTime, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("lost", BigInteger, nullable=False),
    Column("latency", JsonText, nullable=False),
    info=UNRECORDED,
)

shadows = Table(  # how the answers of a shadow differ from those of a version, since the routes changed
    "serving_shadows",
    METADATA,
    _endpoint_key(),
    Column("version", Text, primary_key=True),
    Column("against", Text, primary_key=True),
    Column("counts", JsonText, nullable=False),
    Column("since", UtcTime, nullable=False),
    info=UNRECORDED,
)

observations = (
    Table(  # what came in since the routes changed, while several versions have a share; never changed
        "serving_observations",
        METADATA,
        _endpoint_key(),
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("at", UtcTime, nullable=False),
        Column("requests", JsonText, nullable=False),
        Column("scores", JsonText, nullable=False),
        info=UNRECORDED,
    )
)

batches = Table(
    "serving_batches",
    METADATA,
    object_key(),
    Column("endpoint", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("version", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Index("serving_batches_endpoint", "endpoint", "id"),
)

unannounced = Table(  # batches of a version that no event has told of yet
    "serving_unannounced",
    METADATA,
    _endpoint_key(),
    Column("version", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("batches", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime, nullable=False),
    Column("newest", Text, ForeignKey("governance_objects.id"), nullable=False),
    info=UNRECORDED,
)

labels = Table(
    "serving_labels",
    METADATA,
    Column("prediction", Text, primary_key=True),
    Column("endpoint", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("version", Text, nullable=False),
    Column("predicted_at", UtcTime, nullable=False),
    Column("value", Double, nullable=False),
    Column("score", Double),  # none if what was predicted is not a finite number
    Index("serving_labels_version", "endpoint", "version", "predicted_at"),
    info=UNRECORDED,
)
