"""The Sandbox contract, over each mechanism: hostile code reaches what the isolation decision declares, and no more."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from falaj.drivers.sandbox import gaps_of, sandbox_for
from falaj.drivers.sandbox.facts import try_bubblewrap
from falaj.drivers.sandbox.landlock import remove_short_name
from falaj.errors import IsolationRefused
from falaj.governance.isolation import decide
from falaj.ports.sandbox import PROMISES, MachineFacts, Mechanism, Promise, UserCode
from polling import PATIENCE_S
from sandbox_testbed import (
    PLAIN,
    SandboxTestbed,
    ended,
    first_line,
    kill,
    machine,
    running_platform,
)

LANDLOCK = [
    "landlock",
    "landlock-one-uid",
    "landlock-shared",
    "landlock-abi5-shared",
    "landlock-abi2",
    "landlock-abi1-shared",
]
RUNGS = ["bubblewrap", *LANDLOCK, "uid", "uid-plain", "same-uid"]
ISOLATED = pytest.mark.parametrize(
    "sandbox_testbed", [rung for rung in RUNGS if rung != "same-uid"], indirect=True
)
BUBBLEWRAP = pytest.mark.parametrize("sandbox_testbed", ["bubblewrap"], indirect=True)
SAME_UID = pytest.mark.parametrize("sandbox_testbed", ["same-uid"], indirect=True)

KEY, ROWS, WORD, TOKEN = "key-b41c", "rows-77e0", "word-90da", "token-3fd2"
SECRETS: dict[str, Promise] = {KEY: "files", ROWS: "files", WORD: "platform", TOKEN: "jobs"}
HOSTILE_CODE = Path(__file__).with_name("hostile_code.py")

OTHER_JOB = """
import os, signal, sys
for path in ("secret", sys.argv[1]):
    with open(path, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(os.environ["TOKEN"])
print("ready", flush=True)
signal.pause()
"""

ATTACKS: list[tuple[str, Promise]] = [
    ("read key", "files"),
    ("read database", "files"),
    ("read key by hard link", "files"),
    ("read key by symbolic link", "files"),
    ("list home", "files"),
    ("watch home", "files"),
    ("write into home", "files"),
    ("open key to everyone", "files"),
    ("truncate key", "files"),
    ("ask for a path", "names"),
    ("read other job", "jobs"),
    ("list other job", "jobs"),
    ("write into other job", "jobs"),
    ("read platform environment", "platform"),
    ("read platform memory", "platform"),
    ("copy platform memory", "platform"),
    ("trace platform", "platform"),
    ("limit platform", "platform"),
    ("slow platform down", "platform"),
    ("pin platform", "platform"),
    ("signal platform", "signals"),
    ("list processes", "processes"),
    ("write outside", "writes"),
    ("delete outside", "writes"),
    ("move out", "writes"),
    ("move in", "writes"),
    ("truncate", "writes"),
    ("truncate by opening", "writes"),
    ("connect", "network"),
    ("connect by sending", "network"),
    ("connect on several paths", "network"),
    ("send datagram", "network"),
    ("connect to unix socket", "sockets"),
    ("connect to abstract socket", "abstract-sockets"),
    ("read shared memory", "shared-memory"),
    ("use vsock", "kernel"),
    ("use the kernel's ciphers", "kernel"),
    ("listen to the kernel's events", "kernel"),
    ("change the firewall", "kernel"),
    ("make a user namespace", "kernel"),
    ("clone into a user namespace", "kernel"),
    ("use io_uring", "kernel"),
    ("store a key", "kernel"),
    ("read keys", "kernel"),
    ("load BPF", "kernel"),
    ("count events", "kernel"),
    ("handle page faults", "kernel"),
    ("open by handle", "kernel"),
    ("mount", "kernel"),
    ("open a mount", "kernel"),
    ("call as a 32-bit program", "kernel"),
    ("execute what it reads", "kernel"),
]


@pytest.fixture(
    scope="module", params=[RUNGS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in RUNGS[1:])]
)
def sandbox_testbed(request: pytest.FixtureRequest) -> Iterator[SandboxTestbed]:
    """Each mechanism; uid also without namespaces, and Landlock also with our own uid and in older versions."""
    if sys.platform != "linux":
        pytest.skip("the sandboxes: this is not Linux")
    mechanism: Mechanism = next(
        name for name in ("bubblewrap", "landlock", "uid", "same-uid") if name in request.param
    )
    if request.param == "same-uid":
        mechanism = "same-uid"
    facts = weakened(machine(mechanism), request.param)
    try:
        isolation = decide(facts, users=1, gaps=gaps_of, prefer=mechanism)
    except IsolationRefused as refused:
        pytest.skip(f"the {mechanism} sandbox: {refused.faults[0].given}")
    root = Path(tempfile.mkdtemp(prefix="falaj-sandbox-"))
    root.chmod(0o755)
    yield SandboxTestbed(sandbox_for(isolation.mechanism, facts), isolation, facts, root)
    shutil.rmtree(root)


def weakened(facts: MachineFacts, rung: str) -> MachineFacts:
    """Return the facts of a machine that offers no more than `rung`."""
    if rung == "uid-plain":
        return replace(facts, unshare=None, spare_uids=facts.spare_uids[:1])
    if rung == "landlock-one-uid":
        return replace(facts, spare_uids=facts.spare_uids[:1])
    if rung.endswith("-shared"):
        facts = replace(facts, landlock_own_uid=False)
    for abi in (1, 2, 5):
        if f"abi{abi}" in rung:
            facts = replace(facts, landlock_abi=min(abi, facts.landlock_abi))
    return facts


@dataclass(frozen=True)
class AttackRun:
    """One run of the hostile code beside a platform process, its home, and another job."""

    results: dict[str, dict[str, str]]
    protects: tuple[Promise, ...]
    broken: Mapping[Promise, str]
    platform_exit: int | None
    command_lines: str

    def succeeded(self, attack: str) -> bool:
        return "obtained" in self.results[attack]


@pytest.fixture(scope="module")
def attack_run(sandbox_testbed: SandboxTestbed) -> Iterator[AttackRun]:
    home = furnish_home(sandbox_testbed.root)
    shared_memory = Path("/dev/shm", sandbox_testbed.root.name)
    other_job = sandbox_testbed.python(
        OTHER_JOB, str(shared_memory), job="other_job", environment={**PLAIN, "TOKEN": TOKEN}
    )
    with ExitStack() as stack:
        stack.callback(shared_memory.unlink, missing_ok=True)
        platform = stack.enter_context(running_platform(WORD, home["home"]))
        other = stack.enter_context(sandbox_testbed.started(other_job))
        first_line(other)
        targets = {
            **json.loads(first_line(platform)),
            **{name: str(path) for name, path in home.items()},
            "other_job": str(other_job.directory),
            "shared_memory": str(shared_memory),
        }
        attacker = sandbox_testbed.code(
            *[sandbox_testbed.facts.python, "attack.py", json.dumps(targets)],
            job="attacker",
            readable=[home["given"], home["input"]],
            hidden=[home["home"]],
            environment={**PLAIN, "MINE": "1"},
        )
        shutil.copy(HOSTILE_CODE, attacker.directory / "attack.py")
        done = sandbox_testbed.run(attacker)
        assert done.returncode == 0, done.stderr.decode()
        results = json.loads(done.stdout)
        exit_code = platform.wait(PATIENCE_S) if "obtained" in results["signal platform"] else platform.poll()
        yield AttackRun(
            results,
            sandbox_testbed.isolation.protects,
            sandbox_testbed.isolation.broken,
            exit_code,
            command_lines(),
        )


def furnish_home(root: Path) -> dict[str, Path]:
    home = root / "home"
    home.mkdir(mode=0o700)
    paths = {"home": home, "key": home / "root.key", "database": home / "falaj.db", "open": root / "open"}
    paths["key"].write_text(KEY)
    paths["key"].chmod(0o600)
    paths["database"].write_text(ROWS)
    paths["open"].mkdir()
    paths["open"].chmod(0o777)
    for name in ("deleted", "moved"):
        (paths["open"] / name).write_text(name)
    for name in ("given", "input"):
        paths[name] = root / name
        paths[name].write_text(name)
        paths[name].chmod(0o666)
    return paths


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # the process ended meanwhile
            continue
    return "\n".join(lines)


@pytest.mark.parametrize(("attack", "promise"), ATTACKS)
def test_attack_succeeds_only_where_the_promise_is_declared_as_broken(
    attack_run: AttackRun, attack: str, promise: Promise
) -> None:
    sentence = attack_run.broken.get(promise)

    assert not (attack_run.succeeded(attack) and sentence is None), attack_run.results[attack]
    if sentence is not None:
        assert attack_run.succeeded(attack) or attack in may_fail_anyway(), f"{promise} is kept: claim it"
        pytest.xfail(f"{promise}: {sentence}")


def may_fail_anyway() -> set[str]:
    """Return the attacks that some kernels stop by themselves."""
    tracing = {"read platform memory", "copy platform memory", "trace platform"}
    always = {"connect on several paths"} | ({"pin platform"} if len(os.sched_getaffinity(0)) == 1 else set())
    unbuilt = {attack for attack, promise in ATTACKS if promise == "kernel"}
    return always | unbuilt | (tracing if kernel_limits_tracing() else set())


def test_gaps_are_declared_once_with_a_description(sandbox_testbed: SandboxTestbed) -> None:
    promises = [gap.promise for gap in sandbox_testbed.sandbox.gaps]

    assert len(promises) == len(set(promises))
    assert set(promises) <= set(PROMISES)
    assert all(gap.sentence for gap in sandbox_testbed.sandbox.gaps)


def kernel_limits_tracing() -> bool:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return scope.exists() and scope.read_text().strip() != "0"


@SAME_UID
def test_the_attacks_work_where_nothing_is_protected(attack_run: AttackRun) -> None:
    assert attack_run.protects == ("renames", "gpus")
    assert attack_run.results["read key"]["obtained"] == KEY
    assert attack_run.results["read database"]["obtained"] == ROWS
    assert WORD in attack_run.results["read platform environment"]["obtained"]
    assert TOKEN in attack_run.results["read any environment"]["obtained"]
    assert attack_run.platform_exit == -signal.SIGTERM


@ISOLATED
def test_no_protected_secret_is_in_what_the_attack_collected(attack_run: AttackRun) -> None:
    guarded = [secret for secret, promise in SECRETS.items() if promise in attack_run.protects]
    if "shared-memory" in attack_run.broken and TOKEN in guarded:
        guarded.remove(TOKEN)  # the other job keeps it there, too

    found = json.dumps(attack_run.results)

    assert guarded
    assert [secret for secret in guarded if secret in found] == []


@ISOLATED
def test_platform_survives_the_attacks(attack_run: AttackRun) -> None:
    if (sentence := attack_run.broken.get("signals")) is not None:
        pytest.xfail(f"signals: {sentence}")

    assert attack_run.platform_exit is None


def test_environment_is_exactly_what_was_given(attack_run: AttackRun) -> None:
    found = json.loads(attack_run.results["own environment"]["obtained"])
    if "tmp" in attack_run.broken:
        found.pop("TMPDIR", None)

    assert found == {**PLAIN, "MINE": "1"}


def test_job_environment_is_on_no_command_line(attack_run: AttackRun) -> None:
    assert OTHER_JOB in attack_run.command_lines  # the other job was found
    assert TOKEN not in attack_run.command_lines


@ISOLATED
def test_no_capabilities_are_left_and_none_can_be_gained(attack_run: AttackRun) -> None:
    status = dict(line.split(":\t", 1) for line in attack_run.results["own status"]["obtained"].splitlines())

    assert {status[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    if (sentence := attack_run.broken.get("identity")) is not None:
        pytest.xfail(f"identity: {sentence}")
    assert "0" not in [*status["Uid"].split(), *status["Gid"].split(), *status["Groups"].split()]


def test_output_and_exit_code_come_through(sandbox_testbed: SandboxTestbed) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"

    done = sandbox_testbed.run(sandbox_testbed.python(script))

    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


@ISOLATED
def test_missing_command_fails_by_name(sandbox_testbed: SandboxTestbed) -> None:
    done = sandbox_testbed.run(sandbox_testbed.code("no-such-command"))

    assert (done.returncode, b"no-such-command" in done.stderr) == (127, True)


def test_reads_its_inputs_and_writes_only_its_own_directory(sandbox_testbed: SandboxTestbed) -> None:
    inputs = sandbox_testbed.root / "inputs"
    inputs.mkdir()
    (inputs / "rows.csv").write_text("1,2,3")
    code = sandbox_testbed.python(
        "import sys, shutil; shutil.copy(sys.argv[1], 'copied.csv'); open('given.txt', 'a').write(' more')",
        str(inputs / "rows.csv"),
        job="copier",
        readable=[inputs],
    )
    (code.directory / "given.txt").write_text("given")

    done = sandbox_testbed.run(code)

    assert done.returncode == 0, done.stderr.decode()
    assert (code.directory / "copied.csv").read_text() == "1,2,3"
    assert (code.directory / "given.txt").read_text() == "given more"


@BUBBLEWRAP
def test_inputs_open_to_everyone_still_cannot_be_changed(sandbox_testbed: SandboxTestbed) -> None:
    shared = sandbox_testbed.root / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    done = sandbox_testbed.run(
        sandbox_testbed.python("import sys; open(sys.argv[1] + '/x', 'w')", str(shared), readable=[shared])
    )

    assert b"Read-only file system" in done.stderr


@BUBBLEWRAP
def test_folders_that_the_sandbox_makes_cannot_be_written(sandbox_testbed: SandboxTestbed) -> None:
    """As an ordinary user, bwrap makes them as the user whom the code is outside of its namespace."""
    hidden = sandbox_testbed.root / "visible" / "hidden"
    hidden.mkdir(parents=True)
    script = """
import os, sys
for folder in ("/", "/etc", "/home", "/dev", *sys.argv[1:]):
    try:
        open(os.path.join(folder, "falaj-was-here"), "w")
    except OSError:
        continue
    print(folder)
open("/dev/null", "w").write("x")
"""
    code = sandbox_testbed.python(
        script, str(hidden), str(hidden.parent), readable=[hidden.parent], hidden=[hidden]
    )

    done = sandbox_testbed.run(code)

    assert (done.stdout, done.returncode) == (b"", 0), done.stderr.decode()


@pytest.mark.parametrize("sandbox_testbed", LANDLOCK, indirect=True)
def test_inputs_open_to_everyone_cannot_be_changed_under_landlock(sandbox_testbed: SandboxTestbed) -> None:
    shared = sandbox_testbed.root / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    done = sandbox_testbed.run(
        sandbox_testbed.python("import sys; open(sys.argv[1] + '/x', 'w')", str(shared), readable=[shared])
    )

    assert b"Permission denied" in done.stderr


def test_scratch_and_shared_memory_work(sandbox_testbed: SandboxTestbed) -> None:
    script = """
import multiprocessing, sys, tempfile
tempfile.TemporaryFile(dir=sys.argv[1] or None).close()
multiprocessing.Semaphore()
print("ok")
"""
    folder = "" if sandbox_testbed.isolation.mechanism == "landlock" else "/tmp"

    done = sandbox_testbed.run(sandbox_testbed.python(script, folder))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_processes_pass_messages_by_unix_sockets_however_long_the_path(
    sandbox_testbed: SandboxTestbed,
) -> None:
    script = """
from multiprocessing.connection import Client, Listener
with Listener(family="AF_UNIX") as listener, Client(listener.address), listener.accept():
    print("ok")
"""
    code = sandbox_testbed.python(script, job="/".join(["deep" * 10] * 3))

    done = sandbox_testbed.run(code)

    remove_short_name(code.directory)
    assert done.stdout == b"ok\n", done.stderr.decode()


def test_own_loopback_works_without_the_network(sandbox_testbed: SandboxTestbed) -> None:
    script = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("ok")
"""

    done = sandbox_testbed.run(sandbox_testbed.python(script, loopback=True))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_libraries_find_interfaces_threads_and_programs(sandbox_testbed: SandboxTestbed) -> None:
    script = """
import concurrent.futures, ctypes, multiprocessing, os, socket, subprocess, sys
assert socket.if_nameindex()
assert socket.getaddrinfo("127.0.0.1", 80)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(abs, range(-8, 0)))
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
left, right = socket.socketpair()
os.close(ctypes.CDLL(None).memfd_create(b"x", 0))
print("ok")
"""

    done = sandbox_testbed.run(sandbox_testbed.python(script, job="libraries", loopback=True))

    assert done.stdout == b"ok\n", done.stderr.decode()


@pytest.mark.parametrize("sandbox_testbed", ["bubblewrap", "uid"], indirect=True)
def test_job_traces_its_own_processes_where_it_has_a_list_of_its_own(sandbox_testbed: SandboxTestbed) -> None:
    script = """
import ctypes, os, signal, time
child = os.fork() or signal.pause()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, child, None, None) == 0, os.strerror(ctypes.get_errno())
os.kill(child, signal.SIGKILL)
print("ok")
"""
    if kernel_limits_tracing():
        pytest.skip("a kernel that lets processes trace each other")

    done = sandbox_testbed.run(sandbox_testbed.python(script, job="tracer"))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_job_of_several_processes_reaches_no_other_listener(sandbox_testbed: SandboxTestbed) -> None:
    script = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('ok')"

    with running_platform(WORD, sandbox_testbed.root) as platform:
        port = str(json.loads(first_line(platform))["port"])
        done = sandbox_testbed.run(sandbox_testbed.python(script, port, loopback=True))

    if (sentence := sandbox_testbed.isolation.broken.get("gang-network")) is not None:
        assert done.stdout == b"ok\n"
        pytest.xfail(f"gang-network: {sentence}")
    assert done.stdout == b"", done.stderr.decode()


@pytest.mark.parametrize("sandbox_testbed", ["landlock", "landlock-shared"], indirect=True)
def test_job_of_several_processes_reaches_no_port_below_the_ephemeral_range(
    sandbox_testbed: SandboxTestbed,
) -> None:
    script = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"
    if sandbox_testbed.facts.landlock_abi < 4:
        pytest.skip("Landlock of version 4, which knows ports")
    with socket.socket() as listener:
        port = bind_low(listener)
        listener.listen()

        done = sandbox_testbed.run(sandbox_testbed.python(script, str(port), loopback=True))

    assert b"PermissionError" in done.stderr


def bind_low(listener: socket.socket) -> int:
    """Bind to a port outside the kernel's ephemeral range."""
    for port in range(20000, 30000):
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@ISOLATED
def test_no_setuid_file_is_made_as_it_is_opened(sandbox_testbed: SandboxTestbed) -> None:
    script = "import os; os.close(os.open('made', os.O_CREAT | os.O_WRONLY, 0o4755))"
    code = sandbox_testbed.python(script, job="made-setuid")

    sandbox_testbed.run(code)

    made = code.directory / "made"
    if made.exists() and made.stat().st_mode & 0o4000:
        assert made.stat().st_uid in (sandbox_testbed.facts.spare_uids or [os.getuid()])


def test_granted_network_reaches_a_listener(sandbox_testbed: SandboxTestbed) -> None:
    script = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('ok')"

    with running_platform(WORD, sandbox_testbed.root) as platform:
        port = str(json.loads(first_line(platform))["port"])
        done = sandbox_testbed.run(sandbox_testbed.python(script, port, network=True))

    assert done.stdout == b"ok\n", done.stderr.decode()


def test_killing_it_kills_its_children(sandbox_testbed: SandboxTestbed) -> None:
    script = "import os, signal; os.fork(); print('up', flush=True); signal.pause()"
    with sandbox_testbed.started(sandbox_testbed.python(script)) as process:
        assert process.stdout is not None
        first_line(process)

        kill(process)

        assert ended(process.stdout.fileno())


def test_child_that_leaves_the_session_dies_too_where_claimed(sandbox_testbed: SandboxTestbed) -> None:
    script = "import os, signal; os.fork() or os.setsid() or print(os.getpid(), flush=True); signal.pause()"
    with sandbox_testbed.started(sandbox_testbed.python(script)) as process:
        assert process.stdout is not None
        stray = int(first_line(process))

        kill(process)

        sentence = sandbox_testbed.isolation.broken.get("children")
        if sentence is None:
            assert ended(process.stdout.fileno())
            return
        process.wait(PATIENCE_S)
        os.kill(stray, signal.SIGKILL)  # it still exists to be killed
        pytest.xfail(f"children: {sentence}")


@ISOLATED
def test_job_dies_with_the_platform(sandbox_testbed: SandboxTestbed) -> None:
    code = sandbox_testbed.python("import signal; print('up', flush=True); signal.pause()")
    output, job_output = os.pipe()
    platform = os.fork()
    if platform == 0:
        try:
            sandbox_testbed.sandbox.start(code, stdout=job_output, stderr=subprocess.DEVNULL)
            select.select([output], [], [], PATIENCE_S)
        finally:
            os._exit(0)

    os.close(job_output)
    os.waitpid(platform, 0)

    assert ended(output)
    os.close(output)


def test_launcher_never_loads_what_the_user_preloads(sandbox_testbed: SandboxTestbed) -> None:
    code = sandbox_testbed.code("/usr/bin/true", environment={"LD_PRELOAD": "/nowhere/evil.so"})

    done = sandbox_testbed.run(code)

    # The loader warns once in each program that obeys the variable: the user's own, and no other.
    assert done.stderr.count(b"evil.so") == 1, done.stderr.decode()


@ISOLATED
def test_hidden_folder_inside_a_readable_one_stays_hidden(sandbox_testbed: SandboxTestbed) -> None:
    project = sandbox_testbed.root / "project"
    (project / "home").mkdir(parents=True, mode=0o700)
    (project / "home" / "root.key").write_text(KEY)
    (project / "home").chmod(0o700)
    (project / "train.py").write_text("# train")
    script = "import sys; [print(open(path).read()) for path in sys.argv[1:]]"
    paths = [str(project / "train.py"), str(project / "home" / "root.key")]

    done = sandbox_testbed.run(
        sandbox_testbed.python(script, *paths, readable=[project], hidden=[project / "home"])
    )

    assert (done.returncode, done.stdout) == (1, b"# train\n")


@BUBBLEWRAP
def test_hidden_file_inside_a_readable_folder_stays_hidden(sandbox_testbed: SandboxTestbed) -> None:
    folder = sandbox_testbed.root / "mixed"
    folder.mkdir()
    (folder / "root.key").write_text(KEY)
    alias = sandbox_testbed.root / "alias"
    alias.symlink_to(folder)
    script = "import sys; print(open(sys.argv[1]).read())"

    for name in (folder, alias):
        code = sandbox_testbed.python(
            script, str(name / "root.key"), readable=[name], hidden=[alias / "root.key"]
        )
        assert (sandbox_testbed.run(code).returncode, sandbox_testbed.run(code).stdout) == (1, b"")


@BUBBLEWRAP
def test_only_the_job_directory_is_visible_of_the_hidden_home(sandbox_testbed: SandboxTestbed) -> None:
    home = sandbox_testbed.root / "tight"
    home.mkdir(mode=0o700)
    (home / "root.key").write_text(KEY)
    (home / "job").mkdir()
    code = sandbox_testbed.python("import os; open('made', 'w'); print(os.listdir('..'))", hidden=[home])

    done = sandbox_testbed.run(replace(code, directory=home / "job"))

    assert done.stdout == b"['job']\n", done.stderr.decode()
    assert (home / "job" / "made").exists()


def test_job_moves_files_between_its_own_folders(sandbox_testbed: SandboxTestbed) -> None:
    script = "import os; os.makedirs('a/b'); open('made', 'w'); os.rename('made', 'a/b/moved'); print('ok')"

    done = sandbox_testbed.run(sandbox_testbed.python(script, job="mover"))

    if (sentence := sandbox_testbed.isolation.broken.get("renames")) is not None:
        assert b"Invalid cross-device link" in done.stderr
        pytest.xfail(f"renames: {sentence}")
    assert done.stdout == b"ok\n", done.stderr.decode()


def test_job_changes_the_mode_of_its_own_files(sandbox_testbed: SandboxTestbed) -> None:
    script = (
        "import os; open('tool', 'w'); os.chmod('tool', 0o755); print(oct(os.stat('tool').st_mode & 0o777))"
    )

    done = sandbox_testbed.run(sandbox_testbed.python(script, job="chmod"))

    if (
        sandbox_testbed.isolation.mechanism != "same-uid"
        and (sentence := sandbox_testbed.isolation.broken.get("modes")) is not None
    ):
        assert done.stdout == b"0o644\n", done.stderr.decode()
        pytest.xfail(f"modes: {sentence}")
    assert done.stdout == b"0o755\n", done.stderr.decode()


def test_job_renews_the_time_of_its_own_files_as_heartbeats_do(sandbox_testbed: SandboxTestbed) -> None:
    code = sandbox_testbed.python("import os; os.utime('beat')", job="beating")
    (code.directory / "beat").touch()
    os.utime(code.directory / "beat", (1, 1))

    sandbox_testbed.run(code)

    assert (code.directory / "beat").stat().st_mtime > 1


@ISOLATED
def test_files_left_by_a_job_are_not_roots(sandbox_testbed: SandboxTestbed) -> None:
    code = sandbox_testbed.python("import os; open('tool', 'w'); os.chmod('tool', 0o4755)", job="setuid")

    sandbox_testbed.run(code)

    left = (code.directory / "tool").stat()
    if (sentence := sandbox_testbed.isolation.broken.get("identity")) is not None:
        assert not left.st_mode & 0o6000
        pytest.xfail(f"identity: {sentence}")
    assert left.st_uid in (sandbox_testbed.facts.spare_uids or [os.getuid()])


@ISOLATED
def test_stored_file_linked_into_a_job_keeps_its_owner(sandbox_testbed: SandboxTestbed) -> None:
    stored = sandbox_testbed.root / "blob"
    stored.write_text("stored")
    code = sandbox_testbed.python("pass", job="linked")
    os.link(stored, code.directory / "linked")

    sandbox_testbed.run(code)

    assert stored.stat().st_uid == os.getuid()


def test_bubblewrap_without_tmpfs_size_limits_is_used_without_them(tmp_path: Path) -> None:
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
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, b"")
