"""The platform as a whole: every room under its name. Near, the rooms themselves; far, the same classes over REST."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import get_type_hints

from falaj.control.machines import Machines
from falaj.control.overview import Overview
from falaj.control.pipelines import Pipelines
from falaj.control.work import Works
from falaj.features.room import Features
from falaj.governance.audit.service import Audit
from falaj.governance.blobs.service import Blobs
from falaj.governance.catalog.service import Objects, Zones
from falaj.governance.encryption.service import Keys
from falaj.governance.identity.tokens import Tokens
from falaj.governance.identity.users import Groups, Users
from falaj.governance.identity.workspaces import Workspaces
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.operation import Operation, operations_of
from falaj.governance.policy.service import Policies
from falaj.governance.secrets.service import Secrets
from falaj.monitoring.room import Monitoring
from falaj.optimization.room import Optimizations
from falaj.registry.models import Models
from falaj.scheduling.queues import Queues
from falaj.scheduling.usage import Usage
from falaj.serving.room import Endpoints
from falaj.tracking.runs import Runs
from falaj.training.jobs import Jobs


@dataclass(frozen=True)
class Rooms:
    """The rooms; a field's name is the first half of its operations' names."""

    workspaces: Workspaces
    users: Users
    groups: Groups
    tokens: Tokens
    policies: Policies
    objects: Objects
    zones: Zones
    keys: Keys
    secrets: Secrets
    blobs: Blobs
    lineage: Lineage
    audit: Audit
    workflows: Works
    platform: Overview
    runs: Runs
    nodes: Machines
    jobs: Jobs
    queues: Queues
    usage: Usage
    features: Features
    models: Models
    endpoints: Endpoints
    monitoring: Monitoring
    optimization: Optimizations
    pipelines: Pipelines


@cache
def room_types() -> dict[str, type]:
    """The class of every room, by name."""
    hints = get_type_hints(Rooms)
    return {field.name: hints[field.name] for field in fields(Rooms)}


@cache
def all_operations() -> dict[str, Operation]:
    """Every operation of the platform, by name."""
    return {op.name: op for room in room_types().values() for op in operations_of(room).values()}
