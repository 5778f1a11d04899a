"""Resolves the inputs of a job to stored objects, and checks that the caller may read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from falaj.errors import Conflict, Denied, FalajError, Fault, InvalidInput, NotFound, ResidencyDenied
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.residency.zones import ZoneRegistry
from falaj.ports.launcher import VolumeMount
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Label, union
from falaj.records.scheduling.snapshot import Node

READ_BY = {
    "dataset": "features.load",
    "view": "features.scan",
    "model_version": "models.read",
    "blob": "blobs.read",
}
"""The kinds of inputs, and the action that the caller must be allowed to perform on each."""

SHOWN = "falaj features training-sets, features list, models list and blob list show what there is"

OWNER_ACTIONS = (
    *("blobs.upload", "blobs.read", "jobs.checkpoints"),
    *("runs.show", "runs.log_params", "runs.log_metrics"),
)
"""The actions that a running job performs on behalf of its owner."""


def resolve_inputs(gate: Gate, call: Call, given: Mapping[str, str]) -> dict[str, StoredObject]:
    """Return the objects that `given` names, by input; all faults are collected into one error."""
    found: dict[str, StoredObject] = {}
    faults: list[Fault] = []
    unknown = True
    for name, reference in given.items():
        try:
            found[name] = _resolve(gate, call, reference)
        except FalajError as error:
            allowed = "; ".join([error.message, *(fault.allowed or "" for fault in error.faults)]).strip("; ")
            fix = SHOWN if isinstance(error, NotFound) else None
            faults.append(Fault(where=f"inputs.{name}", given=reference, allowed=allowed, fix=fix))
            unknown = unknown and isinstance(error, NotFound)
    if faults:
        kind = NotFound if unknown else InvalidInput
        raise kind(f"{len(faults)} of the job's inputs cannot be used", faults=faults)
    for each in found.values():
        gate.require(call, READ_BY[each.kind], each)
    return found


def require_token_scope(caller: Caller) -> None:
    """Raise Denied if the token of `caller` does not cover the actions that the job performs on their behalf."""
    missing = [action for action in OWNER_ACTIONS if not caller.may_name(action)]
    if missing:
        raise Denied(f"this token is not for {', '.join(missing)}, which the job does for {caller.name}")


def require_zone(gate: Gate, call: Call, home: StoredObject, nodes: Sequence[Node]) -> None:
    """Raise Denied unless residency allows one of `nodes` to read the sources of the call and to write into `home`."""
    seen = partial(gate.authorizer.sees, call.tx, call.caller)
    for node in nodes:
        try:
            gate.zones.require(call.tx, [*call.sources(), home], gate.zones.machine(node.zone), seen=seen)
            return
        except Denied:
            if node is nodes[-1]:
                raise


def volume_label(volumes: Sequence[VolumeMount], zones: ZoneRegistry) -> Label:
    """Return the restriction that flows from volumes into a job and all that it makes."""
    named = [zones.named(each.zone) for each in volumes if each.zone is not None]
    return union(Label(only=frozenset({zone.jurisdiction})) for zone in named)


def require_volume_zones(label: Label, volumes: Sequence[VolumeMount], zones: ZoneRegistry) -> None:
    """Raise ResidencyDenied if a job with this label may not use its volumes where they lie.

    Conflict if a volume lies elsewhere than when the job was submitted.
    """
    for each in volumes:
        if each.zone is None:
            continue
        zone = zones.named(each.zone)
        if not label.permits(zone.jurisdiction):
            raise ResidencyDenied(
                f"volume {each.name} lies in zone {zone.name} ({zone.jurisdiction}), where this job may not run: "
                f"its data and volumes together permit {label.describe()}"
            )
        if label | Label(only=frozenset({zone.jurisdiction})) != label:
            raise Conflict(
                f"volume {each.name} lies in zone {zone.name} ({zone.jurisdiction}) since the job was submitted; "
                "submit it again"
            )


def _resolve(gate: Gate, call: Call, reference: str) -> StoredObject:
    """Return the one visible object of an input kind that `reference` names."""
    fitting = [each for each in _candidates(gate, call, reference) if _sees(gate, call, each)]
    if not fitting:
        raise NotFound("a training set, view, model version or blob that is there and that you may see")
    if len(fitting) > 1:
        allowed = " or ".join(each.address for each in fitting)
        raise InvalidInput.at("input", given=reference, allowed=f"say which one: {allowed}")
    if fitting[0].kind not in READ_BY:
        allowed = "a training set (dataset), view, model_version or blob"
        raise InvalidInput.at("input", given=f"a {fitting[0].kind}", allowed=allowed)
    return fitting[0]


def _candidates(gate: Gate, call: Call, reference: str) -> list[StoredObject]:
    home = objects.by_id(call.tx, call.target.home)
    named = home.name if home is not None else ""
    is_plain = ":" not in reference and not objects.is_id(reference)
    found = []
    for kind in READ_BY if is_plain else [None]:
        try:
            found.append(objects.resolve(call.tx, reference, kind=kind, workspace=named))
        except NotFound:
            continue
    return found


def _sees(gate: Gate, call: Call, found: StoredObject) -> bool:
    return gate.authorizer.sees(call.tx, call.caller, found)
