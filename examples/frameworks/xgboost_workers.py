"""Distributed boosting with XGBoost: framework xgboost, two processes; the platform runs the tracker beside them."""

import json
import os

import numpy as np
import xgboost as xgb
from xgboost import collective

import falaj as fj

where = {
    "dmlc_tracker_uri": os.environ["DMLC_TRACKER_URI"],
    "dmlc_tracker_port": int(os.environ["DMLC_TRACKER_PORT"]),
    "dmlc_task_id": os.environ["DMLC_TASK_ID"],
}
with collective.CommunicatorContext(dmlc_communicator="rabit", **where):
    rank, world = collective.get_rank(), collective.get_world_size()
    rows = np.random.default_rng(rank).normal(size=(512, 4))  # different rows in each rank
    data = xgb.DMatrix(rows, rows @ [1, 2, 3, 4])
    seen: dict = {}
    settings = {"max_depth": 4, "eta": 0.3, "nthread": 1}
    model = xgb.train(settings, data, 30, evals=[(data, "train")], evals_result=seen, verbose_eval=False)

losses = seen["train"]["rmse"]
if rank == 0:
    for step, loss in enumerate(losses):
        fj.job.log(step=step, loss=loss)
learned = {"world": world, "losses": losses, "model": model.save_raw("json").hex()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
