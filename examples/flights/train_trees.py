"""Train boosted trees on the flights: the probability that a flight arrives 15 minutes late or later."""

from __future__ import annotations

import argparse

import xgboost as xgb
from definitions import FEATURES
from rows import Rows, quality, training_rows

import falaj as fj

SAMPLE = 500
"""Rows on which the exported file must agree with the trees."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="only the latest so many flights, for a quick look")
    given = parser.parse_args()
    rows = training_rows(latest=given.rows)
    earlier, latest = rows.split()

    options = {"trees": given.trees, "depth": given.depth, "rate": given.rate, "seed": given.seed}
    fj.job.params(**options)
    judged = fit(earlier, **options)
    metrics = quality(latest.labels, judged.predict_proba(latest.features)[:, 1])
    fj.job.log(step=given.trees, **metrics)

    model = fit(rows, **options)
    fj.save_model(
        model,
        sample=rows.features[-SAMPLE:],
        names=FEATURES,
        metrics=metrics,
        card=f"{given.trees} boosted trees on {len(rows)} flights. The metrics are of the latest {len(latest)}, "
        "by trees that had not seen them; the trees of this version have seen all.",
    )


def fit(rows: Rows, *, trees: int, depth: int, seed: int, rate: float = 0.1) -> xgb.XGBClassifier:
    model = xgb.XGBClassifier(
        n_estimators=trees,
        max_depth=depth,
        learning_rate=rate,
        min_child_weight=200,  # flights of one hour share their weather: small leaves would learn single days
        subsample=0.8,
        colsample_bytree=0.5,
        random_state=seed,
        n_jobs=1,  # a second thread gains little here, and loses much on a busy machine
    )
    return model.fit(rows.features, rows.labels)


if __name__ == "__main__":
    main()
