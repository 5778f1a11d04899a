"""The Sandbox contract, over each mechanism: hostile code gets what the decision says, and no more."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from falaj.drivers.sandbox import sandbox_for
from falaj.drivers.sandbox.facts import try_bubblewrap
from falaj.errors import IsolationRefused
from falaj.governance.isolation import Protection, decide
from falaj.ports.sandbox import Mechanism, UserCode
from sandbox_ground import DEADLINE_SECONDS, PLAIN, Ground, ended, first_line, kill, machine, running_platform

ISOLATED = pytest.mark.parametrize("ground", ["bubblewrap", "uid", "uid-plain"], indirect=True)
BUBBLEWRAP = pytest.mark.parametrize("ground", ["bubblewrap"], indirect=True)
SAME_UID = pytest.mark.parametrize("ground", ["same-uid"], indirect=True)

KEY, ROWS, WORD, TOKEN = "key-b41c", "rows-77e0", "word-90da", "token-3fd2"
SECRETS: dict[str, Protection] = {KEY: "files", ROWS: "files", WORD: "platform", TOKEN: "jobs"}
HOSTILE_CODE = Path(__file__).with_name("hostile_code.py")

NEIGHBOUR = """
import os, signal
with open("secret", "w") as file:
    file.write(os.environ["TOKEN"])
print("ready", flush=True)
signal.pause()
"""

ATTACKS: list[tuple[str, Protection]] = [
    ("read key", "files"),
    ("read database", "files"),
    ("list home", "files"),
    ("write into home", "files"),
    ("read neighbour", "jobs"),
    ("list neighbour", "jobs"),
    ("write into neighbour", "jobs"),
    ("read platform environment", "platform"),
    ("read platform memory", "platform"),
    ("trace platform", "platform"),
    ("signal platform", "platform"),
    ("write outside", "writes"),
    ("connect", "network"),
]


@pytest.fixture(scope="module", params=["bubblewrap", "uid", "uid-plain", "same-uid"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    """Each mechanism; uid also as in a container that has one spare uid and may not make namespaces."""
    if sys.platform != "linux":
        pytest.skip("the sandboxes: this is not Linux")
    mechanism: Mechanism = "uid" if request.param == "uid-plain" else request.param
    facts = machine(mechanism)
    if request.param == "uid-plain":
        facts = replace(facts, unshare=None, spare_uids=facts.spare_uids[:1])
    try:
        isolation = decide(facts, users=1, prefer=mechanism)
    except IsolationRefused as refused:
        pytest.skip(f"the {mechanism} sandbox: {refused.faults[0].given}")
    root = Path(tempfile.mkdtemp(prefix="falaj-sandbox-"))
    root.chmod(0o755)
    yield Ground(sandbox_for(isolation.mechanism, facts), isolation, facts, root)
    shutil.rmtree(root)


@dataclass(frozen=True)
class Raid:
    """One run of the hostile code beside a platform process, its home, and another job."""

    loot: dict[str, dict[str, str]]
    protects: tuple[Protection, ...]
    platform_exit: int | None
    command_lines: str

    def succeeded(self, attack: str) -> bool:
        return "loot" in self.loot[attack]


@pytest.fixture(scope="module")
def raid(ground: Ground) -> Iterator[Raid]:
    home = furnish_home(ground.root)
    neighbour = ground.python(NEIGHBOUR, job="neighbour", environment={**PLAIN, "TOKEN": TOKEN})
    with ExitStack() as stack:
        platform = stack.enter_context(running_platform(WORD))
        other = stack.enter_context(ground.started(neighbour))
        first_line(other)
        targets = {
            **json.loads(first_line(platform)),
            **{name: str(path) for name, path in home.items()},
            "neighbour": str(neighbour.directory),
        }
        raider = ground.code(
            *[ground.facts.python, "attack.py", json.dumps(targets)],
            job="raider",
            hidden=[home["home"]],
            environment={**PLAIN, "MINE": "1"},
        )
        shutil.copy(HOSTILE_CODE, raider.directory / "attack.py")
        done = ground.run(raider)
        assert done.returncode == 0, done.stderr.decode()
        loot = json.loads(done.stdout)
        exit_code = platform.wait(DEADLINE_SECONDS) if "loot" in loot["signal platform"] else platform.poll()
        yield Raid(loot, ground.isolation.protects, exit_code, command_lines())


def furnish_home(root: Path) -> dict[str, Path]:
    home = root / "home"
    home.mkdir(mode=0o700)
    paths = {"home": home, "key": home / "root.key", "database": home / "falaj.db", "open": root / "open"}
    paths["key"].write_text(KEY)
    paths["key"].chmod(0o600)
    paths["database"].write_text(ROWS)
    paths["open"].mkdir()
    paths["open"].chmod(0o777)
    return paths


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # the process ended meanwhile
            continue
    return "\n".join(lines)


@pytest.mark.parametrize(("attack", "protection"), ATTACKS)
def test_attack_succeeds_only_where_no_protection_is_claimed(
    raid: Raid, attack: str, protection: Protection
) -> None:
    claimed = protection in raid.protects
    if not claimed and attack in ("read platform memory", "trace platform") and kernel_limits_tracing():
        return  # then the attack may fail without any help of ours

    assert raid.succeeded(attack) == (not claimed), raid.loot[attack]


def kernel_limits_tracing() -> bool:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return scope.exists() and scope.read_text().strip() != "0"


@SAME_UID
def test_the_attacks_work_where_nothing_is_protected(raid: Raid) -> None:
    assert raid.protects == ()
    assert raid.loot["read key"]["loot"] == KEY
    assert raid.loot["read database"]["loot"] == ROWS
    assert WORD in raid.loot["read platform environment"]["loot"]
    assert TOKEN in raid.loot["read any environment"]["loot"]
    assert raid.platform_exit == -signal.SIGTERM


@ISOLATED
def test_no_protected_secret_is_anywhere_in_the_loot(raid: Raid) -> None:
    guarded = [secret for secret, protection in SECRETS.items() if protection in raid.protects]

    found = json.dumps(raid.loot)

    assert guarded
    assert [secret for secret in guarded if secret in found] == []


@ISOLATED
def test_platform_outlives_the_raid(raid: Raid) -> None:
    assert raid.platform_exit is None


def test_environment_is_exactly_what_was_given(raid: Raid) -> None:
    assert json.loads(raid.loot["own environment"]["loot"]) == {**PLAIN, "MINE": "1"}


def test_job_environment_is_on_no_command_line(raid: Raid) -> None:
    assert NEIGHBOUR in raid.command_lines  # the other job is there
    assert TOKEN not in raid.command_lines


@ISOLATED
def test_no_rights_are_left_and_none_can_be_gained(raid: Raid) -> None:
    status = dict(line.split(":\t", 1) for line in raid.loot["own status"]["loot"].splitlines())

    assert {status[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert "0" not in [*status["Uid"].split(), *status["Gid"].split(), *status["Groups"].split()]


def test_output_and_exit_code_come_through(ground: Ground) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"

    done = ground.run(ground.python(script))

    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


@ISOLATED
def test_missing_command_fails_by_name(ground: Ground) -> None:
    done = ground.run(ground.code("no-such-command"))

    assert (done.returncode, b"no-such-command" in done.stderr) == (127, True)


def test_reads_its_inputs_and_writes_only_its_own_directory(ground: Ground) -> None:
    inputs = ground.root / "inputs"
    inputs.mkdir()
    (inputs / "rows.csv").write_text("1,2,3")
    code = ground.python(
        "import sys, shutil; shutil.copy(sys.argv[1], 'copied.csv'); open('given.txt', 'a').write(' more')",
        str(inputs / "rows.csv"),
        job="copier",
        readable=[inputs],
    )
    (code.directory / "given.txt").write_text("given")

    done = ground.run(code)

    assert done.returncode == 0, done.stderr.decode()
    assert (code.directory / "copied.csv").read_text() == "1,2,3"
    assert (code.directory / "given.txt").read_text() == "given more"


@BUBBLEWRAP
def test_inputs_open_to_everyone_still_cannot_be_changed(ground: Ground) -> None:
    shared = ground.root / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    done = ground.run(
        ground.python("import sys; open(sys.argv[1] + '/x', 'w')", str(shared), readable=[shared])
    )

    assert b"Read-only file system" in done.stderr


def test_scratch_and_shared_memory_work(ground: Ground) -> None:
    script = """
import multiprocessing, tempfile
tempfile.TemporaryFile(dir="/tmp").close()
multiprocessing.Semaphore()
print("ok")
"""

    done = ground.run(ground.python(script))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_own_loopback_works_without_the_network(ground: Ground) -> None:
    script = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("ok")
"""

    done = ground.run(ground.python(script))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_granted_network_reaches_a_listener(ground: Ground) -> None:
    script = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('ok')"

    with running_platform(WORD) as platform:
        port = str(json.loads(first_line(platform))["port"])
        done = ground.run(ground.python(script, port, network=True))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_killing_it_kills_its_children(ground: Ground) -> None:
    script = "import os, signal; os.fork(); print('up', flush=True); signal.pause()"
    with ground.started(ground.python(script)) as process:
        assert process.stdout is not None
        first_line(process)

        kill(process)

        assert ended(process.stdout.fileno())


def test_child_that_leaves_the_session_dies_too_where_claimed(ground: Ground) -> None:
    script = "import os, signal; os.fork() or os.setsid() or print(os.getpid(), flush=True); signal.pause()"
    with ground.started(ground.python(script)) as process:
        assert process.stdout is not None
        stray = int(first_line(process))

        kill(process)

        if "children" in ground.isolation.protects:
            assert ended(process.stdout.fileno())
            return
        process.wait(DEADLINE_SECONDS)
        os.kill(stray, signal.SIGKILL)  # it is still there to be killed


@ISOLATED
def test_job_dies_with_the_platform(ground: Ground) -> None:
    code = ground.python("import signal; print('up', flush=True); signal.pause()")
    output, job_output = os.pipe()
    platform = os.fork()
    if platform == 0:
        try:
            ground.sandbox.start(code, stdout=job_output, stderr=subprocess.DEVNULL)
            select.select([output], [], [], DEADLINE_SECONDS)
        finally:
            os._exit(0)

    os.close(job_output)
    os.waitpid(platform, 0)

    assert ended(output)
    os.close(output)


def test_launcher_never_loads_what_the_user_preloads(ground: Ground) -> None:
    code = ground.code("/usr/bin/true", environment={"LD_PRELOAD": "/nowhere/evil.so"})

    done = ground.run(code)

    # The loader complains once in each program that obeys the variable: the user's own, and no other.
    assert done.stderr.count(b"evil.so") == 1, done.stderr.decode()


@ISOLATED
def test_hidden_folder_inside_a_readable_one_stays_hidden(ground: Ground) -> None:
    project = ground.root / "project"
    (project / "home").mkdir(parents=True, mode=0o700)
    (project / "home" / "root.key").write_text(KEY)
    (project / "home").chmod(0o700)
    (project / "train.py").write_text("# train")
    script = "import sys; [print(open(path).read()) for path in sys.argv[1:]]"
    paths = [str(project / "train.py"), str(project / "home" / "root.key")]

    done = ground.run(ground.python(script, *paths, readable=[project], hidden=[project / "home"]))

    assert (done.returncode, done.stdout) == (1, b"# train\n")


@BUBBLEWRAP
def test_hidden_file_inside_a_readable_folder_stays_hidden(ground: Ground) -> None:
    folder = ground.root / "mixed"
    folder.mkdir()
    (folder / "root.key").write_text(KEY)
    alias = ground.root / "alias"
    alias.symlink_to(folder)
    script = "import sys; print(open(sys.argv[1]).read())"

    for name in (folder, alias):
        code = ground.python(script, str(name / "root.key"), readable=[name], hidden=[alias / "root.key"])
        assert (ground.run(code).returncode, ground.run(code).stdout) == (1, b"")


@BUBBLEWRAP
def test_job_directory_inside_the_hidden_home_is_all_that_shows_of_it(ground: Ground) -> None:
    home = ground.root / "tight"
    home.mkdir(mode=0o700)
    (home / "root.key").write_text(KEY)
    (home / "job").mkdir()
    code = ground.python("import os; open('made', 'w'); print(os.listdir('..'))", hidden=[home])

    done = ground.run(replace(code, directory=home / "job"))

    assert done.stdout == b"['job']\n", done.stderr.decode()
    assert (home / "job" / "made").exists()


@ISOLATED
def test_files_left_by_a_job_are_not_roots(ground: Ground) -> None:
    code = ground.python("import os; open('tool', 'w'); os.chmod('tool', 0o4755)", job="setuid")

    ground.run(code)

    assert (code.directory / "tool").stat().st_uid in (ground.facts.spare_uids or [os.getuid()])


@ISOLATED
def test_stored_file_linked_into_a_job_keeps_its_owner(ground: Ground) -> None:
    stored = ground.root / "blob"
    stored.write_text("stored")
    code = ground.python("pass", job="linked")
    os.link(stored, code.directory / "linked")

    ground.run(code)

    assert stored.stat().st_uid == os.getuid()


def test_bubblewrap_that_bounds_no_file_system_in_memory_is_used_without(tmp_path: Path) -> None:
    facts = machine("bubblewrap")
    if not facts.bubblewrap_works:
        pytest.skip(f"bubblewrap: {facts.bubblewrap_fault}")
    old = tmp_path / "bwrap"
    refusing = 'case " $* " in *" --size "*) echo "bwrap: Unknown option --size" >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{refusing}\nexec {facts.bubblewrap} "$@"\n')
    old.chmod(0o755)
    code = UserCode(
        [facts.python, "-c", "pass"], tmp_path / "job", scratch_bytes=1 << 20, shared_memory_bytes=1 << 20
    )
    code.directory.mkdir()

    found = try_bubblewrap(replace(facts, bubblewrap=str(old)))
    process = sandbox_for("bubblewrap", found).start(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    assert (found.bubblewrap_works, found.bubblewrap_bounds) == (True, False)
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, said) == (0, b"")
