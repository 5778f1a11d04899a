"""The cost of an attempt: hours of the resources it holds, and measured energy."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from falaj.records.config import Prices
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Price
from falaj.scheduling.capacity.resources import ResourceAmount

JOULES_PER_KWH = 3_600_000.0
SECONDS_PER_HOUR = 3600.0


class HourlyRates(NamedTuple):
    """The cost of an attempt per hour; currency None: no prices are configured."""

    cpu: float
    gpu: float
    currency: str | None


class Bill(NamedTuple):
    """Hours and cost of an ended attempt."""

    gpu_hours: float
    cpu_hours: float
    energy_cost: float
    cost: float


def price_of(prices: Prices | None) -> Price:
    """Return the hourly prices for the scheduler."""
    if prices is None:
        return Price()
    return Price(cpu=prices.cpu_hour, gpu=prices.gpu_hour, gpus=dict(prices.gpu_models))


def rates_of(
    held: ResourceAmount, gpu_models: Sequence[str], price: Price, currency: str | None
) -> HourlyRates:
    """Return the hourly rates, at the mean price of the GPUs."""
    if currency is None:
        return HourlyRates(0.0, 0.0, None)
    each = [price.gpus.get(model, price.gpu) for model in gpu_models] or [price.gpu]
    return HourlyRates(held.cpus * price.cpu, held.gpus * sum(each) / len(each), currency)


def hours(start: datetime, end: datetime) -> float:
    """Return the hours between two moments; 0 if the clock went back."""
    return max((end - start).total_seconds(), 0.0) / SECONDS_PER_HOUR


def kwh(joules: float) -> float:
    return joules / JOULES_PER_KWH


def bill_for(
    held: ResourceAmount, rates: HourlyRates, used: ResourceUsage, lasted_h: float, prices: Prices | None
) -> Bill:
    """Return the bill of an attempt at the rates of its start."""
    joules = (used.cpu_energy_j or 0.0) + (used.gpu_energy_j or 0.0)
    priced = prices is not None and prices.currency == rates.currency
    energy = kwh(joules) * prices.energy_kwh if priced and prices is not None else 0.0
    return Bill(
        gpu_hours=held.gpus * lasted_h,
        cpu_hours=held.cpus * lasted_h,
        energy_cost=energy,
        cost=(rates.cpu + rates.gpu) * lasted_h + energy,
    )
