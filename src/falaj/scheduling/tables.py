"""The tables of scheduling."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
)

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime, recorded

queues = Table(
    "scheduling_queues",
    METADATA,
    object_key(),
    Column("parent", Text, ForeignKey("governance_objects.id")),
    Column("quota", JsonText, nullable=False),
    Column("at_most", JsonText),
    Column("weight", Double, nullable=False),
    Column("workspaces", JsonText),
    Column("version", Integer, nullable=False),
)

budgets = Table(
    "scheduling_budgets",
    METADATA,
    Column("workspace", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("gpu_hours", Double),
    Column("money", Double),
    Column("period", Text, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("counted_from", UtcTime),  # totals of the attempts that have ended since
    Column("counted_currency", Text),
    Column("counted_gpu_hours", Double, nullable=False),
    Column("counted_money", Double, nullable=False),
    info=recorded("gpu_hours", "money", "period", "since"),
)

cordons = Table(  # nodes that start no further jobs
    "scheduling_cordons",
    METADATA,
    Column("node", Text, primary_key=True),
    Column("since", UtcTime, nullable=False),
    Column("by", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("drained", Boolean, nullable=False),
)

usage = Table(  # one row per attempt; hours, energy and cost are set when it ends
    "scheduling_usage",
    METADATA,
    Column("job", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("workspace", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("user_id", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("queue", Text, nullable=False),
    Column("request", JsonText, nullable=False),
    Column("placements", JsonText, nullable=False),
    Column("gpu_models", JsonText, nullable=False),
    Column("borrows", Boolean, nullable=False),
    Column("cpus", BigInteger, nullable=False),
    Column("gpus_milli", BigInteger, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("currency", Text),
    Column("cpu_rate", Double, nullable=False),
    Column("gpu_rate", Double, nullable=False),
    Column("submitted_at", UtcTime, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    Column("verdict", Text),
    Column("gpu_hours", Double),
    Column("cpu_hours", Double),
    Column("cpu_s", Double),
    Column("peak_memory_bytes", BigInteger),
    Column("cpu_energy_j", Double),
    Column("gpu_energy_j", Double),
    Column("energy_cost", Double),
    Column("cost", Double),
    Index("scheduling_usage_ended", "ended_at"),
    Index("scheduling_usage_workspace", "workspace", "ended_at"),
    Index("scheduling_usage_started", "started_at", "job", "attempt"),
    Index("scheduling_usage_submitted", "submitted_at", "job", "attempt"),
    info=UNRECORDED,
)

history = Table(  # decayed usage of the ended attempts of a queue, at `as_of`
    "scheduling_history",
    METADATA,
    Column("queue", Text, primary_key=True),
    Column("half_life_s", Double, nullable=False),
    Column("as_of", UtcTime, nullable=False),
    Column("cpus", Double, nullable=False),
    Column("gpus", Double, nullable=False),
    Column("memory_bytes", Double, nullable=False),
    info=UNRECORDED,
)

comparisons = Table(  # results of what-ifs, encrypted: they show the waits of every team
    "scheduling_comparisons",
    METADATA,
    Column("work", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    info=UNRECORDED,
)
