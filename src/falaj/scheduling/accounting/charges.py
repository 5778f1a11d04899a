"""What an attempt costs: hours of what it holds, and energy where that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from falaj.records.config import Prices
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import WHOLE_GPU, Price, Request
from falaj.scheduling.capacity.resources import requested_amount

JOULES_PER_KWH = 3_600_000.0
SECONDS_PER_HOUR = 3600.0


class HourlyRates(NamedTuple):
    """What an hour of an attempt costs; no currency: no prices were set."""

    cpu: float
    gpu: float
    currency: str | None


class ChargedResources(NamedTuple):
    """What all replicas of a job hold together; GPUs as the scheduler counts them, a MIG slice by its sevenths."""

    cpus: int
    gpus_milli: int
    memory_bytes: int


class Bill(NamedTuple):
    """What an attempt that has ended comes to."""

    gpu_hours: float
    cpu_hours: float
    energy_cost: float
    cost: float


def charged_resources(request: Request) -> ChargedResources:
    amount = requested_amount(request)
    return ChargedResources(amount.cpus, amount.gpus, amount.memory)


def price_of(prices: Prices | None) -> Price:
    """The prices of hours, as the scheduler reckons with them."""
    if prices is None:
        return Price()
    return Price(cpu=prices.cpu_hour, gpu=prices.gpu_hour, gpus=dict(prices.gpu_models))


def rates_of(held: ChargedResources, gpu_models: Sequence[str], prices: Prices | None) -> HourlyRates:
    """What an hour costs at these prices. With GPUs of several models, each counts alike."""
    if prices is None:
        return HourlyRates(0.0, 0.0, None)
    each = [prices.gpu_models.get(model, prices.gpu_hour) for model in gpu_models] or [prices.gpu_hour]
    gpus = held.gpus_milli / WHOLE_GPU
    return HourlyRates(held.cpus * prices.cpu_hour, gpus * sum(each) / len(each), prices.currency)


def hours(start: datetime, end: datetime) -> float:
    """How long it was; a clock that went back makes no time."""
    return max((end - start).total_seconds(), 0.0) / SECONDS_PER_HOUR


def kwh(joules: float) -> float:
    return joules / JOULES_PER_KWH


def bill_for(
    held: ChargedResources, rates: HourlyRates, used: ResourceUsage, lasted_h: float, prices: Prices | None
) -> Bill:
    """What an attempt that lasted so many hours comes to, at the rates that it began with."""
    joules = (used.cpu_energy_j or 0.0) + (used.gpu_energy_j or 0.0)
    priced = prices is not None and prices.currency == rates.currency
    energy = kwh(joules) * prices.energy_kwh if priced and prices is not None else 0.0
    return Bill(
        gpu_hours=held.gpus_milli / WHOLE_GPU * lasted_h,
        cpu_hours=held.cpus * lasted_h,
        energy_cost=energy,
        cost=(rates.cpu + rates.gpu) * lasted_h + energy,
    )
