"""An attempt as an Indexed Job, with a headless Service where its pods must find each other."""

from __future__ import annotations

from falaj.drivers.kubernetes.pods import (
    ATTEMPT_LABEL,
    JOB_LABEL,
    Manifest,
    PodSettings,
    attempt_labels,
    metadata,
    object_name,
    pod_template,
    suspended,
)
from falaj.ports.launcher import Launch


def render(launch: Launch, settings: PodSettings) -> list[Manifest]:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(launch, settings),
        "spec": job_spec(launch, settings, subdomain=object_name(launch.attempt)) | suspended(settings),
    }
    return [job]


def dependents(launch: Launch, settings: PodSettings, owner: Manifest) -> list[Manifest]:
    """Return the objects that go away with the Job."""
    if launch.nodes == 1:
        return []
    labels = attempt_labels(launch, settings)
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(launch, settings, owner=owner),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {name: labels[name] for name in (JOB_LABEL, ATTEMPT_LABEL)},
            },
        }
    ]


def job_spec(launch: Launch, settings: PodSettings, *, subdomain: str | None) -> Manifest:
    """Return the spec of the Job; JobSets and TrainJobs contain one like it.

    A pod that ends is never replaced: the platform decides on the next attempt.
    """
    return {
        "completionMode": "Indexed",
        "completions": launch.nodes,
        "parallelism": launch.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "template": pod_template(launch, settings, subdomain=subdomain),
    }


def peers(launch: Launch) -> tuple[str, ...]:
    name = object_name(launch.attempt)
    return tuple(f"{name}-{rank}.{name}" for rank in range(launch.nodes))
