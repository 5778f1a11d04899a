"""An attempt as a TrainJob of Kubeflow Trainer, from a TrainingRuntime of its own; Trainer makes a JobSet of it."""

from __future__ import annotations

from falaj.drivers.kubernetes.pods import Manifest, PodSettings, metadata, object_name, suspended
from falaj.drivers.kubernetes.renderings import jobset
from falaj.ports.launcher import Launch

API = "trainer.kubeflow.org/v1alpha1"
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def render(launch: Launch, settings: PodSettings) -> list[Manifest]:
    spec = jobset.jobset_spec(launch, settings)
    for replicated in spec["replicatedJobs"]:
        replicated["template"]["metadata"] = {"labels": STEP_LABEL}
        for each in ("completions", "parallelism", "completionMode"):  # Trainer sets them by numNodes
            del replicated["template"]["spec"][each]
    runtime = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(launch, settings),
        "spec": {"mlPolicy": {"numNodes": launch.nodes}, "template": {"spec": spec}},
    }
    job = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(launch, settings),
        "spec": {
            "runtimeRef": {
                "apiGroup": API.split("/")[0],
                "kind": "TrainingRuntime",
                "name": object_name(launch.attempt),
            },
            "trainer": {"numNodes": launch.nodes},
            **suspended(settings),
        },
    }
    return [runtime, job]


def dependents(launch: Launch, settings: PodSettings, owner: Manifest) -> list[Manifest]:
    return []


def peers(launch: Launch) -> tuple[str, ...]:
    return jobset.peers(launch)
