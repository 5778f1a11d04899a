"""LightGBM: boosters from its text format, which cannot run code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightgbm as lgb
import numpy as np
import numpy.typing as npt

from falaj.errors import InvalidInput
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, not_opened
from falaj.serving.runtime.engines.tree_outputs import FEATURES, OutputKind, output_tensor

Array = npt.NDArray[Any]

PLATFORM = "lightgbm"
MULTICLASS = frozenset({"multiclass", "multiclassova", "softmax", "ova", "ovr"})
ENDS = (b"\nTree=", b"end of trees"), (b"\nparameters:", b"end of parameters")
"""What LightGBM writes behind the parts of a file; its reader does not miss it in a truncated one."""


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Open a booster. Missing values are NaN; of a model that stopped early, the best trees count."""
    try:
        if any(begin in contents.model and end not in contents.model for begin, end in ENDS):
            raise InvalidInput(
                f"{file.model}@{file.version} is a LightGBM model without its end: it is truncated"
            )
        text = contents.model.decode()
        booster = lgb.Booster(model_str=text, params={"verbosity": -1})
        width, classes = booster.num_feature(), booster.num_model_per_iteration()
    except (lgb.basic.LightGBMError, ValueError, KeyError, TypeError) as error:
        raise not_opened(file, "a LightGBM model", error) from None
    threads = min(file.settings.threads or 1, os.cpu_count() or 1)

    def run(inputs: Sequence[Array]) -> list[Array]:
        rows = np.ascontiguousarray(inputs[0], np.float32)
        found = booster.predict(rows, num_threads=threads, validate_features=False)
        return [np.asarray(found, np.float32).reshape(len(rows), -1)]

    return OpenedModel(
        PLATFORM,
        (Tensor(name=FEATURES, datatype=Datatype.FP32, shape=(DYNAMIC, width)),),
        (output_tensor(_kind(text), classes),),
        run,
    )


def _kind(text: str) -> OutputKind:
    head = text[: text.find("\n\nTree=")]
    line = next((line for line in head.splitlines() if line.startswith("objective=")), "")
    objective = line.removeprefix("objective=").split(" ")[0]
    if objective in MULTICLASS:
        return "probabilities"
    return "probability" if objective in ("binary", "cross_entropy", "xentropy") else "prediction"
