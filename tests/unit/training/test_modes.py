"""Code that inspects a model before training preserves the mode of each module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from falaj.training.runtime.memory.sample_tracing import trace_samples
from falaj.training.runtime.parallel.pipeline.forward_graph import trace_forward
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.modes import ensure_training_mode, preserved_modes


def model_of(modes: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    if modes != "training":
        model[1].eval()
    return model.eval() if modes == "evaluation" else model


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("modes", ["training", "evaluation", "mixed"])
def test_tracing_a_model_does_not_change_its_modes(modes: str) -> None:
    model = model_of(modes)
    before = modes_of(model)

    trace_forward(model)
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    trace_samples(model, nn.functional.mse_loss, "adamw", batch, samples=8, plan=Plan(), device="cpu")

    assert modes_of(model) == before


@pytest.mark.parametrize(
    ("modes", "trained"),
    [("training", [True] * 4), ("evaluation", [True] * 4), ("mixed", [True, True, False, True])],
)
def test_only_a_model_that_is_all_in_evaluation_mode_is_changed(modes: str, trained: list[bool]) -> None:
    assert modes_of(ensure_training_mode(model_of(modes))) == trained


def test_a_module_with_two_owners_has_its_own_mode_too() -> None:
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    shared.eval()

    with preserved_modes(model):
        model.eval()

    assert modes_of(model) == [True, True, False, True]
