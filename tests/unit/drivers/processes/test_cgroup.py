"""The cgroup of an attempt, on a tree of plain files and on real cgroups where this machine permits it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from falaj.drivers.processes.limits.cgroup import AttemptCgroup, CgroupLimits, CgroupParent, find_parent
from polling import PATIENCE_S, eventually

ALL = frozenset({"memory", "pids", "cpu"})
GIB = 1 << 30

# As systemd lays it out for a user's service; written by hand.
MOUNTINFO = """\
22 28 0:20 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
30 24 0:26 / {mount} rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
"""
OWN = "0::/system.slice/falaj.service\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of files: falaj.service was delegated, and the platform runs in its own cgroup below it."""
    path = tmp_path / "cgroup"
    for name in ("", "system.slice", "falaj.service", "platform"):
        path = path / name
        path.mkdir(exist_ok=True)
        (path / "cgroup.controllers").write_text("cpu io memory pids\n")
        (path / "cgroup.subtree_control").write_text("cpu io memory pids\n")
        (path / "cgroup.procs").touch()
    (tmp_path / "mountinfo").write_text(MOUNTINFO.format(mount=tmp_path / "cgroup"))
    (tmp_path / "own").write_text("0::/system.slice/falaj.service/platform\n")
    return path.parent


def found(tmp_path: Path, named: Path | None = None) -> CgroupParent | None:
    return find_parent(named, mountinfo=tmp_path / "mountinfo", own=tmp_path / "own")


def share(**values: int | None) -> CgroupLimits:
    usual = {"memory_bytes": GIB, "processes": 2, "ranks": 2, "cpus": 4, "tasks": 1000}
    return CgroupLimits(**(usual | values))  # type: ignore[arg-type]


def test_only_a_delegated_cgroup_is_used_even_if_others_are_writable(tree: Path, tmp_path: Path) -> None:
    before = found(tmp_path)
    try:
        os.setxattr(tree, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"a file system with attributes: {error}")

    assert before is None
    assert found(tmp_path) == CgroupParent(tree, ALL)


def test_configured_cgroup_is_used(tree: Path, tmp_path: Path) -> None:
    assert found(tmp_path, tree.parent) == CgroupParent(tree.parent, ALL)
    assert found(tmp_path, tmp_path / "none") is None


def test_available_controllers_are_delegated(tree: Path, tmp_path: Path) -> None:
    (tree / "cgroup.controllers").write_text("memory\n")
    (tree / "cgroup.subtree_control").write_text("")

    assert found(tmp_path, tree) == CgroupParent(tree, frozenset({"memory"}))
    assert (tree / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize(
    ("mounts", "own"),
    [("", OWN), (MOUNTINFO, "4:memory:/x\n"), (MOUNTINFO, "0::/no/such/path\n")],
)
def test_without_version_2_there_is_no_parent(tmp_path: Path, mounts: str, own: str) -> None:
    (tmp_path / "mountinfo").write_text(mounts.format(mount=tmp_path / "cgroup"))
    (tmp_path / "own").write_text(own)

    assert found(tmp_path) is None


def settings(group: AttemptCgroup, leaf: str = "") -> dict[str, str]:
    return {path.name: path.read_text() for path in (group.path / leaf).iterdir() if path.is_file()}


def test_memory_limit_holds_for_the_whole_attempt_and_kills_one_rank(tmp_path: Path) -> None:
    group = AttemptCgroup.named(CgroupParent(tmp_path, ALL), "job_1/1")

    group.make(share(), ALL)

    assert settings(group) == {
        "memory.max": str(GIB),
        "memory.swap.max": "0",
        "pids.max": "1000",
        "cpu.weight": "400",
        "cgroup.subtree_control": "+memory",
    }
    assert settings(group, "rank-1") == {"memory.oom.group": "1"}


def test_rank_cgroups_are_made_only_for_several_ranks(tmp_path: Path) -> None:
    group = AttemptCgroup.named(CgroupParent(tmp_path, ALL), "job_1/1")

    group.make(share(ranks=1), ALL)

    assert settings(group)["memory.max"] == str(GIB)
    assert settings(group, "rank-0") == {}


def test_missing_controllers_are_left_out(tmp_path: Path) -> None:
    group = AttemptCgroup.named(CgroupParent(tmp_path, frozenset({"pids"})), "job_1/1")

    group.make(share(memory_bytes=None), frozenset({"pids"}))

    assert settings(group) == {"pids.max": "1000"}


def test_oom_kill_is_reported_by_rank(tmp_path: Path) -> None:
    group = AttemptCgroup.named(CgroupParent(tmp_path, ALL), "job_1/1")
    group.make(share(), ALL)
    for rank, kills in enumerate((0, 1)):
        events = f"low 0\nhigh 0\nmax 7\noom {kills}\noom_kill {kills}\noom_group_kill {kills}\n"
        (group.path / f"rank-{rank}" / "memory.events").write_text(events)
    (group.path / "pids.events").write_text("max 3\n")

    assert group.oom_killed() == [1]
    assert group.refused_tasks() == 3


# ----------------------------------------------------------------------------------------------------- real cgroups


@pytest.fixture
def real() -> CgroupParent:
    """A delegated cgroup of this machine, or the one that FALAJ_TEST_CGROUP names."""
    named = os.environ.get("FALAJ_TEST_CGROUP")
    parent = find_parent(Path(named) if named else None)
    if parent is None and named and os.access(named, os.W_OK):
        parent = CgroupParent(Path(named), frozenset())  # entering and killing need no controller
    if parent is None:
        pytest.skip("a cgroup (v2) of ours: name one by FALAJ_TEST_CGROUP")
    return parent


FORKS = "import os, time; os.fork() or os.setsid(); print(1, flush=True); time.sleep(600)"


@pytest.mark.on_request("FALAJ_TEST_CGROUP")
def test_real_cgroup_moves_and_kills_processes(real: CgroupParent) -> None:
    group = AttemptCgroup.named(real, f"test-{os.getpid()}")
    group.make(share(memory_bytes=None), real.controllers)
    enter = f"open('{group.path}/rank-1/cgroup.procs', 'w').write(str(__import__('os').getpid()))\n"

    with subprocess.Popen([sys.executable, "-c", enter + FORKS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"1\n1\n"
        assert len((group.path / "rank-1" / "cgroup.procs").read_text().split()) == 2
        group.enter(process.pid, "init")
        assert (group.path / "init" / "cgroup.procs").read_text().split() == [str(process.pid)]

        group.remove()

        assert process.wait(timeout=PATIENCE_S) == -9
    eventually(lambda: not group.path.exists())


@pytest.mark.on_request("FALAJ_TEST_CGROUP")
def test_real_cgroup_of_a_killed_shim_is_reused(real: CgroupParent) -> None:
    group = AttemptCgroup.named(real, f"test-{os.getpid()}-again")
    group.make(share(memory_bytes=None), real.controllers)

    group.make(share(memory_bytes=None), real.controllers)

    group.remove()
    group.remove()
    assert not group.path.exists()


HOG = """
import sys
open(sys.argv[1] + '/cgroup.procs', 'w').write(str(__import__('os').getpid()))
held = []
while True:
    held.append(bytearray(b'x' * (1 << 20)))
"""


@pytest.mark.on_request("FALAJ_TEST_CGROUP")
def test_real_memory_limit_kills_and_names_the_rank(real: CgroupParent) -> None:
    if "memory" not in real.controllers:
        pytest.skip("a cgroup (v2) with the memory controller")
    group = AttemptCgroup.named(real, f"test-{os.getpid()}-memory")
    group.make(share(memory_bytes=64 << 20), real.controllers)

    done = subprocess.run([sys.executable, "-c", HOG, str(group.path / "rank-1")], timeout=PATIENCE_S)

    assert done.returncode == -9
    assert group.oom_killed() == [1]
    group.remove()


@pytest.mark.on_request("FALAJ_TEST_CGROUP")
def test_real_limit_of_processes_refuses_more(real: CgroupParent) -> None:
    if "pids" not in real.controllers:
        pytest.skip("a cgroup (v2) with the pids controller")
    group = AttemptCgroup.named(real, f"test-{os.getpid()}-pids")
    group.make(share(memory_bytes=None, tasks=5), real.controllers)
    script = HOG.split("held")[0] + "import os\nfor _ in range(9): os.fork() or __import__('time').sleep(9)"

    command = [sys.executable, "-c", script, str(group.path / "rank-0")]
    subprocess.run(command, timeout=PATIENCE_S, stderr=subprocess.DEVNULL)

    assert group.refused_tasks() > 0
    group.remove()


def test_user_code_cannot_have_itself_moved_elsewhere(tmp_path: Path) -> None:
    group = AttemptCgroup(tmp_path / "group")
    (tmp_path / "group").mkdir()
    (tmp_path / "elsewhere").mkdir()

    group.enter(1, "../elsewhere")
    group.enter(1, "/elsewhere")

    assert list((tmp_path / "elsewhere").iterdir()) == []
