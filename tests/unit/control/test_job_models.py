"""The training set of a job's model is found among the job's inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from falaj.control.jobs.models import _training_set
from falaj.errors import NotFound

KNOWN = {"dataset:churn": "dataset_1", "risk/dataset:churn": "dataset_2", "dataset_3": "dataset_3"}


def show(reference: str) -> Any:
    if reference not in KNOWN:
        raise NotFound(f"there is no {reference}")
    return SimpleNamespace(id=KNOWN[reference])


@pytest.mark.parametrize(
    ("inputs", "workspace", "found"),
    [
        ({"training": "churn"}, None, "dataset_1"),
        ({"training": "churn"}, "risk", "dataset_2"),
        ({"training": "risk/churn"}, None, "dataset_2"),
        ({"training": "dataset:churn"}, None, "dataset_1"),
        ({"training": "dataset_3"}, None, "dataset_3"),
        ({"rows": "blob:churn", "training": "churn"}, None, "dataset_1"),
        ({"model": "other", "rows": "churn"}, None, "dataset_1"),
        ({"rows": "blob:churn"}, None, None),
        ({}, None, None),
    ],
)
def test_the_training_set_is_found_among_the_inputs(
    inputs: dict[str, str], workspace: str | None, found: str | None
) -> None:
    services: Any = SimpleNamespace(objects=SimpleNamespace(show=show))
    job: Any = SimpleNamespace(spec=SimpleNamespace(inputs=inputs))

    assert _training_set(services, job, workspace) == found
