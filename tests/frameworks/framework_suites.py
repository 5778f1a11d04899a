"""Which of these tests a change affects, and which virtualenvs they need: `framework_suites.py [--recipes] COMMIT`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ("tests/frameworks/conftest.py", "tests/frameworks/constraints.txt")
"""What affects all of them."""
RECIPES_FILE = "tests/frameworks/virtualenvs.py"


@dataclass(frozen=True)
class Suite:
    """Test files, the virtualenvs that they need, and the paths whose change affects them."""

    files: tuple[str, ...]
    recipes: tuple[str, ...]
    paths: tuple[str, ...]

    def is_affected_by(self, changed: Iterable[str], recipes: frozenset[str] = frozenset()) -> bool:
        """Tell whether a changed file is, or lies below, a path that matters, or a changed recipe is needed."""
        own = tuple(f"tests/frameworks/{name}" for name in self.files)
        matters = (*SHARED, *own, *self.paths)
        return not recipes.isdisjoint(self.recipes) or any(
            file == path or file.startswith(f"{path}/") for file in changed for path in matters
        )


SUITES = (
    Suite(
        files=("test_frameworks.py", "test_frameworks_on_machines.py"),
        recipes=(
            *("torch", "tensorflow", "jax", "mpi", "openmpi"),
            *("trees", "mxnet", "horovod", "deepspeed"),
        ),
        paths=(
            "src/falaj/drivers/processes/frameworks",
            "src/falaj/drivers/processes/supervisor/init_plan.py",
            "src/falaj/drivers/processes/sandbox_init/init.py",
            "src/falaj/control/jobs/environments.py",
            "src/falaj/control/jobs/staging.py",
            "tests/frameworks/framework_testbed.py",
            "tests/running_platforms.py",
            "examples/frameworks",
        ),
    ),
    Suite(
        files=("test_edge_bundles.py",),
        recipes=("edge-onnx", "edge-litert"),
        paths=("src/falaj/registry/exports",),
    ),
    Suite(
        files=("test_engines.py",),
        recipes=("engines",),
        paths=("src/falaj/serving/runtime/engines",),
    ),
    Suite(
        files=("test_kserve_client.py",),
        recipes=("kserve",),
        paths=("src/falaj/apps/model_server/http", "src/falaj/apps/model_server/inference"),
    ),
    Suite(
        files=("test_triton_server.py",),
        recipes=("triton",),
        paths=("src/falaj/serving/runtime/engines/triton.py", "src/falaj/registry/exports/triton.py"),
    ),
    Suite(
        files=("test_litert_variants.py",),
        recipes=("litert",),
        paths=(
            "src/falaj/optimization/runtime/recipes/litert.py",
            "src/falaj/serving/runtime/engines/litert.py",
        ),
    ),
    Suite(
        files=("test_mlflow_clients.py", "test_mlflow_import.py"),
        recipes=("mlflow3", "mlflow2", "mlflow2-store"),
        paths=("src/falaj/apps/api/mlflow", "src/falaj/sdk/run_import"),
    ),
)


def affected(commit: str) -> list[Suite]:
    """Return the suites that are affected by what changed since a commit."""
    printed = git("diff", "--name-only", "-z", commit)
    changed = [name for name in printed.split("\0") if name]
    recipes = frozenset[str]()
    if RECIPES_FILE in changed:
        before = git("show", f"{commit}:{RECIPES_FILE}")
        recipes = changed_recipes(before, (ROOT / RECIPES_FILE).read_text())
    return [suite for suite in SUITES if suite.is_affected_by(changed, recipes)]


def changed_recipes(before: str, after: str) -> frozenset[str]:
    """Return the names of recipes that were added or are written otherwise; all, if a function changed that builds."""
    (old, old_builds), (new, new_builds) = recipes_in(before), recipes_in(after)
    if old_builds != new_builds:
        return frozenset(new)
    return frozenset(name for name in new if new[name] != old.get(name))


def recipes_in(source: str) -> tuple[dict[str, str], list[str]]:
    """Return what the source says of each recipe, and its functions that build one."""
    recipes: dict[str, str] = {}
    builds = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("build_"):
            builds.append(ast.dump(node))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPES":
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                recipes[str(key.value)] = ast.dump(value)
    return recipes, builds


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(words: Sequence[str]) -> int:
    found = affected(words[-1])
    if "--recipes" in words:
        print(*(name for suite in found for name in suite.recipes))
    else:
        print(*(f"tests/frameworks/{name}" for suite in found for name in suite.files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
