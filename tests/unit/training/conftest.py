"""The job service and its reconciler, on a real platform and with a launcher that the test owns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from job_harness import JobHarness
from platforms import OwnPlatform


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that computes gradients in a fork in a process of its own, where a fork of this one cannot.

    A torch with CUDA starts threads for gradients after a memory estimate, even without a GPU.
    """
    if pyfuncitem.get_closest_marker("forks_autograd") is None or can_fork_autograd():
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", pyfuncitem.nodeid]
    with tempfile.TemporaryDirectory(prefix="falaj-") as folder:
        command += ["--basetemp", folder]
        ran = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    return True


def can_fork_autograd() -> bool:
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace memory while the test runs."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def harness(platform: OwnPlatform, tmp_path: Path) -> JobHarness:
    """A job harness; the test runs on SQLite and on PostgreSQL."""
    return JobHarness(platform, tmp_path)


@pytest.fixture
def light_harness(light_platform: OwnPlatform, tmp_path: Path) -> JobHarness:
    """The same on SQLite only, for tests that do not depend on the database."""
    return JobHarness(light_platform, tmp_path)
