"""Distributed boosting with LightGBM: framework lightgbm, two processes, each with a port."""

import json
import os

import lightgbm as lgb
import numpy as np

import falaj as fj

rank = int(os.environ["FALAJ_RANK"])
rows = np.random.default_rng(rank).normal(size=(512, 4))  # different rows in each rank
data = lgb.Dataset(rows, rows @ [1, 2, 3, 4])
seen: dict = {}
settings = {
    "objective": "regression",
    "num_threads": 1,
    "verbose": -1,
    "tree_learner": "data",
    "pre_partition": True,
    "machines": os.environ["LIGHTGBM_MACHINES"],
    "num_machines": int(os.environ["LIGHTGBM_NUM_MACHINES"]),
    "local_listen_port": int(os.environ["LIGHTGBM_LOCAL_LISTEN_PORT"]),
}
model = lgb.train(settings, data, 30, valid_sets=[data], callbacks=[lgb.record_evaluation(seen)])

losses = seen["training"]["l2"]
if rank == 0:
    for step, loss in enumerate(losses):
        fj.job.log(step=step, loss=loss)
trees = model.model_to_string().split("\nparameters:")[0]  # the port is one of the parameters
learned = {"world": settings["num_machines"], "losses": losses, "model": trees}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
