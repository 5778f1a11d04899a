"""A search with scikit-learn: framework plain, one process with two cores, on which joblib starts two workers."""

import json
import os

import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import GridSearchCV

import falaj as fj

rows = np.random.default_rng(0).normal(size=(2000, 4))
target = rows @ [1, 2, 3, 4]


def judge(model: RandomForestRegressor, rows: np.ndarray, target: np.ndarray) -> dict[str, float]:
    return {"loss": -np.mean((model.predict(rows) - target) ** 2), "process": os.getpid()}


workers = int(os.environ["OMP_NUM_THREADS"])  # as many as the job has cores
settings = {"max_depth": [1, 4, 12]}
search = GridSearchCV(RandomForestRegressor(20), settings, scoring=judge, refit="loss", n_jobs=workers)
search.fit(rows, target)

losses = (-search.cv_results_["mean_test_loss"]).tolist()
for step, loss in enumerate(losses):
    fj.job.log(step=step, loss=loss)
processes = {search.cv_results_[f"split{split}_test_process"][at] for split in range(5) for at in range(3)}
learned = {"world": len(processes - {os.getpid()}), "losses": losses, "best": search.best_params_}
(fj.job.outputs / "rank-0.json").write_text(json.dumps(learned))
