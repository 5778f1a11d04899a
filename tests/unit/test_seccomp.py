"""The seccomp filter, run by a small interpreter of classic BPF, call by call."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

import pytest

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.seccomp import ARCHITECTURES, SYSCALLS, Instruction, assemble, encode, rules

ALLOWED, KILLED = "allowed", "killed"
I386 = 0x4000_0003
READ = {"x86_64": 0, "aarch64": 63}
LAST = 2**64 - 1


def run(
    program: Iterable[Instruction], *, number: int, architecture: int, arguments: tuple[int, ...]
) -> str | int:
    """What the filter says: allowed, killed, or the error."""
    padded = [each & LAST for each in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *padded)
    steps, at, accumulator = list(program), 0, 0
    for _ in range(len(steps)):  # no jump leads back
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


class Filter:
    """A filter for one machine, asked by the names of calls."""

    def __init__(
        self,
        machine: str,
        *,
        abi: int = 7,
        shares_uid: bool = True,
        network: bool = False,
        loopback: bool = False,
    ):
        self.machine = machine
        self.program = assemble(
            rules(abi=abi, shares_uid=shares_uid, network=network, loopback=loopback), machine=machine
        )

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
    asked = Filter("x86_64")

    assert asked.by_number(seccomp.X32 | 0) == errno.ENOSYS
    assert asked.by_number(seccomp.X32 | 101) == errno.ENOSYS


@MACHINES
@pytest.mark.parametrize("name", seccomp.REFUSED)
def test_refused_calls_fail_whatever_their_arguments(machine: str, name: str) -> None:
    if SYSCALLS[name][list(ARCHITECTURES).index(machine)] is None:
        return  # the machine has no such call

    asked = Filter(machine)

    assert (asked(name), asked(name, LAST, LAST, LAST, LAST, LAST, LAST)) == (errno.EPERM, errno.EPERM)


@MACHINES
@pytest.mark.parametrize(
    "flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_no_namespace_can_be_made(machine: str, flag: int) -> None:
    asked = Filter(machine)

    assert asked("unshare", flag) == errno.EPERM
    assert asked("clone", flag | 17) == errno.EPERM
    assert asked("unshare", 0x80) == errno.EPERM
    assert asked("clone3") == errno.ENOSYS


@MACHINES
def test_threads_and_forks_are_allowed(machine: str) -> None:
    asked = Filter(machine)

    assert asked("clone", 0x3D0F00) == ALLOWED  # as pthread_create
    assert asked("clone", 0x1200011) == ALLOWED  # as fork
    assert asked("unshare", 0x400) == ALLOWED  # CLONE_FILES


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
    ((16, 3, 0), errno.EACCES, ALLOWED, ALLOWED),  # NETLINK_ROUTE
    ((16, 3, 16), errno.EACCES, errno.EACCES, errno.EACCES),
    ((17, 3, 0), errno.EACCES, errno.EACCES, errno.EACCES),  # packets
    ((38, 5, 0), errno.EACCES, errno.EACCES, errno.EACCES),  # AF_ALG
    ((40, 1, 0), errno.EACCES, errno.EACCES, errno.EACCES),  # AF_VSOCK
]


@MACHINES
@pytest.mark.parametrize(("arguments", "alone", "loopback", "network"), SOCKETS)
def test_sockets(
    machine: str, arguments: tuple[int, ...], alone: object, loopback: object, network: object
) -> None:
    assert Filter(machine)("socket", *arguments) == alone
    assert Filter(machine, loopback=True)("socket", *arguments) == loopback
    assert Filter(machine, network=True)("socket", *arguments) == network


@MACHINES
def test_pairs_of_sockets_are_unix_ones(machine: str) -> None:
    assert Filter(machine)("socketpair", 1, 1, 0) == ALLOWED
    assert Filter(machine)("socketpair", 2, 1, 0) == errno.EACCES


@MACHINES
@pytest.mark.parametrize(("name", "at"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
def test_sending_does_not_connect(machine: str, name: str, at: int) -> None:
    quiet, fast = [*[0] * at, 0x4000], [*[0] * at, 0x2000_4000]

    assert Filter(machine, loopback=True)(name, *quiet) == ALLOWED
    assert Filter(machine, loopback=True)(name, *fast) == errno.EPERM
    assert Filter(machine, network=True)(name, *fast) == ALLOWED


@MACHINES
def test_other_processes_keep_their_limits_and_priorities(machine: str) -> None:
    asked = Filter(machine)

    assert (asked("prlimit64", 0, 7), asked("prlimit64", 1234, 7)) == (ALLOWED, errno.EPERM)
    assert (asked("sched_setscheduler", 0), asked("sched_setscheduler", 9)) == (ALLOWED, errno.EPERM)
    assert (asked("setpriority", 0, 0, 5), asked("setpriority", 0, 77, 5)) == (ALLOWED, errno.EPERM)
    assert asked("setpriority", 2, 0, 5) == errno.EPERM
    assert (asked("ioprio_set", 1, 0), asked("ioprio_set", 1, 8), asked("ioprio_set", 3, 0)) == (
        ALLOWED,
        errno.EPERM,
        errno.EPERM,
    )
    assert (asked("kill", 1234, 9), asked("kill", -1, 9)) == (ALLOWED, errno.EPERM)


@MACHINES
def test_terminals_take_no_input_from_a_job(machine: str) -> None:
    asked = Filter(machine)

    assert (asked("ioctl", 0, 0x5412), asked("ioctl", 0, 0x541C)) == (errno.EPERM, errno.EPERM)
    assert asked("ioctl", 0, 0x1_0000_5412) == errno.EPERM  # the kernel reads the lower half only
    assert asked("ioctl", 0, 0x5401) == ALLOWED


@MACHINES
def test_modes_change_only_for_a_uid_of_its_own(machine: str) -> None:
    shared, own = Filter(machine), Filter(machine, shares_uid=False)

    assert (shared("fchmodat", 0, 0, 0o755), own("fchmodat", 0, 0, 0o755)) == (0, ALLOWED)
    assert (shared("fchownat"), own("fchownat")) == (0, ALLOWED)
    assert (shared("sched_setaffinity", 0), shared("sched_setaffinity", 77)) == (ALLOWED, 0)
    assert (shared("setxattr"), own("setxattr")) == (errno.EOPNOTSUPP, ALLOWED)
    assert (shared("openat2"), own("openat2")) == (errno.ENOSYS, ALLOWED)


@MACHINES
def test_the_time_of_a_file_becomes_now_and_nothing_else(machine: str) -> None:
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
    assert shared("openat", 0, 0, os.O_RDONLY, 0o4755) == ALLOWED  # then the mode means nothing
    assert (shared("mkdirat", 0, 0, 0o755), shared("mkdirat", 0, 0, 0o2755)) == (ALLOWED, errno.EPERM)
    assert (shared("mknodat", 0, 0, 0o100644), shared("mknodat", 0, 0, 0o104755)) == (ALLOWED, errno.EPERM)


@MACHINES
@pytest.mark.parametrize("shares_uid", [True, False])
def test_old_kernels_truncate_nothing_past_landlock(machine: str, shares_uid: bool) -> None:
    old, new = Filter(machine, abi=2, shares_uid=shares_uid), Filter(machine, abi=3, shares_uid=shares_uid)

    assert (old("truncate"), new("truncate")) == (errno.EPERM, ALLOWED)
    assert old("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == errno.EPERM
    assert new("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == ALLOWED
    assert old("openat", 0, 0, os.O_WRONLY | os.O_TRUNC) == ALLOWED  # Landlock sees that it writes
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


def test_numbers_of_calls_are_those_of_this_machines_headers() -> None:
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.exists(header):
        return  # nothing to compare with
    with open(header, encoding="ascii") as file:
        told = {words[1]: int(words[2]) for line in file if len(words := line.split()) == 3}

    wrong = {name: both[0] for name, both in SYSCALLS.items() if told.get(f"__NR_{name}", both[0]) != both[0]}

    assert wrong == {}
