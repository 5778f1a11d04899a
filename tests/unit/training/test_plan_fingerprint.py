"""Fingerprints contain everything that changes what a model, a loss or an optimizer computes."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.planning import fingerprint
from falaj.training.runtime.planning.cache import loss_fingerprint, plan_key
from falaj.training.runtime.planning.fingerprint import FingerprintError, fingerprint_of

mse = nn.functional.mse_loss
SCALE = 1.0


def key(model: nn.Module) -> str | None:
    return plan_key(model, (torch.zeros(1, 4), torch.zeros(1, 1)), torch.device("cpu"), {})


class Holding(nn.Module):
    """A model with an attribute that it uses."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 1), held


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return self.by * mse(out, target)


def by(factor: object) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return factor * mse(out, target)  # type: ignore[operator]

    return loss


def through_a_global(out: Tensor, target: Tensor) -> Tensor:
    return SCALE * mse(out, target)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tanh, torch.exp),
        (nn.functional.relu, nn.functional.gelu),
        (nn.functional.max_pool1d, nn.functional.max_pool2d),
        ({"scale": 1.0}, {"scale": 1e6}),
        ({"deep": [{"in": (1, 2)}]}, {"deep": [{"in": (1, 3)}]}),
        (SimpleNamespace(heads=2), SimpleNamespace(heads=4)),
        (torch.zeros(3), torch.ones(3)),
        (lambda x: x + 1, lambda x: x + 2),
        ([nn.Dropout(0.1)], [nn.Dropout(0.2)]),
        (torch.float32, torch.bfloat16),
    ],
    ids=[
        "builtin",
        "function",
        "dispatched",
        "dict",
        "nested",
        "namespace",
        "tensor",
        "lambda",
        "modules",
        "type",
    ],
)
def test_models_are_distinguished_by_their_state(one: object, other: object) -> None:
    assert key(Holding(one)) is not None
    assert key(Holding(one)) == key(Holding(one))
    assert key(Holding(one)) != key(Holding(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(mse, reduction="mean"), partial(mse, reduction="sum")),
        (partial(by(1.0)), partial(by(2.0))),
        (by(1.0), by(1e8)),
        (by(torch.tensor(1.0)), by(torch.tensor(2.0))),
        (Scaled(1.0), Scaled(1e8)),
        (Scaled(1.0).__call__, Scaled(1e8).__call__),
        (nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss(torch.zeros(3))),
    ],
    ids=["partial", "partial of closures", "closure", "tensor", "object", "method", "weights"],
)
def test_losses_are_distinguished_by_their_state(one: Any, other: Any) -> None:
    assert loss_fingerprint(one) == loss_fingerprint(one)
    assert loss_fingerprint(one) != loss_fingerprint(other)


def test_a_global_that_a_loss_uses_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loss_fingerprint(through_a_global)
    monkeypatch.setitem(globals(), "SCALE", 1e6)

    assert loss_fingerprint(through_a_global) != before


def test_the_code_of_a_base_class_belongs_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "falaj_derived.py").write_text("from falaj_root import Root\nclass Net(Root): pass\n")

    def key_with(body: str) -> str | None:
        source = f"from torch import nn\nclass Root(nn.Linear):\n    def forward(self, x): return {body}\n"
        (tmp_path / "falaj_root.py").write_text(source)
        for name in ("falaj_derived", "falaj_root"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return key(importlib.import_module("falaj_derived").Net(4, 1))

    assert key_with("super().forward(x)") != key_with("super().forward(x).exp() * 30")


def test_hooks_belong_to_the_model() -> None:
    hooked = nn.Linear(4, 1)
    hooked.register_forward_hook(lambda _module, _given, out: out * 1e6)

    assert key(hooked) != key(nn.Linear(4, 1))


def test_values_that_training_changes_do_not_belong_to_the_model() -> None:
    trained = nn.BatchNorm1d(4)
    trained(torch.randn(8, 4))

    assert key(nn.BatchNorm1d(4)) == key(trained)
    assert key(nn.LSTM(4, 4)) == key(nn.LSTM(4, 4))
    assert key(nn.TransformerEncoderLayer(8, 2)) == key(nn.TransformerEncoderLayer(8, 2))


def test_models_without_a_fingerprint_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(Holding(threading.Lock())) is None
    assert key(Holding(torch.Generator())) is None
    monkeypatch.setattr(fingerprint, "MAX_VALUES", 1000)
    assert key(Holding(list(range(2000)))) is None
    monkeypatch.setattr(fingerprint, "MAX_BYTES", 1000)
    assert key(Holding(torch.zeros(1001))) is None
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(FingerprintError):
        fingerprint_of(deep)


def test_self_references_have_a_fingerprint() -> None:
    ring: list[Any] = [1]
    ring.append(ring)

    assert key(Holding(ring)) == key(Holding(ring))


@pytest.mark.slow
def test_fingerprints_are_equal_across_processes() -> None:
    script = (
        "import torch; from functools import partial; from torch import nn\n"
        "from falaj.training.runtime.planning.fingerprint import fingerprint_of\n"
        "model = nn.Sequential(nn.LSTM(4, 4), nn.Conv2d(1, 1, 1)); model.act = torch.tanh\n"
        "model.names = {'b', 'a', 'c'}\n"
        "print(fingerprint_of([model, partial(nn.functional.mse_loss, reduction='sum')], by_shape=model.parameters()))"
    )
    ran = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in "ab"
    ]

    assert ran[0].stdout == ran[1].stdout
    assert "0x" not in ran[0].stdout
