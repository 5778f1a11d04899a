"""Prices and the half-life come from falaj.toml, and faults there are named."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from falaj.assembly.config import read_config
from falaj.errors import ConfigInvalid
from falaj.records.config import Config, Prices
from falaj.records.scheduling.snapshot import Price
from platforms import make_platform

TOML = """
[prices]
currency = "AED"
cpu_hour = 0.5
gpu_hour = 8
energy_kwh = 0.25

[prices.gpu_models]
"NVIDIA H200" = 12.5

[queue]
half_life = "12h"
"""


def config(folder: Path, text: str) -> Config:
    path = folder / "falaj.toml"
    path.write_text(text)
    return read_config(path)


def test_prices_and_half_life_are_read_from_the_file(tmp_path: Path) -> None:
    found = config(tmp_path, TOML)

    prices = {"cpu_hour": 0.5, "gpu_hour": 8.0, "gpu_models": {"NVIDIA H200": 12.5}, "energy_kwh": 0.25}
    assert found.prices == Prices.model_validate({"currency": "AED", **prices})
    assert found.queue.half_life == timedelta(hours=12)


def test_defaults_apply_without_configuration(tmp_path: Path) -> None:
    found = config(tmp_path, "")

    assert found.prices is None
    assert found.queue.half_life == timedelta(days=7)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[prices]\ncpu_hour = 1", "prices.currency"),
        ('[prices]\ncurrency = "dirham"', "prices.currency"),
        ('[prices]\ncurrency = "AED"\ngpu_hour = -1', "prices.gpu_hour"),
        ('[prices]\ncurrency = "AED"\ngpu_hour = nan', "prices.gpu_hour"),
        ('[prices]\ncurrency = "AED"\ntpu_hour = 1', "prices.tpu_hour"),
        ('[queue]\nhalf_life = "soon"', "queue.half_life"),
        ('[queue]\nhalf_life = "1s"', "queue.half_life"),
    ],
)
def test_faults_are_named_by_field(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        config(tmp_path, text)

    assert [fault.where.endswith(field) for fault in refused.value.faults] == [True]


def test_the_platform_uses_the_configured_prices(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=TOML) as platform:
        budget = platform.queues.set_budget("default", money=100).budget

        assert budget is not None
        assert budget.currency == "AED"
        assert platform.queues._accounts.price == Price(cpu=0.5, gpu=8.0, gpus={"NVIDIA H200": 12.5})
