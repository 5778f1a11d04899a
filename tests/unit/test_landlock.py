"""The Landlock rules of a job: paths, ports, and the rights that each version governs."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.sandbox import landlock
from falaj.drivers.sandbox.landlock import LandlockSandbox, interface, path_rules, port_rules, without
from falaj.errors import IsolationRefused
from falaj.ports.sandbox import MachineFacts, UserCode

GPU = Path("/dev/nvidia0")


def rights(code: UserCode) -> dict[Path, int]:
    found: dict[Path, int] = {}
    for path, allowed in path_rules(code):
        found[path] = found.get(path, 0) | allowed
    return found


@pytest.mark.parametrize(
    ("abi", "governs_not"),
    [
        (1, landlock.REFER | landlock.TRUNCATE | landlock.IOCTL_DEV),
        (2, landlock.TRUNCATE | landlock.IOCTL_DEV),
        (3, landlock.IOCTL_DEV),
        (5, 0),
        (7, 0),
    ],
)
def test_each_version_governs_the_rights_that_it_knows(abi: int, governs_not: int) -> None:
    assert interface(abi).files == 0xFFFF & ~governs_not
    assert interface(abi).ports == (0 if abi < 4 else 3)
    assert interface(abi).scopes == (0 if abi < 6 else 3)
    assert interface(abi).size == (8 if abi < 4 else 16 if abi < 6 else 24)


def test_a_job_writes_its_own_directory_and_reads_its_inputs(tmp_path: Path) -> None:
    found = rights(UserCode(["true"], tmp_path / "job", readable=[tmp_path / "input"]))

    assert found[tmp_path / "job"] & landlock.WRITE_FILE
    assert found[tmp_path / "input"] == landlock.READ
    assert not found[tmp_path / "job"] & (landlock.MAKE_CHAR | landlock.MAKE_BLOCK | landlock.IOCTL_DEV)
    writable = {path for path, allowed in found.items() if allowed & landlock.WRITE_FILE}
    assert {path for path in writable if not path.is_relative_to("/dev")} == {tmp_path / "job"}


def test_only_a_job_with_gpus_writes_to_proc(tmp_path: Path) -> None:
    assert rights(UserCode(["true"], tmp_path))[Path("/proc")] == landlock.READ

    found = rights(UserCode(["true"], tmp_path, devices=[GPU]))

    assert found[Path("/proc")] == landlock.READ | landlock.WRITE_FILE | landlock.TRUNCATE
    assert found[GPU] & landlock.IOCTL_DEV


def test_a_job_with_gpus_is_refused_where_it_would_be_root(tmp_path: Path) -> None:
    sandbox = LandlockSandbox(
        MachineFacts(is_root=True, python="python3", landlock_abi=7, landlock_works=True)
    )

    with pytest.raises(IsolationRefused, match="CUDA must write to /proc"):
        sandbox.start(
            UserCode(["true"], tmp_path, devices=[GPU]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    assert "gpus" in [gap.promise for gap in sandbox.gaps]


def test_hidden_paths_are_cut_out_of_readable_ones(tmp_path: Path) -> None:
    secret = tmp_path / "project" / "home"
    (secret / "keys").mkdir(parents=True)
    (tmp_path / "project" / "code" / "deep").mkdir(parents=True)
    (tmp_path / "project" / "train.py").touch()
    (tmp_path / "project" / "link").symlink_to(secret)

    around = without(tmp_path / "project", [secret])

    assert around == [tmp_path / "project" / "code", tmp_path / "project" / "train.py"]
    assert without(tmp_path / "project", []) == [tmp_path / "project"]
    assert without(secret, [secret]) == []
    assert without(secret / "keys", [secret]) == [secret / "keys"]  # it was given by name


def test_folder_of_a_package_can_be_listed_unless_something_is_hidden_there(tmp_path: Path) -> None:
    (tmp_path / "src" / "falaj").mkdir(parents=True)
    (tmp_path / "src" / "falaj" / "__init__.py").touch()
    code = UserCode(["true"], tmp_path / "job", readable=[tmp_path / "src" / "falaj"])

    assert rights(code)[tmp_path / "src"] == landlock.READ_DIR
    assert tmp_path / "src" not in rights(replace(code, hidden=[tmp_path / "src" / "home"]))


def test_hidden_path_in_the_jobs_own_directory_is_refused(tmp_path: Path) -> None:
    sandbox = LandlockSandbox(MachineFacts(is_root=False, python="python3", landlock_abi=7))
    (tmp_path / "key").touch()

    with pytest.raises(IsolationRefused, match="in the directory of the job"):
        sandbox.start(UserCode(["true"], tmp_path, hidden=[tmp_path / "key"]), stdout=-1, stderr=-1)


def test_ports_are_open_only_to_a_job_that_needs_some(tmp_path: Path) -> None:
    assert port_rules(UserCode(["true"], tmp_path)) == []
    assert port_rules(UserCode(["true"], tmp_path, network=True)) == []

    any_port, (first, last, allowed) = port_rules(UserCode(["true"], tmp_path, loopback=True))

    assert any_port == (0, 0, landlock.BIND_TCP)
    assert first > 1023
    assert last <= 65535
    assert allowed == landlock.BIND_TCP | landlock.CONNECT_TCP
