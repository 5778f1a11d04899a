"""The queues as objects of Kueue, and how a cluster differs from them."""

from __future__ import annotations

from typing import Any, Literal

from falaj.records.record import Record

QueueSystem = Literal["kueue"]
"""The systems that queues can be rendered for."""


class RenderedQueues(Record):
    """The objects that make a cluster share its resources as the queues say, in the order of their creation."""

    to: QueueSystem
    manifests: tuple[dict[str, Any], ...]


class FieldDrift(Record):
    """A field that differs: its value in the cluster and as rendered, as JSON; none: it is not set."""

    field: str
    cluster: str | None
    rendered: str | None


class ObjectDrift(Record):
    """An object of the cluster that is not as rendered.

    It is `missing`; `changed` in some fields; `extra`, which carries the platform's labels and is not rendered any
    more; `foreign`, which has the same name and belongs to someone else; or `waiting` for its namespace.
    """

    kind: str
    name: str
    namespace: str | None = None
    state: Literal["missing", "changed", "extra", "foreign", "waiting"]
    fields: tuple[FieldDrift, ...] = ()


class QueueDrift(Record):
    """How the cluster differs from the rendered queues; `same` counts the objects that do not."""

    to: QueueSystem
    same: int
    objects: tuple[ObjectDrift, ...] = ()


class QueueSync(Record):
    """What was changed in the cluster, and what still differs: objects of others, and those without a namespace."""

    to: QueueSystem
    same: int
    changed: tuple[ObjectDrift, ...] = ()
    left: tuple[ObjectDrift, ...] = ()
