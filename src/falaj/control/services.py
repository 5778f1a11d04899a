"""The services of the platform, by the names of their operation groups; local and remote callers use these classes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import get_type_hints

from falaj.control.clusters import Clusters
from falaj.control.nodes import Nodes
from falaj.control.pipelines.service import Pipelines
from falaj.control.service import PlatformService
from falaj.control.workflows.service import Workflows
from falaj.features.service import Features
from falaj.governance.audit.service import Audit
from falaj.governance.blobs.service import Blobs
from falaj.governance.catalog.service import Objects
from falaj.governance.encryption.service import Keys
from falaj.governance.events.service import Events, Webhooks
from falaj.governance.identity.service import Groups, Tokens, Users, Workspaces
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.operation import Operation, operations_of
from falaj.governance.policy.service import Policies
from falaj.governance.residency.service import Zones
from falaj.governance.secrets.service import Secrets
from falaj.monitoring.service import Monitoring
from falaj.optimization.service import Optimizations
from falaj.registry.service import Models
from falaj.registry.version_descriptions import ModelVersions
from falaj.scheduling.service import Queues, Usage
from falaj.serving.batch_predictions.service import Predictions
from falaj.serving.service import Endpoints
from falaj.tracking.experiments import Experiments
from falaj.tracking.logged_models import LoggedModels
from falaj.tracking.service import Runs
from falaj.tracking.uploads import Uploads
from falaj.training.service import Jobs
from falaj.tuning.service import Studies


@dataclass(frozen=True)
class Services:
    """All services; a field's name is the group of its operations."""

    workspaces: Workspaces
    users: Users
    groups: Groups
    tokens: Tokens
    policies: Policies
    objects: Objects
    zones: Zones
    keys: Keys
    secrets: Secrets
    events: Events
    webhooks: Webhooks
    blobs: Blobs
    lineage: Lineage
    audit: Audit
    workflows: Workflows
    platform: PlatformService
    experiments: Experiments
    runs: Runs
    loggedmodels: LoggedModels
    uploads: Uploads
    nodes: Nodes
    clusters: Clusters
    jobs: Jobs
    queues: Queues
    usage: Usage
    features: Features
    models: Models
    modelversions: ModelVersions
    endpoints: Endpoints
    monitoring: Monitoring
    optimization: Optimizations
    studies: Studies
    predictions: Predictions
    pipelines: Pipelines


@cache
def service_types() -> dict[str, type]:
    """Return the class of every service by name."""
    hints = get_type_hints(Services)
    return {field.name: hints[field.name] for field in fields(Services)}


@cache
def all_operations() -> dict[str, Operation]:
    """Return every operation of the platform by name."""
    return {op.name: op for service in service_types().values() for op in operations_of(service).values()}
