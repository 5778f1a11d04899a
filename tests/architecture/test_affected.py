"""Which slow tests a change affects: the ones that must fail are among them, and those that cannot are not."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from affected import OTHER_FILES, UNSURE, Change, Selection, changes_since, matches
from code_graph import CodeGraph

ROOT = Path(__file__).parents[2]

# A function of each package, and a slow test that fails if the function does something else.
PLANTED = {
    "apps/api": ("falaj.apps.api.authentication", "unit/api/test_revocation.py"),
    "apps/cli": ("falaj.apps.cli.commands.train", "unit/cli/test_loop.py"),
    "apps/console": ("falaj.apps.console.pages.jobs.table", "browser/test_jobs_page.py"),
    "apps/controller": ("falaj.apps.controller.process", "scenarios/test_up.py"),
    "apps/model_server": ("falaj.apps.model_server.server", "scenarios/test_serving.py"),
    "apps/supervisor": ("falaj.apps.supervisor", "scenarios/test_up.py"),
    "assembly": ("falaj.assembly.backup.backup", "unit/assembly/test_backup.py"),
    "control/jobs": ("falaj.control.jobs.reconciler", "unit/training/test_reconciler.py"),
    "control/pipelines": ("falaj.control.pipelines.retraining", "unit/control/test_pipelines.py"),
    "control/tuning": ("falaj.control.tuning.search", "unit/tuning/test_search.py"),
    "drivers/dbos": ("falaj.drivers.dbos.workflows", "scenarios/test_durable.py"),
    "drivers/lmdb": ("falaj.drivers.lmdb.online", "unit/features/test_online.py"),
    "drivers/processes": ("falaj.drivers.processes.supervisor.attempt", "contracts/test_launcher.py"),
    "drivers/sandbox": ("falaj.drivers.sandbox.launch", "contracts/test_sandbox.py"),
    "features": ("falaj.features.service", "unit/features/test_ingestion.py"),
    "governance": ("falaj.governance.audit.deep", "unit/governance/audit/test_audit_deep.py"),
    "monitoring": ("falaj.monitoring.service", "unit/monitoring/test_service.py"),
    "optimization": ("falaj.optimization.service", "unit/optimization/test_workflow.py"),
    "registry": ("falaj.registry.aliases", "unit/registry/test_aliases.py"),
    "scheduling": ("falaj.scheduling.service", "unit/scheduling/service/test_queues.py"),
    "sdk": ("falaj.sdk.embedded", "unit/sdk/test_embedded.py"),
    "serving": ("falaj.serving.service", "unit/serving/test_endpoints.py"),
    "tracking": ("falaj.tracking.service", "unit/tracking/test_metrics.py"),
    "training": ("falaj.training.service", "unit/training/test_job_service.py"),
    "training/runtime": ("falaj.training.runtime.fit", "unit/training/test_pipeline.py"),
    "tuning": ("falaj.tuning.service", "unit/tuning/test_service.py"),
}


@cache
def graph() -> CodeGraph:
    return CodeGraph(ROOT)


def affected_files(module: str, *tests: str) -> set[str]:
    """Return which test files have an affected test if everything in `module` changes."""
    assert module in graph().modules
    nodes = frozenset((module, name) for name in graph().modules[module].nodes)
    selection = Selection(graph(), Change(frozenset(), nodes))
    return {
        test
        for test in tests
        if any(
            selection.affects(f"tests/{test}", name)
            for name in graph().modules[graph().paths[f"tests/{test}"]].nodes
            if name.startswith("test_")
        )
    }


@pytest.mark.parametrize(("module", "test"), PLANTED.values(), ids=PLANTED)
def test_a_change_selects_the_tests_that_must_fail(module: str, test: str) -> None:
    assert affected_files(module, test) == {test}


def test_every_package_has_a_planted_change() -> None:
    packages = {
        name.split(".")[1]
        for name, module in graph().modules.items()
        if module.is_ours and name.count(".") > 1
    }

    planted = {key.partition("/")[0] for key in PLANTED}

    assert packages - planted == {"ports", "records"}  # a change of a port affects everything; records, below


def test_a_change_of_a_record_selects_the_tests_that_use_it() -> None:
    assert affected_files("falaj.records.tuning", "unit/tuning/test_search.py") == {
        "unit/tuning/test_search.py"
    }


def test_a_change_does_not_select_tests_of_something_else() -> None:
    unaffected = (
        "unit/training/test_pipeline.py",
        "contracts/test_launcher_limits.py",
        "contracts/test_sandbox.py",
    )

    assert affected_files("falaj.apps.console.pages.jobs.table", *unaffected) == set()
    assert affected_files("falaj.features.service", *unaffected) == set()


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "tests/conftest.py", ".ci/run", "src/falaj/ports/keys.py", "new.bin"]
)
def test_everything_is_selected_where_nothing_can_be_known(name: str) -> None:
    selection = Selection(graph(), Change(frozenset({name}), frozenset()))

    assert selection.affects("tests/unit/training/test_pipeline.py", "test_anything")


def test_pages_affect_the_tests_that_run_their_blocks_only() -> None:
    selection = Selection(graph(), Change(frozenset({"docs/howto/policies.md"}), frozenset()))

    assert selection.affects("tests/scenarios/test_howtos.py", "test_anything")
    assert not selection.affects("tests/scenarios/test_up.py", "test_a_taken_port_is_reported")


def test_only_what_differs_in_a_file_has_changed(tmp_path: Path) -> None:
    source = tmp_path / "src" / "falaj" / "places.py"
    source.parent.mkdir(parents=True)
    (source.parent / "__init__.py").touch()
    source.write_text("LIMIT = 1\n\n\nclass Place:\n    def go(self): ...\n    def stay(self): ...\n")
    for words in (
        ["init"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "Begin"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    source.write_text(source.read_text().replace("stay(self)", "stay(self, days)") + "# comment\n")

    found = changes_since("HEAD", CodeGraph(tmp_path), tmp_path)

    assert found.nodes == {("falaj.places", "Place.stay")}


def test_the_table_of_other_files_names_what_exists() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = listed.stdout.splitlines()

    idle = [
        pattern for pattern in (*OTHER_FILES, *UNSURE) if not any(matches(file, [pattern]) for file in files)
    ]

    assert idle == []
    assert [test for tests in OTHER_FILES.values() for test in tests if test not in files] == []
