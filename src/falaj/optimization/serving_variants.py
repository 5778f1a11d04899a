"""Which version to serve in place of another: an accepted variant that was measured on the same kind of CPU."""

from __future__ import annotations

from falaj.errors import InvalidInput
from falaj.governance import objects
from falaj.optimization import store
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.optimization import InstructionSet, Variant, VariantChoice


def choose_variant(
    tx: Transaction, version: StoredObject, choice: VariantChoice, *, extensions: InstructionSet
) -> StoredObject:
    """Return the version that `choice` means: `version` itself, its fastest variant here, or the one of a recipe.

    Variants that were measured on a CPU with other extensions do not count: there they may be slower, or predict
    differently. `auto` means `version` where there is none.
    """
    if choice == "original":
        return version
    here = [
        variant
        for report, variant in store.accepted_variants(tx, version.id)
        if variant.device == "cpu" and report.instruction_set == extensions
    ]
    wanted = here if choice == "auto" else [each for each in here if each.recipe == choice][:1]
    for variant in sorted(wanted, key=_slowness):
        found = objects.by_name(
            tx, workspace=version.workspace, kind="model_version", name=variant.version or ""
        )
        if found is not None:
            return found
    if choice == "auto":
        return version
    known = ", ".join(dict.fromkeys(each.recipe for each in here))
    raise InvalidInput.at(
        "variant",
        given=choice,
        allowed=f"original, auto, or what was accepted of {version.name} on this kind of CPU: {known or 'nothing'}",
        fix=f"falaj models optimize {version.name} --recipe {choice}",
    )


def _slowness(variant: Variant) -> float:
    found = variant.measured
    return float("inf") if found is None else found.latency_p50_us / max(found.rows_per_s, 1e-9)
