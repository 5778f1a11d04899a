"""The seccomp filter, executed call by call in a small interpreter of classic BPF."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence

import pytest

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.seccomp import (
    ARCHITECTURES,
    SYSCALLS,
    Instruction,
    SyscallRule,
    assemble,
    encode,
    landlock_rules,
    lone_process_rules,
)

ALLOWED, KILLED = "allowed", "killed"
I386 = 0x4000_0003
READ = {"x86_64": 0, "aarch64": 63}
LAST = 2**64 - 1


def run(
    program: Iterable[Instruction], *, number: int, architecture: int, arguments: tuple[int, ...]
) -> str | int:
    """Return the result of the filter: allowed, killed, or the error."""
    padded = [each & LAST for each in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *padded)
    steps, at, accumulator = list(program), 0, 0
    for _ in range(len(steps)):  # no backward jumps
        step = steps[at]
        at += 1
        if step.code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, step.value)
        elif step.code == seccomp.AND:
            accumulator &= step.value
        elif step.code == seccomp.JUMP_EQUAL:
            at += step.jump_true if accumulator == step.value else step.jump_false
        elif step.code == seccomp.JUMP_SET:
            at += step.jump_true if accumulator & step.value else step.jump_false
        elif step.code == seccomp.RETURN:
            return verdict(step.value)
        else:
            raise AssertionError(f"unknown instruction {step}")
    raise AssertionError("the program has no end")


def verdict(value: int) -> str | int:
    if value == seccomp.ALLOW:
        return ALLOWED
    if value == seccomp.KILL:
        return KILLED
    assert value & 0xFFFF_0000 == seccomp.ERROR
    return value & 0xFFFF


def exists(name: str, machine: str) -> bool:
    """Whether a machine has a system call."""
    return SYSCALLS[name][list(ARCHITECTURES).index(machine)] is not None


class Filter:
    """A filter for one machine, called with the names of system calls."""

    def __init__(
        self,
        machine: str,
        rules: Sequence[SyscallRule] = (),
        *,
        abi: int = 7,
        shares_uid: bool = True,
        network: bool = False,
        loopback: bool = False,
    ):
        """By default under Landlock."""
        self.machine = machine
        found = rules or landlock_rules(abi=abi, shares_uid=shares_uid, network=network, loopback=loopback)
        self.program = assemble(found, machine=machine)

    def __call__(self, name: str, *arguments: int) -> str | int:
        number = SYSCALLS[name][list(ARCHITECTURES).index(self.machine)]
        assert number is not None
        return self.by_number(number, *arguments)

    def by_number(self, number: int, *arguments: int, architecture: int | None = None) -> str | int:
        found = ARCHITECTURES[self.machine] if architecture is None else architecture
        return run(self.program, number=number, architecture=found, arguments=arguments)


MACHINES = pytest.mark.parametrize("machine", list(ARCHITECTURES))


@MACHINES
def test_ordinary_calls_are_allowed(machine: str) -> None:
    assert Filter(machine).by_number(READ[machine], 0, 1, 2) == ALLOWED


@MACHINES
def test_other_architectures_are_killed(machine: str) -> None:
    assert Filter(machine).by_number(READ[machine], architecture=I386) == KILLED


def test_x32_calls_do_not_exist() -> None:
    syscall = Filter("x86_64")

    assert syscall.by_number(seccomp.X32 | 0) == errno.ENOSYS
    assert syscall.by_number(seccomp.X32 | 101) == errno.ENOSYS


@MACHINES
@pytest.mark.parametrize("name", seccomp.KERNEL + seccomp.SHARED)
def test_refused_calls_fail_whatever_their_arguments(machine: str, name: str) -> None:
    if not exists(name, machine):
        return

    syscall = Filter(machine)

    assert (syscall(name), syscall(name, LAST, LAST, LAST, LAST, LAST, LAST)) == (errno.EPERM, errno.EPERM)


@MACHINES
@pytest.mark.parametrize(
    "flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_no_namespace_can_be_made(machine: str, flag: int) -> None:
    syscall = Filter(machine)

    assert syscall("unshare", flag) == errno.EPERM
    assert syscall("clone", flag | 17) == errno.EPERM
    assert syscall("unshare", 0x80) == errno.EPERM
    assert syscall("clone3") == errno.ENOSYS


@MACHINES
def test_threads_and_forks_are_allowed(machine: str) -> None:
    syscall = Filter(machine)

    assert syscall("clone", 0x3D0F00) == ALLOWED  # as pthread_create
    assert syscall("clone", 0x1200011) == ALLOWED  # as fork
    assert syscall("unshare", 0x400) == ALLOWED  # CLONE_FILES


@MACHINES
def test_a_lone_process_has_threads_only(machine: str) -> None:
    syscall = Filter(
        machine,
        [*lone_process_rules(), *landlock_rules(abi=7, shares_uid=True, network=False, loopback=False)],
    )

    assert syscall("clone", 0x3D0F00) == ALLOWED  # as pthread_create
    assert syscall("clone", 0x1200011) == errno.EPERM  # as fork
    assert syscall("clone", 0x3D0F00 | 0x10000000) == errno.EPERM  # a thread in a new user namespace
    assert syscall("clone3") == errno.ENOSYS
    for name in ("fork", "vfork"):
        if exists(name, machine):
            assert syscall(name) == errno.EPERM


SOCKETS = [
    # family, type, protocol: without a network; with a loopback; with the network
    ((1, 1, 0), ALLOWED, ALLOWED, ALLOWED),
    ((1, 2 | 0o2000000, 0), ALLOWED, ALLOWED, ALLOWED),
    ((2, 1, 0), errno.EACCES, ALLOWED, ALLOWED),
    ((2, 1 | 0o2004000, 6), errno.EACCES, ALLOWED, ALLOWED),
    ((10, 1, 0), errno.EACCES, ALLOWED, ALLOWED),
    ((2, 1, 262), errno.EACCES, errno.EACCES, ALLOWED),  # MPTCP
    ((2, 1, 132), errno.EACCES, errno.EACCES, ALLOWED),  # SCTP
    ((2, 2, 0), errno.EACCES, errno.EACCES, ALLOWED),
    ((10, 2, 17), errno.EACCES, errno.EACCES, ALLOWED),
    ((2, 3, 1), errno.EACCES, errno.EACCES, errno.EACCES),  # raw
    ((16, 3, 0), errno.EAFNOSUPPORT, ALLOWED, ALLOWED),  # NETLINK_ROUTE
    ((16, 3, 16), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),
    ((17, 3, 0), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),  # packets
    ((38, 5, 0), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),  # AF_ALG
    ((40, 1, 0), errno.EAFNOSUPPORT, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT),  # AF_VSOCK
]


@MACHINES
@pytest.mark.parametrize(("arguments", "alone", "loopback", "network"), SOCKETS)
def test_socket_families_are_restricted(
    machine: str, arguments: tuple[int, ...], alone: object, loopback: object, network: object
) -> None:
    assert Filter(machine)("socket", *arguments) == alone
    assert Filter(machine, loopback=True)("socket", *arguments) == loopback
    assert Filter(machine, network=True)("socket", *arguments) == network


@MACHINES
def test_socket_pairs_must_be_unix_sockets(machine: str) -> None:
    assert Filter(machine)("socketpair", 1, 1, 0) == ALLOWED
    assert Filter(machine)("socketpair", 2, 1, 0) == errno.EAFNOSUPPORT


@MACHINES
@pytest.mark.parametrize(("name", "at"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
def test_sending_does_not_connect(machine: str, name: str, at: int) -> None:
    quiet, fast = [*[0] * at, 0x4000], [*[0] * at, 0x2000_4000]

    assert Filter(machine, loopback=True)(name, *quiet) == ALLOWED
    assert Filter(machine, loopback=True)(name, *fast) == errno.EPERM
    assert Filter(machine, network=True)(name, *fast) == ALLOWED


@MACHINES
def test_other_processes_keep_their_limits_and_priorities(machine: str) -> None:
    syscall = Filter(machine)

    assert (syscall("prlimit64", 0, 7), syscall("prlimit64", 1234, 7)) == (ALLOWED, errno.EPERM)
    assert (syscall("sched_setscheduler", 0), syscall("sched_setscheduler", 9)) == (ALLOWED, errno.EPERM)
    assert (syscall("setpriority", 0, 0, 5), syscall("setpriority", 0, 77, 5)) == (ALLOWED, errno.EPERM)
    assert syscall("setpriority", 2, 0, 5) == errno.EPERM
    assert (syscall("ioprio_set", 1, 0), syscall("ioprio_set", 1, 8), syscall("ioprio_set", 3, 0)) == (
        ALLOWED,
        errno.EPERM,
        errno.EPERM,
    )
    assert (syscall("kill", 1234, 9), syscall("kill", -1, 9)) == (ALLOWED, errno.EPERM)


@MACHINES
def test_a_job_cannot_inject_terminal_input(machine: str) -> None:
    syscall = Filter(machine)

    assert (syscall("ioctl", 0, 0x5412), syscall("ioctl", 0, 0x541C)) == (errno.EPERM, errno.EPERM)
    assert syscall("ioctl", 0, 0x1_0000_5412) == errno.EPERM  # the kernel reads the lower half only
    assert syscall("ioctl", 0, 0x5401) == ALLOWED


@MACHINES
def test_modes_change_only_for_a_uid_of_its_own(machine: str) -> None:
    shared, own = Filter(machine), Filter(machine, shares_uid=False)

    assert (shared("fchmodat", 0, 0, 0o755), own("fchmodat", 0, 0, 0o755)) == (0, ALLOWED)
    assert (shared("fchownat"), own("fchownat")) == (0, ALLOWED)
    assert (shared("sched_setaffinity", 0), shared("sched_setaffinity", 77)) == (ALLOWED, 0)
    assert (shared("setxattr"), own("setxattr")) == (errno.EOPNOTSUPP, ALLOWED)
    assert (shared("openat2"), own("openat2")) == (errno.ENOSYS, ALLOWED)


@MACHINES
def test_file_times_can_only_be_set_to_now(machine: str) -> None:
    shared = Filter(machine)

    assert shared("utimensat", 3, 0x7F00, 0) == ALLOWED
    assert shared("utimensat", 3, 0x7F00, 0x7F80_0000_0000) == 0
    assert shared("utimensat", 3, 0x7F00, 0x1234) == 0
    assert Filter(machine, shares_uid=False)("utimensat", 3, 0x7F00, 0x1234) == ALLOWED


@MACHINES
def test_no_setuid_file_is_made_under_the_platforms_uid(machine: str) -> None:
    shared = Filter(machine)
    create, temporary = os.O_CREAT | os.O_WRONLY, os.O_TMPFILE | os.O_RDWR

    assert shared("openat", 0, 0, create, 0o755) == ALLOWED
    assert shared("openat", 0, 0, create, 0o4755) == errno.EPERM
    assert shared("openat", 0, 0, temporary, 0o2755) == errno.EPERM
    assert shared("openat", 0, 0, os.O_RDONLY, 0o4755) == ALLOWED  # then the mode is ignored
    assert (shared("mkdirat", 0, 0, 0o755), shared("mkdirat", 0, 0, 0o2755)) == (ALLOWED, errno.EPERM)
    assert (shared("mknodat", 0, 0, 0o100644), shared("mknodat", 0, 0, 0o104755)) == (ALLOWED, errno.EPERM)


@MACHINES
@pytest.mark.parametrize("shares_uid", [True, False])
def test_truncate_is_refused_on_kernels_where_landlock_does_not_govern_it(
    machine: str, shares_uid: bool
) -> None:
    old, new = Filter(machine, abi=2, shares_uid=shares_uid), Filter(machine, abi=3, shares_uid=shares_uid)

    assert (old("truncate"), new("truncate")) == (errno.EPERM, ALLOWED)
    assert old("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == errno.EPERM
    assert new("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == ALLOWED
    assert old("openat", 0, 0, os.O_WRONLY | os.O_TRUNC) == ALLOWED  # Landlock sees the write access
    assert old("openat2") == errno.ENOSYS


@MACHINES
@pytest.mark.parametrize("abi", [1, 7])
def test_every_instruction_jumps_forward_within_the_program(machine: str, abi: int) -> None:
    program = Filter(machine, abi=abi).program

    for at, step in enumerate(program):
        if step.code in (seccomp.JUMP_EQUAL, seccomp.JUMP_SET):
            assert at + 1 + max(step.jump_true, step.jump_false) < len(program)
    assert program[-1] == Instruction(seccomp.RETURN, 0, 0, seccomp.ALLOW)
    assert len(program) < 4096
    assert len(encode(program)) == 8 * len(program)


def test_syscall_numbers_equal_those_of_this_machines_headers() -> None:
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.exists(header):
        return  # nothing to compare with
    with open(header, encoding="ascii") as file:
        numbers = {words[1]: int(words[2]) for line in file if len(words := line.split()) == 3}

    wrong = {
        name: both[0] for name, both in SYSCALLS.items() if numbers.get(f"__NR_{name}", both[0]) != both[0]
    }

    assert wrong == {}


NAMESPACED = seccomp.kernel_rules(network=True, loopback=True)


@MACHINES
def test_with_namespaces_a_job_may_trace_and_share_memory_among_its_own(machine: str) -> None:
    asked = Filter(machine, NAMESPACED)

    assert {asked(name) for name in seccomp.SHARED} == {ALLOWED}
    assert {asked(name) for name in seccomp.KERNEL if exists(name, machine)} == {errno.EPERM}
    assert asked("kill", LAST, 9) == ALLOWED
    assert asked("clone3") == errno.ENOSYS


@MACHINES
@pytest.mark.parametrize(
    ("asked_for", "answer"),
    [(0, ALLOWED), (0xFFFF_FFFF, ALLOWED), (0x4_0000, ALLOWED), (0x40_0000, errno.EPERM)],
)
def test_personalities_that_weaken_a_process_are_refused(
    machine: str, asked_for: int, answer: str | int
) -> None:
    assert Filter(machine, NAMESPACED)("personality", asked_for) == answer


@MACHINES
@pytest.mark.parametrize("request_number", [0xC020462A, 0xC00846D6, 0x30000001, 27, 33])
def test_ioctls_of_gpus_are_allowed(machine: str, request_number: int) -> None:
    assert Filter(machine, NAMESPACED)("ioctl", 3, request_number) == ALLOWED
