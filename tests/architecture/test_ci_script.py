"""The status of .ci/run: that of what it ran, also when what it started beside has ended before."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = """
source .ci/run
RETRIED=$(mktemp)
fails() { [[ $1 == "$FAILS" ]]; }
install_missing_packages() { :; }
make() { :; }
select_slow_tests() { selection=$(mktemp); }
test_quickly() { ! fails quick; }
test_as_dev() { ! fails dev; }
test_what_was_skipped() { ! fails skipped; }
with_second_try() { [[ $* != *"$FAILS"* ]]; }
start_installing_frameworks() { installation_log=$(mktemp); sleep 0.01 & installation=$!; }
test_frameworks() { wait "$installation"; ! fails frameworks; }
test_without_bwrap() { ! fails bwrap; }
test_without_namespaces() { ! fails namespaces; }
check_wheel() { ! fails wheel; }
test_kubernetes() { echo pods; ! fails kubernetes; }
main
"""

SECOND_TRY = """
source .ci/run
retried=$(mktemp)
RETRIED=$LAST
tests() {
  [[ $* == *--last-failed* ]] && return
  cache=${PYTEST_ADDOPTS##*cache_dir=}
  mkdir -p "$cache/v/cache"
  echo "$FAILED" >"$cache/v/cache/lastfailed"
  return 1
}
with_second_try tests && cat "$retried"
"""


def run(fails: str) -> subprocess.CompletedProcess[str]:
    variables = {"FAILS": fails, "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    return subprocess.run(
        ["bash", "-c", STUBS], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


def test_it_ends_with_success_if_all_passed() -> None:
    done = run("nothing")

    assert (done.returncode, done.stderr) == (0, "")
    assert "all passed" in done.stdout


@pytest.mark.parametrize(
    "part",
    ["quick", "dev", "skipped", "test-slow", "bwrap", "namespaces", "wheel", "frameworks", "kubernetes"],
)
def test_a_part_that_fails_fails_it_and_the_others_go_on(part: str) -> None:
    done = run(part)

    assert done.returncode == 1
    assert "pods" in done.stdout
    (failed,) = (line for line in done.stdout.splitlines() if line.startswith("==> FAILED"))
    assert "," not in failed


def second_try(tmp_path: Path, failed: dict[str, bool], last: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "last").write_text(last)
    variables = {"FAILED": json.dumps(failed), "LAST": str(tmp_path / "last")}
    variables |= {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    return subprocess.run(
        ["bash", "-c", SECOND_TRY], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


def test_three_tests_may_run_once_more_and_are_listed(tmp_path: Path) -> None:
    done = second_try(tmp_path, {"a::x": True, "a::y": True, "b::z[one two]": True})

    assert done.returncode == 0
    assert done.stdout.endswith("a::x\na::y\nb::z[one two]\n")


def test_four_failures_are_not_tried_again(tmp_path: Path) -> None:
    done = second_try(tmp_path, dict.fromkeys("abcd", True))

    assert (done.returncode, done.stdout) == (1, "")


def test_the_same_test_twice_in_a_row_is_a_failure(tmp_path: Path) -> None:
    done = second_try(tmp_path, {"a::x": True, "a::y": True}, last="b::z\na::y\n")

    assert done.returncode == 1
    assert "last run, too:\na::y\n" in done.stdout
