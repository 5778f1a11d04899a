"""The table of which framework tests a change affects is complete."""

from __future__ import annotations

from pathlib import Path

from framework_suites import ROOT, SHARED, SUITES, changed_recipes
from virtualenvs import RECIPES

FOLDER = Path(__file__).parents[1] / "frameworks"


def test_every_test_of_a_framework_is_in_one_suite() -> None:
    named = [name for suite in SUITES for name in suite.files]

    assert sorted(named) == sorted(file.name for file in FOLDER.glob("test_*.py"))


def test_every_virtualenv_is_needed_by_one_suite() -> None:
    needed = [name for suite in SUITES for name in suite.recipes]

    assert sorted(needed) == sorted(RECIPES)


def test_every_path_that_matters_exists() -> None:
    named = [path for suite in SUITES for path in suite.paths] + list(SHARED)

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_file_below_a_path_affects_its_suite_alone() -> None:
    changed = ["src/falaj/apps/api/mlflow/routes.py", "src/falaj/apps/api/mlflow_like.py", "README.md"]

    found = [suite.files[0] for suite in SUITES if suite.is_affected_by(changed)]

    assert found == ["test_mlflow_clients.py"]


def test_a_recipe_that_is_new_or_written_otherwise_counts_as_changed() -> None:
    before = 'RECIPES = {"jax": Recipe(("jax==1",)), "mpi": Recipe(("mpi4py==4",))}'
    after = 'RECIPES = {"jax": Recipe(("jax==2",)), "mpi": Recipe(("mpi4py==4",)), "trees": Recipe(())}'
    built = "def build_horovod(): ...\n"

    assert changed_recipes(before, after) == {"jax", "trees"}
    assert changed_recipes(before, before) == frozenset()
    assert changed_recipes(before, built + before) == {"jax", "mpi"}
