"""`make setup`: what is wrong with a virtualenv, what it lacks, what is installed into it, and what is said of that."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
venv=$(dirname "$0")/..
case "$*" in
  *"index versions"*) echo "Available versions: 2.14.0, 2.13.0+cu130, 2.13.0+cpu, 2.13.0" ;;
  *"pip install"*) { echo "$@"; ls -A "$venv"; } > "$venv/asked" ;;
esac
exit $(cat "$venv/status")
"""
"""Stands for the virtualenv's Python: notes what pip is asked for and the files beside, and ends with a status."""


@pytest.fixture
def setup() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield import_module("setup")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a virtualenv that has Falaj, but no record of what was installed."""
    root = tmp_path / "checkout"
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project]\nname = "falaj"\ndependencies = ["numpy"]\n')
    (root / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    python = root / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (root / ".venv" / "status").write_text("0")
    (root / ".venv" / "bin" / "falaj").write_text(f"#!{root}/.venv/bin/python3.11\nimport sys\n")
    add_distribution(root, "falaj", "0.1.0")
    install_from(root, root.as_uri())
    return root


def add_distribution(root: Path, name: str, version: str) -> None:
    folder = root / f".venv/lib/python3.11/site-packages/{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def install_from(root: Path, url: str) -> None:
    record = root / ".venv/lib/python3.11/site-packages/falaj-0.1.0.dist-info/direct_url.json"
    record.write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')


def install(setup: ModuleType, root: Path, extra: str) -> int:
    lack = setup.find_shortfall(root / ".venv", extra, root)
    return int(setup.install(root / ".venv", extra, lack, root))


# ------------------------------------------------------------------------------------- the virtualenv


def test_a_virtualenv_where_it_was_made_is_sound(setup: ModuleType, checkout: Path) -> None:
    assert setup.find_damage(checkout / ".venv") is None


@pytest.mark.parametrize(
    "script", ["#!{0}/bin/python3.11\n", "#!/bin/sh\n'''exec' \"{0}/bin/python3\" \"$0\" \"$@\"\n' '''\n"]
)
def test_a_virtualenv_that_was_copied_or_moved_names_its_origin(
    script: str, setup: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    venv, copied, moved = checkout / ".venv", tmp_path / "a copy" / ".venv", tmp_path / "moved"
    (venv / "bin" / "falaj").write_text(script.format(venv))
    shutil.copytree(venv, copied)
    of_copy = setup.find_damage(copied)
    venv.rename(moved)

    of_moved = setup.find_damage(moved)

    assert (of_copy, of_moved) == (f"was copied from {venv}", f"was moved from {venv}")


def test_a_virtualenv_reached_through_a_link_was_not_moved(
    setup: ModuleType, checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(checkout)

    assert setup.find_damage(tmp_path / "link" / ".venv") is None


def test_a_virtualenv_whose_python_is_gone_cannot_be_used(setup: ModuleType, checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.11")

    assert setup.find_damage(checkout / ".venv") == "has lost the Python that it was made with"


def test_a_virtualenv_without_pip_is_not_complete(setup: ModuleType, checkout: Path) -> None:
    (checkout / ".venv" / "status").write_text("1")

    assert setup.find_damage(checkout / ".venv") == "is not complete, or its Python was replaced"


def test_a_damaged_virtualenv_is_created_anew_and_the_reason_is_said(
    setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = checkout.parent / "other" / ".venv"
    shutil.copytree(checkout / ".venv", other)
    monkeypatch.setattr(setup, "create_venv", lambda venv: 7)

    status = setup.prepare(other, "demo")

    assert status == 7
    assert capsys.readouterr().out == f".venv was copied from {checkout / '.venv'}: creating it anew\n"


def test_a_virtualenv_that_is_created_is_sound_and_lacks_everything(
    setup: ModuleType, tmp_path: Path
) -> None:
    status = setup.create_venv(tmp_path / ".venv")

    assert (status, setup.find_damage(tmp_path / ".venv")) == (0, None)
    assert Path(sys.base_prefix) in (tmp_path / ".venv" / "bin" / "python").resolve().parents
    assert setup.find_shortfall(tmp_path / ".venv", "demo") == ("", setup.EXTRAS["demo"].download_mb)


# ---------------------------------------------------------------------------------- what is installed


@pytest.mark.parametrize(("first", "then"), [("demo", "demo"), ("dev", "dev"), ("dev", "demo")])
def test_what_is_installed_is_not_installed_again(
    first: str, then: str, setup: ModuleType, checkout: Path
) -> None:
    install(setup, checkout, first)
    (checkout / "constraints.txt").touch()  # as a checkout of another branch and back does
    with (checkout / "pyproject.toml").open("a") as project:
        project.write("[tool.ruff]\nline-length = 110\n")

    assert setup.find_shortfall(checkout / ".venv", then, checkout) is None


def test_the_tests_need_more_than_the_demonstration(setup: ModuleType, checkout: Path) -> None:
    install(setup, checkout, "demo")

    lack = setup.find_shortfall(checkout / ".venv", "dev", checkout)

    assert lack == ("", setup.EXTRAS["dev"].download_mb - setup.EXTRAS["demo"].download_mb)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pyproject.toml", '[project]\nname = "falaj"\ndependencies = ["numpy", "msgspec"]\n'),
        ("constraints.txt", "numpy==2.4.7\ntorch==2.13.0\n"),
    ],
)
@pytest.mark.parametrize("extra", ["demo", "dev"])
def test_new_requirements_are_noticed_by_content(
    extra: str, file: str, content: str, setup: ModuleType, checkout: Path
) -> None:
    install(setup, checkout, extra)
    (checkout / file).write_text(content)

    assert setup.find_shortfall(checkout / ".venv", extra, checkout) == (f"is older than {file}", None)


def test_an_installation_of_another_checkout_is_noticed(setup: ModuleType, checkout: Path) -> None:
    install(setup, checkout, "dev")
    install_from(checkout, "file:///elsewhere/falaj")

    lack = setup.find_shortfall(checkout / ".venv", "dev", checkout)

    assert lack == ("has the Falaj of /elsewhere/falaj", None)


# ------------------------------------------------------------------------------------ the installation


@pytest.mark.parametrize("extra", ["demo", "dev"])
def test_pip_is_asked_for_the_extra_and_torch_only_for_the_tests(
    extra: str, setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_nvidia_driver", lambda: False)

    install(setup, checkout, extra)

    asked = (checkout / ".venv" / "asked").read_text().splitlines()[0]
    assert f"--constraint {checkout}/constraints.txt --editable {checkout}[{extra}]" in asked
    assert asked.endswith("torch==2.13.0+cpu") is (extra == "dev")


def test_an_installation_that_does_not_end_well_is_done_again(
    setup: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(setup, checkout, "demo")
    (checkout / ".venv" / "status").write_text("3")

    status = install(setup, checkout, "dev")

    assert status == 3
    assert (
        ".installed-" not in (checkout / ".venv" / "asked").read_text()
    )  # nor while pip runs: it may be killed
    lack = setup.find_shortfall(checkout / ".venv", "demo", checkout)
    assert lack == ("was not installed to the end", None)
    assert "the installation failed; all of pip's output" in capsys.readouterr().err


def test_torch_that_fits_is_left_alone(setup: ModuleType, checkout: Path) -> None:
    add_distribution(checkout, "torch", "2.13.0")

    assert setup.choose_torch(checkout / ".venv", checkout) is None


@pytest.mark.parametrize(
    ("versions", "nvidia", "chosen"),
    [
        (["2.14.0", "2.13.0+cu130", "2.13.0+cpu", "2.13.0"], False, "2.13.0+cpu"),
        (["2.14.0", "2.13.0+cu130", "2.13.0+cpu", "2.13.0"], True, "2.13.0+cu130"),
        (["2.14.0+cpu", "2.13.0"], False, "2.13.0"),
        ([], False, "2.13.0"),
    ],
)
def test_the_cpu_build_of_torch_is_taken_where_there_is_one_and_no_driver(
    versions: list[str], chosen: str, setup: ModuleType, *, nvidia: bool
) -> None:
    assert setup.choose_build("2.13.0", versions, nvidia=nvidia) == chosen


@pytest.mark.parametrize(
    ("extra", "lack", "torch", "words"),
    [
        ("demo", ("", 310), None, "needs into .venv, once: about 310 MB to download, 1 to 3 minutes"),
        ("dev", ("", 590), "2.13.0+cpu", "about 780 MB to download with torch's CPU build, 2 to 5 minutes"),
        ("dev", ("", 590), "2.13.0", "about 3.3 GB to download with torch's CUDA build (README.md says how"),
        (
            "dev",
            ("is older than constraints.txt", None),
            None,
            ".venv is older than constraints.txt: installing",
        ),
    ],
)
def test_the_size_of_the_download_is_said_first(
    extra: str, lack: tuple[str, int | None], torch: str | None, words: str, setup: ModuleType
) -> None:
    assert words in setup.announce(Path(".venv"), extra, setup.Shortfall(*lack), torch)
