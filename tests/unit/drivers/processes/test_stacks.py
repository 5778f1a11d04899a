"""Locating hung and crashed ranks, and the failed rank of torchrun, from the log alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.processes.diagnosis.log_errors import RankExit, failed_rank_of_torchrun
from falaj.drivers.processes.diagnosis.reasons import AttemptOutcome, explain_failure
from falaj.drivers.processes.diagnosis.stacks import explain_hang, locate_crash, parse_stacks
from falaj.ports.launcher import Launch

PAIR = Launch("job_1/1", Path("/jobs/1"), ["python", "train.py"], processes=2, hang_s=120)

WAITING = """
[falaj: rank 0, process 6: python train.py]
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2773 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/jobs/1/code/train.py", line 14 in main
"""
STUCK = """
[falaj: rank 1, process 7: python train.py]
Current thread 0x00007f03 (most recent call first):
  File "/jobs/1/code/reader.py", line 3 in next_batch
  File "/jobs/1/code/train.py", line 12 in main

[falaj: rank 1, process 9: python -c worker]
Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
"""
AGENT = """[falaj: a process, process 3: python -m torch.distributed.run]
Current thread 0x01 (most recent call first):
"""


def why(silent_ranks: list[int], text: str, processes: int = 2) -> str:
    return explain_hang(silent_ranks, hang_s=120, text=text, processes=processes)


@pytest.mark.parametrize("silent_ranks", [[], [0, 1], [1], [1, 0]])
def test_rank_that_others_wait_for_is_named_as_the_cause(silent_ranks: list[int]) -> None:
    assert why(silent_ranks, AGENT + WAITING + STUCK) == (
        "rank 1 hung: no sign of life for 120 s; it stood in next_batch (reader.py:3)"
    )


def test_ranks_that_all_wait_hung_together() -> None:
    text = WAITING + WAITING.replace("rank 0", "rank 1")

    assert why([1, 0], text) == (
        "ranks 0, 1 hung: no sign of life for 120 s; rank 1 stood in all_reduce (train.py:14)"
    )
    assert why([1], text) == "rank 1 hung: no sign of life for 120 s; it stood in all_reduce (train.py:14)"


def test_without_stacks_the_reason_names_only_the_silence() -> None:
    assert why([], "") == "it hung: no sign of life for 120 s from any rank"
    assert why([1], "") == "rank 1 hung: no sign of life for 120 s"
    assert why([], "", processes=1) == "it hung: no sign of life for 120 s"


def test_stack_is_of_the_main_thread_of_the_rank_itself() -> None:
    found = parse_stacks(WAITING + STUCK)

    assert [frame.function for frame in found[0]] == ["all_reduce", "wrapper", "main"]
    assert [frame.function for frame in found[1]] == ["next_batch", "main"]


def test_hang_is_explained_in_the_reason() -> None:
    ended = AttemptOutcome(
        signal=15, cause="hung", silent_ranks=[0, 1], hang_output=(WAITING + STUCK).encode()
    )

    assert explain_failure(ended, PAIR, b"") == (
        "Rank 1 hung: no sign of life for 120 s; it stood in next_batch (reader.py:3)"
    )


CRASH = """epoch 3
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007fd4 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/jobs/1/code/train.py", line 3 in load

Extension modules: numpy (total: 1)
"""


def test_crash_location_is_in_the_reason() -> None:
    assert locate_crash(CRASH) == "in string_at (train.py:3)"
    assert locate_crash("nothing of the kind") == ""
    plain = replace(PAIR, processes=1)
    assert (
        explain_failure(AttemptOutcome(signal=11), plain, CRASH.encode())
        == "Killed by SIGSEGV in string_at (train.py:3)"
    )


REPORT = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {one} (pid: 7)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {zero} (pid: 6)
"""
VICTIM = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 4, in <module>
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:62635
"""
CULPRIT = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: KeyError: 'carrier'
"""


@pytest.mark.parametrize(
    ("output", "zero", "one", "death"),
    [
        (VICTIM, 1, -9, RankExit(1, None, 9)),
        (CULPRIT + VICTIM, 1, 1, RankExit(1, 1, None)),
        (VICTIM, 1, -15, RankExit(0, 1, None)),
        ("", -15, 1, RankExit(1, 1, None)),
        ("", 3, 3, RankExit(0, 3, None)),
    ],
)
def test_first_failure_that_torchrun_reports_need_not_be_the_cause(
    output: str, zero: int, one: int, death: RankExit
) -> None:
    assert failed_rank_of_torchrun(output + REPORT.format(zero=zero, one=one)) == death


def test_cgroup_out_of_memory_is_reported_by_rank() -> None:
    launch = replace(PAIR, memory_bytes=1 << 30)

    own = explain_failure(AttemptOutcome(rank=1, signal=9, killed_for_memory=[1]), launch, b"")
    others = explain_failure(AttemptOutcome(rank=0, exit_code=1, killed_for_memory=[1]), launch, b"")

    assert own == "Rank 1: killed by SIGKILL; it ran out of memory: all processes together may have 1 GiB"
    assert others == "Rank 0: exit code 1; rank 1 ran out of memory: all processes together may have 1 GiB"


def test_refused_allocation_names_the_memory_share_of_the_process() -> None:
    launch, output = replace(PAIR, memory_bytes=1 << 30), b"Traceback (most recent call last):\nMemoryError\n"

    limited = explain_failure(
        AttemptOutcome(rank=1, exit_code=1, process_memory_bytes=1 << 29), launch, output
    )
    by_the_machine = explain_failure(AttemptOutcome(rank=1, exit_code=1), launch, output)

    assert limited == "Rank 1: exit code 1 (out of memory: each process may have 512 MiB): MemoryError"
    assert by_the_machine == "Rank 1: exit code 1: MemoryError"


def test_forged_torchrun_report_does_no_harm() -> None:
    forged = "Root Cause (first observed failure):\n" * 3000 + "  rank      : 9\n  exitcode  : oops\n"

    assert failed_rank_of_torchrun(forged) is None
