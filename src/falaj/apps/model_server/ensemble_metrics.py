"""Metrics of ensembles: how long they and each of their steps took, what failed, and what lookups missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from falaj.apps.model_server.platform.ensembles import lookup_meters
from falaj.records.serving.statistics import BOUNDS_S
from falaj.serving.runtime.ensembles.engine import EnsembleEngine
from falaj.serving.runtime.ensembles.step_meter import RunMeter

OF_ENSEMBLE = ("model", "version")
OF_STEP = (*OF_ENSEMBLE, "step")


def families(served: Sequence[EnsembleEngine]) -> Iterable[Metric]:
    """Return the metrics of the ensembles that are served; several of one version are counted together."""
    runs: dict[tuple[str, ...], list[RunMeter]] = {}
    steps: dict[tuple[str, ...], list[RunMeter]] = {}
    missing: dict[tuple[str, ...], int] = {}
    for engine in served:
        labels = engine.model.name, engine.model.version
        runs.setdefault(labels, []).append(engine.runs)
        for name, meter in engine.steps.items():
            steps.setdefault((*labels, name), []).append(meter)
        for name, lookup in lookup_meters(engine).items():
            for (view, reason), number in list(lookup.missing.items()):
                key = (*labels, name, view, reason)
                missing[key] = missing.get(key, 0) + number
    yield _seconds("ensemble", "Runs of an ensemble", OF_ENSEMBLE, runs)
    yield _failures("ensemble", "Runs of an ensemble that failed", OF_ENSEMBLE, runs)
    yield _seconds("step", "Runs of a step of an ensemble", OF_STEP, steps)
    yield _failures("step", "Runs of a step of an ensemble that failed", OF_STEP, steps)
    gaps = CounterMetricFamily(
        "falaj_serving_step_missing_features",
        "Values that a lookup in an ensemble did not find",
        labels=[*OF_STEP, "view", "reason"],
    )
    for labelled, number in missing.items():
        gaps.add_metric(labelled, number)
    yield gaps


def cumulative(bounds: Sequence[float], numbers: Sequence[int]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram as Prometheus has them: each holds those below it, too."""
    return list(zip([*map(str, bounds), "+Inf"], accumulate(numbers), strict=True))


def _seconds(
    what: str, words: str, names: Sequence[str], meters: dict[tuple[str, ...], list[RunMeter]]
) -> Metric:
    family = HistogramMetricFamily(f"falaj_serving_{what}_seconds", words, labels=list(names))
    for labels, found in meters.items():
        buckets = [sum(numbers) for numbers in zip(*(meter.buckets for meter in found), strict=True)]
        family.add_metric(labels, cumulative(BOUNDS_S, buckets), sum(meter.seconds for meter in found))
    return family


def _failures(
    what: str, words: str, names: Sequence[str], meters: dict[tuple[str, ...], list[RunMeter]]
) -> Metric:
    family = CounterMetricFamily(f"falaj_serving_{what}_failures", words, labels=list(names))
    for labels, found in meters.items():
        family.add_metric(labels, sum(meter.failures for meter in found))
    return family
