"""Train a bad model on purpose, with swapped labels, which only a canary can detect."""

from __future__ import annotations

from definitions import FEATURES
from rows import Rows, quality, training_rows
from train_trees import SAMPLE, fit

import falaj as fj


def main() -> None:
    rows = training_rows()
    mistaken = Rows(rows.features, 1 - rows.labels)
    earlier, latest = mistaken.split()

    model = fit(earlier, trees=50, depth=4, seed=0)
    metrics = quality(latest.labels, model.predict_proba(latest.features)[:, 1])
    fj.job.log(step=50, **metrics)  # they look good: the labels that they are measured by are just as wrong
    fj.save_model(
        model,
        sample=rows.features[-SAMPLE:],
        names=FEATURES,
        metrics=metrics,
        card="Trained on labels that a mistake in the data turned round.",
    )


if __name__ == "__main__":
    main()
