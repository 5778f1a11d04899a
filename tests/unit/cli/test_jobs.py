"""`falaj train` with its options and files, `falaj jobs`, and `falaj secrets`: success, and bad input."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import falaj as fj
from command_line import CommandLine, command_line, environment, make_template
from falaj.apps.cli.commands import jobs_top
from falaj.apps.cli.commands.train import OPTIONS, warn_about_secrets
from falaj.apps.cli.output import job_progress, live_table
from falaj.apps.cli.output.job_summary import (
    describe_affinity,
    describe_command,
    describe_gpus,
    describe_request,
    describe_state,
    format_rate,
    format_rough_duration,
    progress_line,
)
from falaj.errors import Denied, Unavailable
from falaj.governance.encryption.values import SealedValues
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import QueueState
from falaj.records.scheduling.hardware import Machine
from falaj.records.training.jobs import Job, JobProgress, JobSpec, JobState
from falaj.sdk.job_fields import ALIASES, FIELDS, SYNONYMS
from polling import PATIENCE_S, eventually

SAYS = """
import os, time
import falaj as fj
print("the password is", os.environ.get("DB_PASSWORD"), "of", len(os.environ.get("DB_PASSWORD", "")))
for step in range(1, 4):
    fj.job.log(step=step, loss=1 / step)
    fj.job.progress(step, 3)
"""
WAITS = """
import pathlib, time
import falaj as fj
for step in range(1, 1200):
    fj.job.log(step=step, loss=1 / step)
    fj.job.progress(step, 1200)
    time.sleep(0.05)
    if step > 5 and (pathlib.Path(fj.job.inputs["stop"]).read_text() == "stop"):
        break
"""
FILE = """
script: says.py
name: from-file
cpus: 1
memory: 64MiB
env: {VERSION: 1.10, COLOR: red}
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    for name, text in {"says.py": SAYS, "job.yaml": FILE, "waits.py": WAITS}.items():
        (tmp_path / name).write_text(text)
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


class Pipe(io.TextIOWrapper):
    """Standard input that is not a terminal, with bytes beneath it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


def set_secret(falaj: CommandLine, value: bytes, patch: pytest.MonkeyPatch, *words: str) -> Any:
    patch.setattr(sys, "stdin", Pipe(value))
    return falaj("secrets", "set", *words)


# -------------------------------------------------------------------------------------------------- secrets


@pytest.mark.slow
def test_a_secret_goes_from_standard_input_into_a_job_and_into_no_log(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = set_secret(falaj, b"hunter2-and-more\n", monkeypatch, "db")
    assert made.status == 0, made.err

    ran = falaj.done("train", "says.py", "--secret", "DB_PASSWORD=db")

    assert "the password is *** of 16" in ran.out
    assert "next   falaj train SCRIPT --secret DB=db" in made.out
    shown = falaj.done("jobs", "show", falaj.json("jobs", "list")["items"][0]["id"])
    assert "DB_PASSWORD=db" in shown.out
    assert re.search(r"\nlimits\n  .*memory: .*; the default\n", shown.out, re.DOTALL), shown.out
    everything = [made, ran, shown, falaj("secrets", "list"), falaj("secrets", "list", "--json")]
    assert not [each for each in everything if "hunter2" in each.out + each.err]
    found = [path for path in falaj.home.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert found == []


@pytest.mark.parametrize(
    ("value", "kept"),
    [(b"a\n", 1), (b"a\r\n", 1), (b"a", 1), (b"line\nline\n", 10), (b" a \n", 3), ("é\n".encode(), 1)],
)
def test_a_trailing_newline_is_stripped_from_a_one_line_value(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch, value: bytes, kept: int
) -> None:
    (falaj.folder / "value").write_bytes(value)
    seen: list[str] = []
    monkeypatch.setattr("falaj.governance.secrets.service.SealedValues.seal", _noting(seen))

    assert falaj("secrets", "set", "x", "--from-file", "value").status == 0
    assert set_secret(falaj, value, monkeypatch, "x").status == 0

    assert [len(each) for each in seen] == [kept, kept]


def _noting(seen: list[str]) -> Any:
    real = SealedValues.seal

    def seal(self: Any, workspace: str, value: bytes, *, context: bytes) -> bytes:
        seen.append(value.decode())
        return real(self, workspace, value, context=context)

    return seal


@pytest.mark.parametrize(
    ("value", "words", "message"),
    [
        (b"", ("x",), "standard input is not valid"),
        (b"\n", ("x",), "1 to 65,536 bytes"),
        (b"\xff\xfe", ("x",), "bytes that are not text"),
        (b"x" * 70_000, ("x",), "more than 65,536 bytes"),
        (b"a\0b", ("x",), "without the character NUL"),
        (b"hunter2", ("Bad Name",), "NAME is not valid"),
        (b"hunter2", ("x", "--from-file", "gone"), "a readable file"),
        (b"hunter2", ("x", "hunter2"), "unexpected extra argument"),
        (b"hunter2", ("x", "--workspace", "nowhere"), "there is no workspace 'nowhere'"),
    ],
)
def test_a_secret_that_cannot_be_set_is_refused_with_a_message(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch, value: bytes, words: tuple[str, ...], message: str
) -> None:
    ran = set_secret(falaj, value, monkeypatch, *words)

    assert ran.status in (1, 2)
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert falaj.json("secrets", "list")["items"] == []


def test_a_secret_is_prompted_for_twice_on_a_terminal(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers = iter(["one", "two", "same", "same"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda *_, **__: next(answers))

    assert "the two values differ" in falaj("secrets", "set", "x").err
    assert "secret x is set" in falaj.done("secrets", "set", "x").out
    assert "is removed" in falaj.done("secrets", "remove", "x", "--yes").out
    assert "look     falaj secrets list" in falaj("secrets", "remove", "x", "--yes").err


def test_a_variable_that_looks_like_a_secret_causes_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "HF_TOKEN",
        "db_password",
        "AWS_SECRET_ACCESS_KEY",
        "APIKEY",
        "KEYS",
        "TOKENIZERS_PARALLELISM",
        "MONKEYS_1",
    )

    for name in names:
        warn_about_secrets(JobSpec(name="x", script="x.py", env={name: "v"}))

    stderr = capsys.readouterr().err
    warned = {name for name in names if f"warning: {name} looks like a secret" in stderr}
    assert warned >= {"HF_TOKEN", "db_password", "AWS_SECRET_ACCESS_KEY", "APIKEY", "KEYS"}
    assert "TOKENIZERS_PARALLELISM" not in warned
    assert "falaj secrets set hf-token, and --secret HF_TOKEN=hf-token" in stderr


# ---------------------------------------------------------------------------------------------------- options


def test_every_field_of_a_job_can_be_typed() -> None:
    typed = {ALIASES.get(name, name) for name in OPTIONS} - {"workspace"}
    plain = {*SYNONYMS.values(), "processes_min", "args"}

    assert typed == FIELDS.keys() - plain


BAD = (
    ("train", 2, "SCRIPT"),
    ("train gone.py --memory lots", 2, "2 values are not valid"),
    ("train . --memory 1GiB", 2, "a Python script that is there"),
    ("train says.py --memory lots", 2, "--memory is not valid"),
    ("train says.py --memory 99999TiB", 2, "--memory"),
    ("train says.py --disk 5", 2, "--disk is not valid"),
    ("train says.py --gpu-share 2", 2, "--gpu-share is not valid"),
    ("train says.py --gpus 99", 2, "--gpus"),
    ("train says.py --gpu-memory some", 2, "--gpu-memory is not valid"),
    ("train says.py --priority higher", 2, "--priority is not valid"),
    ("train says.py --processes 4:2", 2, "--processes is not valid"),
    ("train says.py --roles worker", 2, "--roles is not valid"),
    ("train says.py --timeout soon", 2, "--timeout is not valid"),
    ("train says.py --hang-after 10", 2, "--hang-after is not valid"),
    ("train says.py --framework caffe", 2, "--framework is not valid"),
    ("train says.py --island moon", 2, "--island is not valid"),
    ("train says.py --pool A+B", 2, "--pool is not valid"),
    ("train says.py --near x --apart x", 2, "both wanted and avoided"),
    ("train says.py --secret DB", 2, "--secret is not valid"),
    ("train says.py --secret DB=nothing", 1, "there is no secret 'nothing'"),
    ("train says.py --secret DB=nothing", 1, "fix      falaj secrets set nothing"),
    ("train says.py --env A", 2, "--env is not valid"),
    ("train says.py --env FALAJ_X=1", 2, "--env is not valid"),
    ("train says.py --dataset =x", 2, "--dataset is not valid"),
    ("train says.py --queue nowhere", 1, "nowhere"),
    (
        "train says.py --queue nowhere",
        1,
        "fix      one of these, or let an operator create it: falaj queues set nowhere",
    ),
    ("train says.py --dataset nope", 1, "fix      falaj features training-sets"),
    ("train says.py --cpus 9999", 2, "falaj nodes list shows the machines"),
    ("train says.py --gpus 999", 2, "fix      ask for "),
    ("train says.py --memory 900TiB", 2, "given    900TiB"),
    ("queues show nowhere", 1, "look     falaj queues show"),
    ("train says.py --queue No+Queue", 2, "--queue is not valid"),
    ("train says.py --environment No+Name", 2, "--environment is not valid"),
    ("train --file gone.yaml", 2, "a readable file of YAML"),
    ("train --file says.py", 2, "says.py:"),
    ("jobs submit gone.yaml", 2, "a readable file of YAML"),
    ("jobs top --every 0s", 2, "at least 1s"),
    ("jobs top --every soon", 2, "--every is not valid"),
    ("jobs top --once --workspace nowhere", 1, "there is no workspace 'nowhere'"),
    ("jobs list --state sleeping", 2, "--state"),
    ("jobs show nope", 1, "look     falaj jobs list"),
    ("jobs wait nope --follow", 1, "there is no job 'nope'"),
)


@pytest.mark.parametrize(("typed", "status", "words"), BAD, ids=[f"{each[0]}: {each[2]}" for each in BAD])
def test_bad_input_is_refused_with_a_message(falaj: CommandLine, typed: str, status: int, words: str) -> None:
    ran = falaj(*(word.replace("+", " ") for word in typed.split()))

    assert ran.status == status, ran.err
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert falaj.json("jobs", "list")["items"] == []


def test_several_faults_are_named_together(falaj: CommandLine) -> None:
    ran = falaj("train", "says.py", "--memory", "8", "--cpus", "many", "--timeout", "soon", "--secret", "X")

    assert "4 values are not valid" in ran.err
    assert [line.strip() for line in ran.err.splitlines() if line.startswith("  --")] == [
        "--memory",
        "--timeout",
        "--secret",
        "--cpus",
    ]


# -------------------------------------------------------------------------------------------------- files


def test_a_file_is_printed_submitted_and_overridden(falaj: CommandLine) -> None:
    (falaj.folder / "sub").mkdir()
    shown = falaj.done("train", "--file", "job.yaml", "--dry-run", "--cpus", "2", "--env", "COLOR=blue").out
    (falaj.folder / "printed.yaml").write_text(shown)

    assert falaj.json("jobs", "list")["items"] == []
    assert "cpus: 2" in shown
    assert "VERSION: '1.10'" in shown
    assert falaj.done("train", "--file", "printed.yaml", "--dry-run").out == shown
    assert falaj.json("train", "--file", "job.yaml", "--dry-run")["memory_bytes"] == 64 << 20
    queued = falaj.done("jobs", "submit", "job.yaml")
    job = falaj.json("jobs", "list")["items"][0]
    assert f"job {job['id']} (from-file) is queued with 2 files of code" in queued.out
    assert job["spec"]["env"] == {"VERSION": "1.10", "COLOR": "red"}


@pytest.mark.slow
def test_the_script_of_a_file_is_relative_to_it(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = falaj.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    ran = falaj.done("train", "--file", "../job.yaml", "--name", "renamed")

    assert "is done after" in ran.out
    assert falaj.json("jobs", "list")["items"][0]["name"] == "renamed"


def test_faults_of_a_file_and_of_options_are_distinguished(falaj: CommandLine) -> None:
    (falaj.folder / "bad.yaml").write_text("script: says.py\nmemory: lots\nqueeu: x\n")

    ran = falaj("train", "--file", "bad.yaml", "--gpus", "many")

    assert ran.status == 2
    assert [line.strip() for line in ran.err.splitlines() if line.startswith("  ") and line[2] != " "] == [
        "--gpus",
        "bad.yaml:2 memory",
        "bad.yaml:3 queeu",
    ]
    assert "fix      queue, if that is meant" in ran.err


@pytest.mark.slow
def test_python_takes_the_same_names(falaj: CommandLine) -> None:
    with fj.open(falaj.home) as platform:
        job = platform.train(
            "says.py", args=["a"], memory="64MiB", timeout="5m", env={"A": "1"}, preempt=False
        )
        other = platform.train(file="job.yaml", cpus=2, name="renamed")

    assert (job.spec.memory_bytes, job.spec.timeout, job.spec.preemptible) == (
        64 << 20,
        timedelta(minutes=5),
        False,
    )
    assert (other.spec.name, other.spec.cpus, other.spec.env["VERSION"]) == ("renamed", 2, "1.10")


# ------------------------------------------------------------------------------------------ running jobs


@pytest.mark.slow
def test_steps_loss_and_metrics_are_shown_while_a_job_runs(falaj: CommandLine) -> None:
    with fj.open(falaj.home) as platform:
        stop = platform.put("stop", b"go")
        job = platform.train("waits.py", inputs={"stop": stop.id})
        running = next(each for each in platform.jobs.wait(job.id) if each.progress and each.progress.rate)
        metrics = {each.key: each for each in platform.runs.show(job.run).metrics}
        scene = jobs_top.TopPoller(platform, None).poll()
        platform.jobs.cancel(job.id)
        eventually(lambda: platform.jobs.show(job.id).state.ended)

    assert running.progress is not None
    assert running.progress.total == 1200
    assert running.progress.loss is not None
    assert 1 / running.progress.loss == pytest.approx(round(1 / running.progress.loss))  # of one of its steps
    assert running.progress.left is not None
    assert metrics["loss"].points > 0
    assert [each.id for each in scene.running] == [job.id]
    head, _, rows, _ = jobs_top.lines(scene)
    assert head[0] == "1 job running, 0 waiting"
    assert " of 1200" in rows[0][jobs_top.HEADINGS.index("step")]
    assert rows[0][jobs_top.HEADINGS.index("owner")] != job.owner


@pytest.mark.slow
def test_a_failed_job_shows_its_reason_before_its_log(falaj: CommandLine) -> None:
    (falaj.folder / "fails.py").write_text("raise ValueError('nothing to learn')")
    job = falaj("train", "fails.py", "--json").json["id"]

    ran = falaj("jobs", "logs", job)

    assert ran.err == f"job {job} failed: Exit code 1: ValueError: nothing to learn\n"
    assert ran.out.startswith("Traceback")


class Printed:
    """Jobs of which one has printed the given chunks."""

    def __init__(self, *pieces: bytes) -> None:
        self.jobs, self.pieces, self.attempt = self, pieces, 1

    def show(self, job: str) -> Printed:
        return self

    def logs(self, job: str, *, follow: bool, offset: int) -> tuple[bytes, ...]:
        return self.pieces


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"10%\r20%\r", b"\nend"], "10%\n20%\nend\n"),
        ([b"one\r", b"\ntwo\r\n"], "one\ntwo\n"),
        ([b"\x1b[2J\xff\n"], "\\x1b[2J\N{REPLACEMENT CHARACTER}\n"),
        ([], ""),
    ],
)
def test_a_progress_bar_in_a_log_becomes_separate_lines(pieces: list[bytes], shown: str) -> None:
    printed: Any = Printed(*pieces)
    to = io.StringIO()

    job_progress.print_log(printed, "job", follow=False, offset=0, to=to)

    assert to.getvalue() == shown


def test_a_followed_job_prints_its_progress_periodically(capsys: pytest.CaptureFixture[str]) -> None:
    job = made(JobState.RUNNING, progress=JobProgress(step=3, total=10, loss=0.25, rate=0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_progress, "LINE_EVERY_S", 0.0)
        job_progress._lines("train")(job)

    assert capsys.readouterr().err == "train: step 3 of 10, loss 0.25, 2 s/step, 14s left\n"


def test_losing_access_to_a_followed_job_shows_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shut:
        jobs: Any = None

        def show(self, job: str) -> Job:
            raise Denied("your token has expired")

    platform, over = Shut(), threading.Event()
    platform.jobs = platform
    monkeypatch.setattr(job_progress, "POLL_S", 0.0)

    job_progress._watch(platform, "job_1", over, lambda _: None)  # type: ignore[arg-type]

    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal_has_step_loss_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())

    with job_progress._progress("train") as tell:
        tell(made(JobState.RUNNING, progress=JobProgress(step=3, total=10, loss=0.25, rate=4.0)))

    assert "step 3 of 10, loss 0.25, 4 steps/s, 2s left" in screen.getvalue()


def test_nodes_and_queues_are_shown_in_one_line_each() -> None:
    card = {"model": "H200", "memory_bytes": 1 << 37}
    node = {
        "name": "dgx",
        "zone": "local",
        "jurisdiction": "AE",
        "cpus": 8,
        "memory_bytes": 1 << 40,
        "gpus": [{"id": "a", **card}, {"id": "b", **card}],
    }
    free = {"cpus": 2, "memory_bytes": 1 << 39, "gpus": 1, "gpu_milli": [1000, 750]}
    machine = Machine.model_validate({"node": node, "free": free, "gpu_fault": "one is lost"})
    queue = QueueState.model_validate(
        {
            "settings": {"name": "risk", "quota": {"gpus": 4}},
            "held": {"cpus": 6, "gpus": 4.5},
            "borrowed": {"gpus": 0.5},
            "running": 3,
            "waiting": 1,
            "score": 0.25,
        }
    )

    head, _, rows, _ = jobs_top.lines(jobs_top.TopSnapshot(utc_now(), nodes=(machine,), queues=(queue,)))

    assert head[1:] == [
        "node   dgx: 6 of 8 CPUs, 0.25 of 2 GPUs, 512 GiB of 1 TiB in use; one is lost",
        "queue  risk: 4.5 of 4 GPUs, 6 CPUs, borrows; 3 running, 1 waiting; score 0.25",
    ]
    assert rows == []


def test_top_once_shows_running_jobs_and_why_others_wait(falaj: CommandLine) -> None:
    falaj.done("train", "says.py", "--detach", "--name", "first")
    falaj.done("train", "says.py", "--detach", "--name", "second")

    shown = falaj.done("jobs", "top").out
    document = falaj.json("jobs", "top")

    assert shown.startswith("0 jobs running, 2 waiting\n")
    assert shown.index("first") < shown.index("second")
    assert [each["name"] for each in document["waiting"]] == ["first", "second"]
    assert document["reasons"].keys() == {each["id"] for each in document["waiting"]}


def test_top_fits_a_terminal_and_ends_by_an_interrupt(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tuple(made(JobState.QUEUED, number) for number in range(50))
    looks = iter([jobs_top.TopSnapshot(jobs[0].submitted_at, waiting=jobs), Unavailable("it restarts")])
    keys = iter([" ", None])

    def look(*_: Any) -> jobs_top.TopSnapshot:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    def press(_: float) -> str:
        if (key := next(keys)) is None:
            raise KeyboardInterrupt
        return key

    monkeypatch.setattr(jobs_top.TopPoller, "poll", look)
    monkeypatch.setattr(live_table, "on_terminal", lambda: True)
    monkeypatch.setattr(live_table, "_pause", press)

    assert falaj("jobs", "top", "--every", "3s").status == 0
    assert next(looks, None) is None


def test_a_screen_has_no_more_rows_and_columns_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    jobs = tuple(made(JobState.QUEUED, number) for number in range(50))
    console = Console(width=60, height=12, file=io.StringIO())

    shown = jobs_top.lines(jobs_top.TopSnapshot(jobs[0].submitted_at, waiting=jobs))
    console.print(live_table.paint(shown, "q to quit"))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) <= 12
    assert "and 43 more" in text


# -------------------------------------------------------------------------------------------- text output


def made(state: JobState, number: int = 0, **values: Any) -> Job:
    ident = f"job_{number:026}"
    given = {"id": ident, "workspace": "w", "name": f"job{number}", "run": "r", "owner": "user_1"}
    spec = JobSpec(name="x", script="x.py")
    return Job.model_validate({**given, "state": state, "submitted_at": utc_now(), "spec": spec, **values})


def test_a_job_is_shown_as_text() -> None:
    spec = JobSpec.model_validate(
        {
            "name": "x",
            "script": "x.py",
            "args": ["\x1b[2J"],
            "framework": "torch",
            "processes": 4,
            "processes_min": 2,
            "gpus": 1,
            "gpu_milli": 250,
            "memory_bytes": 3 << 30,
            "affinity": {"pools": ["a"], "spread": True},
        }
    )

    assert describe_command(spec) == "x.py \\x1b[2J (torch, 2 to 4 processes)"
    assert describe_request(spec) == "1 CPU, 0.25 of a GPU, 3GiB of memory"
    assert describe_affinity(spec.affinity) == "pools a; spread"
    wide = JobSpec(name="x", script="x.py", nodes=4, processes=8, cpus=16, gpus=8)
    assert describe_command(wide) == "x.py (4 nodes × 8 processes)"
    assert describe_request(wide) == "4 nodes, each with 16 CPUs, 8 GPUs"
    assert describe_gpus(wide) == "32"  # jobs top counts all nodes
    assert describe_state(made(JobState.RUNNING, leaving=True)) == "being preempted"
    assert describe_state(made(JobState.RUNNING, cancelling=True)) == "stopping"


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (JobProgress(step=3), "step 3"),
        (JobProgress(step=3, total=9, rate=1.0), "step 3 of 9, 1 steps/s, 6s left"),
        (
            JobProgress(step=3, total=9, loss=0.123456789, rate=0.01),
            "step 3 of 9, loss 0.12346, 100 s/step, 10m left",
        ),
        (JobProgress(step=9, total=9, rate=1.0), "step 9 of 9, 1 steps/s"),
    ],
    ids=str,
)
def test_progress_is_shown_as_text(progress: JobProgress, words: str) -> None:
    assert progress_line(progress) == words


def test_rates_and_times_are_short() -> None:
    assert [format_rate(rate) for rate in (None, 0.0, 1234.5, 2.0)] == [
        "-",
        "-",
        "1,234 steps/s",
        "2 steps/s",
    ]
    spans = [None, timedelta(0), timedelta(seconds=3599), timedelta(hours=47), timedelta(days=3, hours=5)]
    assert [format_rough_duration(each) for each in spans] == ["-", "0s", "59m", "47h 0m", "3d 5h"]


# ------------------------------------------------------------------------------------------------ termination


@pytest.mark.slow
def test_a_train_that_is_terminated_cancels_the_job_that_it_runs(falaj: CommandLine) -> None:
    """No platform runs on the home, so the command runs the job itself, and nobody would look after it."""
    (falaj.folder / "sleeps.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "falaj", "train", "sleeps.py"]
    with subprocess.Popen(
        command, cwd=falaj.folder, env=environment(falaj.folder), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "begun\n":
                break

        process.terminate()

        assert process.wait(PATIENCE_S) == 143
    (job,) = falaj.json("jobs", "list")["items"]
    assert (job["state"], "stopped on request" in job["reason"]) == ("cancelled", True)
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(job["id"].encode() in each for each in running)
