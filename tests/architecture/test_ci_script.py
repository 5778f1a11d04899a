"""The status of .ci/run: that of what it ran, also when what it started beside has ended before."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = """
source .ci/run
fails() { [[ $1 == "$FAILS" ]]; }
install_missing_packages() { :; }
make() { :; }
with_second_try() { ! fails "${!#}"; }
start_installing_frameworks() { installation_log=$(mktemp); sleep 0.01 & installation=$!; }
test_frameworks() { wait "$installation"; ! fails frameworks; }
test_without_bwrap() { ! fails bwrap; }
test_without_namespaces() { ! fails namespaces; }
test_kubernetes() { echo pods; ! fails kubernetes; }
main
"""


def run(fails: str) -> subprocess.CompletedProcess[str]:
    variables = {"FAILS": fails, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-c", STUBS], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


def test_it_ends_with_success_if_all_passed() -> None:
    done = run("nothing")

    assert (done.returncode, done.stderr) == (0, "")
    assert "all passed" in done.stdout


@pytest.mark.parametrize("part", ["test-all", "bwrap", "namespaces", "frameworks", "kubernetes"])
def test_a_part_that_fails_fails_it_and_the_others_go_on(part: str) -> None:
    done = run(part)

    assert done.returncode == 1
    assert "pods" in done.stdout
    (failed,) = (line for line in done.stdout.splitlines() if line.startswith("==> FAILED"))
    assert "," not in failed
