"""How a run comes back: the newest good checkpoint, compared with what there is now, then put into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from falaj.training.runtime.checkpointing.position import ANOTHER_RUN, Facts, compare_facts, with_last_fix
from falaj.training.runtime.checkpointing.restore import (
    parameter_of,
    plan_restore,
    restore_model,
    restore_optimizer,
)
from falaj.training.runtime.checkpointing.state import MODEL, OPTIMIZER, model_tensors, parameter_names
from falaj.training.runtime.errors import CheckpointMismatch, TrainingFault
from falaj.training.runtime.step.step import Step

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer
    from falaj.training.runtime.checkpointing.storage.manifest import Manifest


def restore_newest(
    checkpointer: Checkpointer, step: Step, facts: Facts, *, notify: Callable[[str], None]
) -> tuple[Mapping[str, Any], list[str]] | None:
    """Put the newest checkpoint that verifies into the model and optimizer; what it says of its run, and what is not
    as it was then. None if there is none."""
    layouts: dict[str, Tensor | None] = {}
    differing: list[str] = []

    def choose(manifest: Manifest) -> Mapping[str, Tensor | None]:
        nonlocal layouts, differing
        differing = compare_facts(manifest.run["facts"], facts)
        layouts = compare_tensors(checkpointer, step, manifest)
        return layouts

    found = checkpointer.load(choose, notify=notify)
    if found is None:
        return None
    manifest, pieces = found
    restore_model(step.model, step.loss, pieces, step.device)
    restore_optimizer(step.model, step.optimizer, pieces, manifest.numbers, layouts=layouts)
    step.groups.put(manifest.run.get("groups", ()))
    if step.scaler and manifest.run["scaler"]:
        step.scaler.load_state_dict(manifest.run["scaler"])
    notify(f"resuming after step {manifest.save_id.step}")
    for difference in differing:
        notify(f"not bitwise the same as before: {difference}")
    return manifest.run, differing


def compare_tensors(checkpointer: Checkpointer, step: Step, manifest: Manifest) -> dict[str, Tensor | None]:
    """What this process needs; refused, by all processes, where one needs something else than was saved."""
    model, optimizer, saved = step.model, step.optimizer, manifest.all_tensor_infos
    wanted = plan_restore(model, step.loss, optimizer, saved)
    own = wanted.faults, list(model_tensors(model)), list(parameter_names(model, optimizer))
    faults, names, parameters = set[TrainingFault](), set[str](), set[str]()
    for their_faults, their_names, their_parameters in checkpointer.gather(own):
        faults |= set(their_faults)
        names |= set(their_names)
        parameters |= set(their_parameters)
    stored = {name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)}
    faults |= {TrainingFault(name, "not in the model") for name in stored - names}
    if faults:
        ordered = sorted(faults, key=lambda fault: fault.where)
        fixed = with_last_fix(ordered, f"the model that the run began with; or {ANOTHER_RUN}")
        raise CheckpointMismatch("the checkpoint is of another model", faults=fixed)
    compare_optimizers(manifest, type(optimizer).__name__, parameters)
    return wanted.layouts


def compare_optimizers(manifest: Manifest, now: str, parameters: set[str]) -> None:
    """Refuse the state of an optimizer of another kind, or of parameters that this one does not have."""
    then = manifest.run["optimizer"]
    kept = {parameter_of(name) for name in manifest.tensor_infos if name.startswith(OPTIMIZER)}
    faults = [TrainingFault(name, "not in the optimizer") for name in sorted(kept - parameters)]
    if then != now:
        faults = [TrainingFault("optimizer", now, then)]
    if faults:
        fixed = with_last_fix(faults, f"the optimizer that the run began with, {then}; or {ANOTHER_RUN}")
        raise CheckpointMismatch("the checkpoint is of another optimizer", faults=fixed)
