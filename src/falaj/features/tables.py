"""Tables of the feature store: entities, view versions, their ingestions and quarantined rows, training sets, files."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Integer, Table, Text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime

entities = Table(
    "features_entities",
    METADATA,
    object_key(),
    Column("definition", JsonText, nullable=False),
)

views = Table(
    "features_views",
    METADATA,
    Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("definition", JsonText, nullable=False),
    Column("keys", JsonText, nullable=False),
    Column("table_version", BigInteger),
    Column("rows", BigInteger, nullable=False),
    Column("online_version", BigInteger),
    Column("created_at", UtcTime, nullable=False),
)

training_sets = Table(
    "features_training_sets",
    METADATA,
    object_key(),
    Column("spine", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("spine_pin", JsonText),
    Column("since", UtcTime),
    Column("until", UtcTime),
    Column("event_time", Text, nullable=False),
    Column("views", JsonText, nullable=False),
    Column("columns", JsonText, nullable=False),
    Column("table_version", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("request_features", JsonText),
)

ingestions = Table(
    "features_ingestions",
    METADATA,
    Column("id", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("sha256", Text, primary_key=True),
    Column("at", UtcTime, nullable=False),
)

quarantined_batches = Table(
    "features_quarantined_batches",
    METADATA,
    Column("view", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("id", Text, ForeignKey("governance_objects.id"), nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("data", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("sha256", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("is_history", Boolean, nullable=False),  # rows of a first load or a back-fill
    Column("quarantined", BigInteger, nullable=False),
    Column("ingested", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("rules", JsonText, nullable=False),
)

table_files = Table(
    "features_table_files",
    METADATA,
    Column("table_key", Text, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("until", BigInteger),  # the first version that does not have the file
    info=UNRECORDED,  # the audit log has the digest of all files of a version
)
