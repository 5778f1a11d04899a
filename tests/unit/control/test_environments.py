"""Python environments of jobs: those that an administrator lists, the readable paths, and their packages."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from falaj.control.jobs.environments import PACKAGE, packages_of, python_for
from falaj.control.jobs.volumes import link_volumes
from falaj.errors import InvalidInput
from falaj.ports.launcher import VolumeMount
from falaj.records.config import JobsConfig
from job_harness import JobHarness
from platforms import OwnPlatform


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A virtualenv without packages."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def test_without_a_name_the_platforms_own_python_runs_a_job(tmp_path: Path) -> None:
    own = python_for({}, None)

    assert own.executable == sys.executable
    assert own.readable == (PACKAGE,)
    assert own.variables(tmp_path, {}) == {}
    assert "pydantic==" in own.packages()


def test_unknown_environment_is_refused_with_the_known_ones(bare: Path) -> None:
    with pytest.raises(InvalidInput, match="bare, tensorflow") as refused:
        python_for({"tensorflow": bare, "bare": bare}, "jax")

    assert "[jobs.environments] in falaj.toml" in str(refused.value)


def test_folder_without_a_virtualenv_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"jobs\.environments\.jax"):
        python_for({"jax": tmp_path}, "jax")


def test_runtime_can_be_imported_without_other_packages(bare: Path, tmp_path: Path) -> None:
    python = python_for({"bare": bare}, "bare")
    given = python.variables(tmp_path, {"PYTHONPATH": "mine"})
    again = python.variables(tmp_path, {})
    script = "import falaj as fj, sys; print(fj.job.attempt, fj.__version__ != '', sys.prefix)"

    ran = subprocess.run([python.executable, "-c", script], env=again, capture_output=True, text=True)

    assert given == {"PYTHONPATH": f"mine:{again['PYTHONPATH']}"}
    assert (ran.stdout.split(), ran.stderr) == (["1", "True", str(bare)], "")


def test_what_is_made_for_a_job_of_another_user_can_be_read_under_any_umask(
    bare: Path, tmp_path: Path
) -> None:
    links, volume = tmp_path / "jobs" / "1.agent", VolumeMount("shared", folder=tmp_path)
    umask = os.umask(0o077)
    try:
        runtime = python_for({"bare": bare}, "bare").variables(links, {})["PYTHONPATH"]
        volumes = link_volumes([volume], links)["FALAJ_VOLUMES"]
    finally:
        os.umask(umask)

    for folder in (Path(runtime), Path(volumes)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert folder.parent == links
    assert all(each.stat().st_mode & 0o001 for each in (links, links.parent))


def test_job_may_read_the_virtualenv_and_its_base_python(bare: Path) -> None:
    readable = python_for({"bare": bare}, "bare").readable

    assert readable == (PACKAGE, bare, Path(sys.executable).resolve().parents[1])


def test_packages_include_those_of_linked_site_packages(bare: Path, tmp_path: Path) -> None:
    site = next(bare.glob("lib/python3*/site-packages"))
    for folder, name in ((site, "near"), (tmp_path, "far")):
        (folder / f"{name}-1.0.dist-info").mkdir()
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (site / "links.pth").write_text(f"# a comment\nimport os\n{tmp_path}\n/nowhere\n")

    packages = packages_of({"bare": bare}, "bare").decode().splitlines()

    assert packages[0] == f"# Python {sys.version.split()[0]}"
    assert packages[2:] == [f"# {bare}/bin/python", "far==1.0", "near==1.0"]


def test_packages_of_a_removed_environment_do_not_fail_the_job() -> None:
    assert packages_of({}, "jax") == b"# the environment jax, which falaj.toml no longer lists\n"


def test_environments_are_named_by_absolute_paths() -> None:
    with pytest.raises(ValueError, match="from / on"):
        JobsConfig.model_validate({"environments": {"jax": "venvs/jax"}})

    assert JobsConfig.model_validate({"environments": {"jax": "/opt/jax"}}).environments["jax"] == Path(
        "/opt/jax"
    )


def test_job_with_an_unknown_environment_is_refused_when_it_is_submitted(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="environment"):
        JobHarness(light_platform, tmp_path).submit(environment="jax")
