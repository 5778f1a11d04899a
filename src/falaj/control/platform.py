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
from falaj.governance.audit.room import Audit
from falaj.governance.blobs import Blobs
from falaj.governance.catalogue import Objects, ZoneList
from falaj.governance.encryption.room import Keys
from falaj.governance.lineage import Lineage
from falaj.governance.operations import Operation, operations_of
from falaj.governance.policies import Policies
from falaj.governance.secrets import Secrets
from falaj.governance.tokens import Tokens
from falaj.governance.users import Groups, Users
from falaj.governance.workspaces import Workspaces
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

    workspace: Workspaces
    user: Users
    group: Groups
    token: Tokens
    policy: Policies
    object: Objects
    zone: ZoneList
    keys: Keys
    secret: Secrets
    blob: Blobs
    lineage: Lineage
    audit: Audit
    work: Works
    platform: Overview
    runs: Runs
    node: Machines
    jobs: Jobs
    queue: Queues
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
