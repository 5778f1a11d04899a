"""XGBoost: boosted trees and linear boosters from JSON or UBJSON, neither of which can run code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, not_opened
from falaj.serving.runtime.engines.tree_outputs import FEATURES, OutputKind, output_tensor, softmax

Array = npt.NDArray[Any]

PLATFORM = "xgboost"
TREES = frozenset({"gbtree", "dart"})
PROBABILITY = frozenset({"binary:logistic", "reg:logistic"})
CLASSES = frozenset({"multi:softprob", "multi:softmax"})


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Open a booster. Missing values are NaN; all of its trees count, as in `Booster.predict`."""
    try:
        booster = xgb.Booster({"nthread": min(file.settings.threads or 1, os.cpu_count() or 1)})
        booster.load_model(bytearray(contents.model))
        config = json.loads(booster.save_config())["learner"]
        width, objective = booster.num_features(), config["objective"]["name"]
        classes = int(config["learner_model_param"]["num_class"])
        targets = int(config["learner_model_param"].get("num_target", 1))
    except (xgb.core.XGBoostError, ValueError, KeyError, TypeError) as error:
        raise not_opened(file, "an XGBoost model", error) from None
    categories = booster.feature_types if "c" in (booster.feature_types or ()) else None
    is_plain = config["gradient_booster"]["name"] in TREES and categories is None
    as_margin = objective == "multi:softmax"

    def run(inputs: Sequence[Array]) -> list[Array]:
        rows = np.ascontiguousarray(inputs[0], np.float32)
        if is_plain:
            kind = "margin" if as_margin else "value"
            found = booster.inplace_predict(rows, predict_type=kind, missing=np.nan, validate_features=False)
        else:
            types = {"feature_types": categories, "enable_categorical": True} if categories else {}
            found = booster.predict(
                xgb.DMatrix(rows, missing=np.nan, **types), output_margin=as_margin, validate_features=False
            )
        values = np.asarray(found, np.float32).reshape(len(rows), -1)
        return [softmax(values) if as_margin else values]

    output = _kind(objective)
    return OpenedModel(
        PLATFORM,
        (Tensor(name=FEATURES, datatype=Datatype.FP32, shape=(DYNAMIC, width)),),
        (output_tensor(output, classes if output == "probabilities" else max(1, targets)),),
        run,
    )


def _kind(objective: str) -> OutputKind:
    if objective in CLASSES:
        return "probabilities"
    return "probability" if objective in PROBABILITY else "prediction"
