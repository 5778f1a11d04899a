"""Explanations of failed attempts, from the exit status and the end of the log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.processes.diagnosis.reasons import AttemptOutcome, explain_failure
from falaj.ports.launcher import Launch

PLAIN = Launch("job_1/1", Path("/jobs/1"), ["python", "script.py"], timeout_s=90)
PAIR = replace(PLAIN, framework="torch", processes=2)

TRACEBACK = b"""epoch 1
Traceback (most recent call last):
  File "script.py", line 3, in <module>
    frame["carrier"]
    ~~~~~^^^^^^^^^^^
KeyError: 'carrier'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "script.py", line 5, in <module>
    raise flights.BadColumn("carrier")
flights.BadColumn: carrier
"""

TORCHRUN = b"""[rank1]: Traceback (most recent call last):
[rank1]:   File "script.py", line 3, in <module>
[rank1]: ValueError: bad column
[rank0]: Traceback (most recent call last):
[rank0]:   File "script.py", line 4, in <module>
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:62635
W1115 06:33:50.8 18709 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 18738 SIGTERM
E1115 06:33:50.8 18709 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 18738)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_06:33:50
  rank      : 1 (local_rank: 1)
  exitcode  : %s (pid: 18739)
============================================================
"""


def test_success_needs_no_reason() -> None:
    assert explain_failure(AttemptOutcome(exit_code=0), PLAIN, TRACEBACK) is None


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (TRACEBACK, ": flights.BadColumn: carrier"),
        (
            b'  File "script.py", line 1\n    x =\nSyntaxError: invalid syntax\n',
            ": SyntaxError: invalid syntax",
        ),
        (b"usage: x\nscript.py: error: no --rows\n\n", ": script.py: error: no --rows"),
        (b"\xff\xfe\x1b[31mred\x1b[0m\x00\n", ": \ufffd\ufffdred"),
        (b"", ""),
    ],
)
def test_reason_has_the_exit_code_and_the_last_line_printed(log: bytes, why: str) -> None:
    assert explain_failure(AttemptOutcome(rank=0, exit_code=1), PLAIN, log) == "Exit code 1" + why


def test_text_after_the_traceback_does_not_hide_it() -> None:
    assert (
        explain_failure(AttemptOutcome(exit_code=1), PLAIN, TRACEBACK + b"bye\n")
        == "Exit code 1: flights.BadColumn: carrier"
    )


def test_reason_names_the_signal_and_not_unrelated_output() -> None:
    assert explain_failure(AttemptOutcome(signal=11), PLAIN, b"epoch 1\n") == "Killed by SIGSEGV"


def test_out_of_memory_kill_is_named() -> None:
    ended = AttemptOutcome(signal=9, out_of_memory=True)

    assert explain_failure(ended, PLAIN, b"") == "Killed by SIGKILL; the machine ran out of memory"


def test_time_limit_and_stop_request_take_precedence_over_their_effects() -> None:
    assert explain_failure(AttemptOutcome(signal=9, cause="timeout"), PLAIN, TRACEBACK) == (
        "It was stopped after 90 s, its time limit"
    )
    assert (
        explain_failure(AttemptOutcome(exit_code=3, cause="stopped"), PLAIN, b"")
        == "It was stopped on request: exit code 3"
    )


@pytest.mark.parametrize(("status", "how"), [(b"1", "exit code 1"), (b"-9", "killed by SIGKILL")])
def test_torchrun_failure_names_the_rank_and_not_torchruns_own_traceback(status: bytes, how: str) -> None:
    reason = explain_failure(AttemptOutcome(rank=0, exit_code=1), PAIR, TORCHRUN % status)

    assert reason == f"Rank 1: {how}: ValueError: bad column"


def test_reason_is_one_line_of_bounded_length() -> None:
    reason = explain_failure(AttemptOutcome(refused="no\nspare\nuid " + "x" * 1000), PLAIN, b"")

    assert reason is not None
    assert reason.startswith("It could not be started: no spare uid xxx")
    assert len(reason) == 300


def test_sandbox_failure_is_not_blamed_on_the_script() -> None:
    reason = explain_failure(AttemptOutcome(exit_code=1, began=False), PLAIN, b"bwrap: no such file\n")

    assert reason == "Its sandbox did not start: bwrap: no such file"
