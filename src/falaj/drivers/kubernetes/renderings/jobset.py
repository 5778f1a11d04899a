"""An attempt as a JobSet, whose controller makes the Job and the headless Service."""

from __future__ import annotations

from falaj.drivers.kubernetes.pods import Manifest, PodSettings, metadata, object_name, suspended
from falaj.drivers.kubernetes.renderings.indexed_job import job_spec
from falaj.ports.launcher import Launch

REPLICATED_JOB = "node"


def render(launch: Launch, settings: PodSettings) -> list[Manifest]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(launch, settings),
            "spec": jobset_spec(launch, settings) | suspended(settings),
        }
    ]


def dependents(launch: Launch, settings: PodSettings, owner: Manifest) -> list[Manifest]:
    return []


def jobset_spec(launch: Launch, settings: PodSettings) -> Manifest:
    spec = job_spec(launch, settings, subdomain=None)
    return {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}],
    }


def peers(launch: Launch) -> tuple[str, ...]:
    name = object_name(launch.attempt)
    return tuple(f"{name}-{REPLICATED_JOB}-0-{rank}.{name}" for rank in range(launch.nodes))
