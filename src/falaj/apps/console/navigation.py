"""The entries of the navigation, in their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A link of the navigation: `key` is what pages name as their `entry`, and their address below the workspace."""

    key: str
    label: str
    icon: str


ENTRIES = (
    Entry("overview", "Overview", "dashboard"),
    Entry("runs", "Runs", "show_chart"),
    Entry("jobs", "Jobs", "memory"),
    Entry("queues", "Queues", "format_list_numbered"),
    Entry("features", "Features", "table_chart"),
    Entry("models", "Models", "category"),
    Entry("endpoints", "Endpoints", "lan"),
    Entry("monitoring", "Monitoring", "monitor_heart"),
    Entry("pipelines", "Pipelines", "account_tree"),
    Entry("governance", "Governance", "gavel"),
    Entry("costs", "Costs", "payments"),
)
