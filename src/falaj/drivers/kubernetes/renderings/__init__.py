"""Attempts as objects of the cluster: a TrainJob of Kubeflow Trainer, a JobSet, or an Indexed Job. Pure.

Each rendering returns manifests in the order in which they are created, and which of them owns the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

from falaj.drivers.kubernetes.pods import Manifest, PodSettings
from falaj.drivers.kubernetes.remote_attempt import Objects
from falaj.drivers.kubernetes.renderings import indexed_job, jobset, trainjob
from falaj.ports.launcher import Launch

GROUPS = {"trainjob": "trainer.kubeflow.org", "jobset": "jobset.x-k8s.io"}
"""The API groups by which the kinds are known to be served."""


class Rendering(Protocol):
    """How one kind of objects is made from a launch."""

    def render(self, launch: Launch, settings: PodSettings) -> list[Manifest]:
        """Return the objects to create, in this order; the last one owns the others."""
        ...

    def dependents(self, launch: Launch, settings: PodSettings, owner: Manifest) -> list[Manifest]:
        """Return further objects, which go away with the `owner` that was created."""
        ...

    def peers(self, launch: Launch) -> tuple[str, ...]:
        """Return the stable DNS names of the pods, by node rank."""
        ...


class KindName(NamedTuple):
    """A kind of object, as the API server names it."""

    api_version: str
    kind: str


RENDERINGS: dict[Objects, Rendering] = {"trainjob": trainjob, "jobset": jobset, "job": indexed_job}
KINDS: dict[Objects, tuple[KindName, ...]] = {
    "trainjob": (
        KindName("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        KindName("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
    ),
    "jobset": (KindName("jobset.x-k8s.io/v1alpha2", "JobSet"),),
    "job": (KindName("batch/v1", "Job"), KindName("v1", "Service")),
}
"""What each rendering creates, the one whose deletion ends the pods first."""

SECRETS = (KindName("v1", "Secret"),)


def choose(wanted: Literal["auto"] | Objects, *, served: Collection[str]) -> Objects:
    """Return the kind of objects to create on a cluster that serves these API groups."""
    if wanted != "auto":
        return wanted
    return next((kind for kind in ("trainjob", "jobset") if GROUPS[kind] in served), "job")
