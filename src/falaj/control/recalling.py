"""What a job's earlier attempts have left in its run: the losses that they logged, and where they went on."""

from __future__ import annotations

from falaj.errors import Denied, NotFound
from falaj.records.names import ObjectId
from falaj.tracking.runs import Runs
from falaj.training.runtime.agent import RESUMED
from falaj.training.runtime.wire import LOSS

MOST_LOSSES = 100_000
"""The first ones after a step: those between two checkpoints, many times over."""
MOST_RESUMES = 5_000


def recall(runs: Runs, run: ObjectId, *, after: int) -> tuple[list[str], bytes]:
    """What the runtime's `recall` asks for, as it goes over the wire. Who may not read the losses gets none."""
    params = runs.show(run).params
    resumes = [each.value for each in params if each.key.startswith(RESUMED)]
    packed = bytearray()
    try:
        history = runs.metrics(run, "loss", from_step=after + 1)
    except (Denied, NotFound):
        return resumes[:MOST_RESUMES], b""
    for batch in history:
        steps, values = (batch.column(name).to_pylist() for name in ("step", "value"))
        for each in zip(steps, values, strict=True):
            packed += LOSS.pack(*each)
        if len(packed) >= MOST_LOSSES * LOSS.size:
            break
    return resumes[:MOST_RESUMES], bytes(packed[: MOST_LOSSES * LOSS.size])
