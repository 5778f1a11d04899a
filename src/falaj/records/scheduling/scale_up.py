"""The nodes that waiting jobs would need, as an autoscaler is asked for them."""

from __future__ import annotations

from falaj.records.names import Name, ObjectId
from falaj.records.record import Record
from falaj.records.scheduling.snapshot import AtLeastOne, Resources


class ScaleUpHint(Record):
    """A job that waits for nodes, and the placeholder `pods` by which an autoscaler is asked for them.

    They have the shape of its replicas and ask for nodes like `like`, in `cluster` if there are several; with `spread`
    for one each.
    """

    job: ObjectId
    workspace: ObjectId | None = None
    pods: AtLeastOne = 1
    each: Resources = Resources()
    like: Name
    cluster: Name | None = None
    spread: bool = False
