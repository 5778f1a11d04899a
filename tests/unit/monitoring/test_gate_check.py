"""The check `no-drift-alert`: a version with an open alert is not promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from falaj.errors import Denied
from falaj.records.monitoring.monitors import MonitorWindow
from model_files import onnx

if TYPE_CHECKING:
    from conftest import MonitoringEnv  # type: ignore[attr-defined]


def test_a_version_with_an_open_drift_alert_is_refused_until_it_is_acknowledged(env: MonitoringEnv) -> None:
    platform, models = env.platform, env.platform.models
    for _ in range(2):
        blob = platform.blobs.upload(iter([onnx()]))
        models.register("churn", files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("delay", model="churn@2")
    models.set_gates("churn", alias="champion", checks=("no-drift-alert",))
    env.training_set("flights", {"distance": env.rng.normal(size=5000)})
    env.service.watch("delay", reference="flights", window=MonitorWindow(rows=500))
    env.deliver({"distance": env.rng.normal(3, 1, 500)}, version="2")
    env.service.evaluate()
    (alert,) = env.service.alerts().items

    with pytest.raises(Denied) as refused:
        models.promote("churn@2", to="champion")
    models.promote("churn@1", to="champion")

    (fault,) = refused.value.faults
    assert fault.where == "gate no-drift-alert"
    assert fault.given == f"open: {alert.id} (distance)"
    assert fault.fix == f"look at it, then: falaj monitoring acknowledge {alert.id}"
    env.service.acknowledge(alert.id)
    assert models.promote("churn@2", to="champion").change.version == "churn@2"
