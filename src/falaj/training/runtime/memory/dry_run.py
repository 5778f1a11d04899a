"""Dry run of a training script: `fit` writes a memory estimate and ends the script instead of training.

FALAJ_ESTIMATE names a JSON file with the request, {"processes": 4, "device": "cuda"}. The answer replaces it:
{"estimate": …}, or {"failed": "reason"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from falaj.training.runtime.data.sources import SampleSource
from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.memory.estimator import MemoryEstimator
from falaj.training.runtime.options import INITIAL_BATCH_SIZE, FitOptions
from falaj.training.runtime.planning.plan import Plan, plan_from
from falaj.training.runtime.step.calling import Loss

REQUEST_VARIABLE = "FALAJ_ESTIMATE"


class EstimateDone(SystemExit):
    """Ends a script that was started only for an estimate."""


def is_dry_run() -> bool:
    """Return whether this script was started only for an estimate."""
    return REQUEST_VARIABLE in os.environ


def write_estimate(options: FitOptions, model: nn.Module, loss: Loss, source: SampleSource) -> NoReturn:
    """Write the estimate of this training to the request file, and end the script."""
    path = Path(os.environ[REQUEST_VARIABLE])
    request = json.loads(path.read_text())
    try:
        found: dict[str, Any] = {"estimate": estimate_of(options, model, loss, source, **request)}
    except TrainingError as error:
        found = {"failed": str(error)}
    except Exception as failure:  # a failed estimate must not prevent the training
        found = {"failed": f"no estimate: {type(failure).__name__}: {failure}"}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(found))
    aside.replace(path)
    sys.stdout.flush()
    raise EstimateDone(0)


def estimate_of(
    options: FitOptions, model: nn.Module, loss: Loss, source: SampleSource, *, processes: int, device: str
) -> dict[str, Any]:
    """Return the memory estimate for `processes` processes on a kind of device, as plain values."""
    parallelism, given = options.parallelism, options.batching.batch_size
    tune, fixed = options.compute.tune, options.compute.fixed
    plan = tune if isinstance(tune, Plan) else plan_from({"micro_batches": options.micro_batches, **fixed})
    estimator = MemoryEstimator(
        *(model, loss, source, options.optimization.optimizer, plan),
        min(len(source), INITIAL_BATCH_SIZE) if given == "auto" else given,
        device=device,
        tensor_plan=parallelism.tensor_plan,
        pipeline_cuts=parallelism.pipeline_cuts,
        exact=parallelism.exact,
        fixed_micro_batches=options.compute.accumulate is not None,
    )
    return estimator.estimate(parallelism.parallel, processes).facts()
