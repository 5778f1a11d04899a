"""The tables of training."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, Table, Text, false, text

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime, recorded

jobs = Table(
    "training_jobs",
    METADATA,
    object_key(),
    Column("spec", JsonText, nullable=False),
    Column("inputs", JsonText, nullable=False),
    Column("code", Text, ForeignKey("governance_objects.id")),
    Column("run", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("behalf", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("scope", Text, ForeignKey("governance_objects.id")),
    Column("actions", JsonText),
    Column("token", Text),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("cancelling", Boolean, nullable=False),
    Column("interrupting", Boolean, nullable=False),
    Column("placements", JsonText),
    Column("progress", JsonText),
    Column("exit_code", Integer),
    Column("outputs", JsonText, nullable=False),
    Column("not_before", UtcTime),
    Column("started_at", UtcTime),
    Column("ended_at", UtcTime),
    Column("request", JsonText, nullable=False),
    Column("queue", Text, nullable=False, server_default=text("'default'")),
    Column("leaving", Boolean, nullable=False, server_default=false()),
    Column("claim", Boolean, nullable=False, server_default=false()),
    Column("borrows", Boolean, nullable=False, server_default=false()),
    Column("evicted_for", Text),
    Column("preemptions", Integer, nullable=False, server_default=text("0")),
    Column("limits", JsonText),  # how those of the current attempt are enforced
    Column("home", Text),  # whose launcher runs the current attempt
    Column("fence_s", Integer),  # after so long without renewal its supervisor stops it; null: never
    Column("handed_over", Boolean, nullable=False, server_default=false()),  # its attempt waits in Kueue
    Index("training_jobs_state", "state"),
    Index("training_jobs_handed_over", "handed_over"),
    info=recorded("spec", "inputs", "code", "run", "behalf", "scope", "actions", "outputs", "request"),
)

queue_changes = Table(
    "training_queue_changes",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
    info=UNRECORDED,
)
"""One row that counts the changes of the queue, so that the controller can poll a single number."""

attempts = Table(
    "training_attempts",
    METADATA,
    Column("job", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("verdict", Text),
    Column("reason", Text),
    Column("exit_code", Integer),
    Column("log", Text, ForeignKey("governance_objects.id")),
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    info=UNRECORDED,
)

checkpoints = Table(
    "training_checkpoints",
    METADATA,
    Column("job", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("save", Text, nullable=False),
    Column("manifest", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("parts", JsonText, nullable=False),  # their blobs and sizes, in order
    Column("size_bytes", BigInteger, nullable=False),  # of the manifest and all parts
)
