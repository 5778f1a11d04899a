"""An optional package that is missing is named, with the extra that has it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

import falaj as fj
from falaj.assembly import drivers
from falaj.assembly.home import open_home
from falaj.errors import Internal, Unavailable
from falaj.extras import requiring_packages
from falaj.records.config import Config
from falaj.records.tuning import StudySettings
from falaj.tuning.sampler_process import SamplerProcess

TOKEN = {"driver": "pkcs11", "module": "/lib/softhsm2.so", "token": "t", "pin": "env:PIN"}


def hide(monkeypatch: pytest.MonkeyPatch, module: str, importer: str) -> None:
    """Make `module` impossible to import, and have `importer` imported anew."""
    for name in [each for each in sys.modules if each.startswith(importer)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


def test_a_public_name_that_needs_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch", "falaj.training.runtime.fit")

    with pytest.raises(Unavailable, match=r"fj.fit needs the package torch: pip install 'falaj\[torch\]'"):
        fj.fit  # noqa: B018


def test_a_token_without_its_client_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pkcs11", "falaj.drivers.pkcs11")
    config = Config.model_validate({"keys": TOKEN})

    with pytest.raises(
        Unavailable, match=r"PKCS#11 token needs the package pkcs11: pip install 'falaj\[hsm\]'"
    ):
        drivers.open_keys(open_home(tmp_path / "home"), config, first_start=True)


def test_a_study_without_optuna_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError(\"No module named 'optuna'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    space = {"x": {"type": "float", "low": 0.0, "high": 1.0}}
    objectives = [{"metric": "loss", "direction": "minimize"}]
    settings = StudySettings.model_validate({"space": space, "objectives": objectives, "trials": 1})

    with (
        closing(SamplerProcess(settings, seed=0)) as process,
        pytest.raises(Internal, match=r"Optuna is not installed: pip install 'falaj\[tuning\]'"),
    ):
        process.ask()


def test_a_package_of_no_extra_is_named_by_itself() -> None:
    with (
        pytest.raises(Unavailable, match=r"the model needs the package nowhere: pip install nowhere$"),
        requiring_packages(for_="the model"),
    ):
        raise ModuleNotFoundError("No module named 'nowhere.part'", name="nowhere.part")


def test_a_missing_module_of_falaj_itself_is_no_matter_of_extras() -> None:
    with pytest.raises(ModuleNotFoundError), requiring_packages(for_="the model"):
        raise ModuleNotFoundError("No module named 'falaj.x'", name="falaj.x")
