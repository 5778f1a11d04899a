"""Files in memory on a Python that was built without `os.memfd_create`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from falaj.drivers.memory_file import create_memory_file
from falaj.drivers.processes.metering import process_tree
from falaj.drivers.sandbox.launch import launch
from falaj.ports.sandbox import UserCode


@pytest.fixture(autouse=True)
def python_for_an_old_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)


def test_a_memory_file_has_no_name_and_is_not_inherited() -> None:
    with open(create_memory_file("plan"), "w+b") as file:
        file.write(b"text")
        file.seek(0)

        assert file.read() == b"text"
        assert os.fstat(file.fileno()).st_nlink == 0
        assert not os.get_inheritable(file.fileno())


def test_user_code_gets_its_environment(tmp_path: Path) -> None:
    script = "import os; os.write(1, os.environ['GREETING'].encode())"
    code = UserCode(
        command=(sys.executable, "-c", script), directory=tmp_path, environment={"GREETING": "hello"}
    )

    with launch(
        [], code, [], python=sys.executable, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        output, _ = process.communicate()

    assert output == b"hello"


def test_memory_files_are_counted() -> None:
    process_tree.memory_devices.cache_clear()

    devices = process_tree.memory_devices()

    with open(create_memory_file("device"), "rb") as file:
        assert os.fstat(file.fileno()).st_dev in devices
