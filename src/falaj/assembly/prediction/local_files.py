"""Predict rows in files of this machine: a process without keys does the work, this one gives the output its name.

The rows and the model may come from anyone, and the process that knows the caller's token or the platform's keys parses
neither. See decision 0048.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from falaj.assembly.parsing import find_sandboxes
from falaj.assembly.prediction.__main__ import DATA, MODEL, OTHERS, TABLE, TABLE_FILE
from falaj.errors import (
    AlreadyExists,
    Conflict,
    Fault,
    InvalidInput,
    IsolationRefused,
    NotFound,
    Unavailable,
    rebuild,
)
from falaj.governance.isolation import SEPARATING
from falaj.ports.sandbox import Sandbox, UserCode
from falaj.records.control.predictions import PredictionProgress, PredictionRun, PredictionSummary
from falaj.records.names import ObjectId
from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.records.places import default_config_dir
from falaj.records.registry import FileFormat

COMMAND = ("-I", "-m", "falaj.assembly.prediction")
PACKAGE = Path(__file__).parents[2]
PARQUET = ".parquet"
PARTIAL = ".partial"
"""The folder of an unfinished output has its name and this suffix."""
EMPTY_BYTES = 4
"""Size of a file of rows that has none: magic bytes alone."""
SANDBOX_USER = "falaj"
"""torch asks for the name of the user, and the number that the process runs under may have none."""
END_S = 5.0
"""How long the process may take to end after its last report."""
GPU_DEVICES = "nvidia*"
ARGUMENT_CHARACTERS = 100_000
"""The kernel takes 131,072 bytes in one argument."""

Report = Callable[[PredictionProgress], None]


def predict_files(
    run: PredictionRun,
    model: Iterable[bytes],
    output: Path,
    *,
    others: Sequence[Iterable[bytes]] = (),
    steps: Mapping[ObjectId, Iterable[bytes]] | None = None,
    overwrite: bool = False,
    report: Report,
) -> PredictionSummary:
    """Predict the rows of `run.source` into `output`: a Parquet file, or a Delta table if it is named otherwise.

    `model` yields the bytes of the model's file, `others` those of `run.others`, `steps` those of an ensemble's steps
    by their versions. A run that was killed goes on where it stopped.
    """
    source, output = check_paths(Path(run.source), output, overwrite=overwrite)
    folder = output.with_name(output.name + PARTIAL)
    run = run.model_copy(update={"source": str(source), "to_delta": output.suffix != PARQUET})
    with _only_run(folder):
        try:
            beside = {str(place): content for place, content in enumerate(others)} | dict(steps or {})
            _write_model(folder, model, beside)
            done = _run_apart(run, folder, source, report)
            _publish(folder, output, overwrite=overwrite)
        except BaseException:
            _forget_if_empty(folder)
            raise
    return done


def check_paths(source: Path, output: Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Return both paths without links; raise if they cannot be read, or written."""
    if not source.exists():
        raise NotFound(f"there is no input {source}")
    if not output.parent.is_dir():
        raise NotFound(f"there is no folder {output.parent} for the output")
    place = output.parent.resolve() / output.name
    source = source.resolve()
    if place == source or place.is_relative_to(source):
        raise InvalidInput.at("output", given=str(output), allowed="a path outside of the input")
    if os.path.lexists(place) and not overwrite:
        raise AlreadyExists(f"{output} exists; --overwrite replaces a file once the new one is complete")
    if os.path.lexists(place) and not (place.is_file() and place.suffix == PARQUET):
        raise InvalidInput.at(
            "output", given=f"{output}, which is not a Parquet file", allowed="a name that is free"
        )
    return source, place


@contextmanager
def _only_run(folder: Path) -> Iterator[None]:
    """Hold the folder of an unfinished output; Conflict while another run does."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(
                f"another run writes {folder.name.removesuffix(PARTIAL)} now; wait for it, or choose another output"
            ) from None
        yield
    finally:
        os.close(handle)


def _write_model(folder: Path, model: Iterable[bytes], others: Mapping[str, Iterable[bytes]]) -> None:
    """Write the files of the model where the process finds them; it may be another user's."""
    _forget_model(folder)
    owner = folder.stat()
    beside = folder / OTHERS
    beside.mkdir(mode=0o700)
    if owner.st_uid != os.geteuid():
        os.chown(beside, owner.st_uid, owner.st_gid, follow_symlinks=False)
    _write_file(folder / MODEL, model, owner)
    for name, content in others.items():
        _write_file(beside / name, content, owner)


def _write_file(path: Path, content: Iterable[bytes], owner: os.stat_result) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for piece in content:
            file.write(piece)
        if owner.st_uid != os.geteuid():
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)


def _forget_model(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / MODEL).unlink()
    shutil.rmtree(folder / OTHERS, ignore_errors=True)


def _forget_if_empty(folder: Path) -> None:
    """Remove what a run has left that wrote no row; else the model's bytes alone."""
    _forget_model(folder)
    try:
        has_rows = (folder / DATA).lstat().st_size > EMPTY_BYTES
    except FileNotFoundError:
        has_rows = False
    if not has_rows:
        shutil.rmtree(folder, ignore_errors=True)


def _run_apart(run: PredictionRun, folder: Path, source: Path, report: Report) -> PredictionSummary:
    """Run the program in the strongest sandbox in which it gets ready."""
    text = run.model_dump_json()
    pieces = [text[at : at + ARGUMENT_CHARACTERS] for at in range(0, len(text), ARGUMENT_CHARACTERS)]
    code = UserCode(
        [sys.executable, *COMMAND, *pieces],
        folder,
        environment={"PATH": os.defpath, "USER": SANDBOX_USER, **NO_TELEMETRY},
        readable=[PACKAGE, source],
        hidden=[default_config_dir()],
        devices=_devices(run),
        children=False,
    )
    faults = []
    for sandbox in _sandboxes(run):
        try:
            return _run_in(sandbox, code, report)
        except (IsolationRefused, _NeverReadyError, OSError) as error:
            faults.append(Fault(where=sandbox.name, given=str(error) or type(error).__name__))
    raise Unavailable("no process for the prediction can be started", faults=faults)


def _devices(run: PredictionRun) -> Sequence[Path]:
    """Return the GPUs that the process may open. User code gets them only where the caller says so."""
    is_without = run.device == "cpu" or (run.device == "auto" and run.format is FileFormat.PYTHON)
    return () if is_without else sorted(Path("/dev").glob(GPU_DEVICES))


def _sandboxes(run: PredictionRun) -> Sequence[Sandbox]:
    """Return the sandboxes to try. A model that is code is kept apart from all else, see decision 0047."""
    found = find_sandboxes()
    if run.format is not FileFormat.PYTHON:
        return found
    separating = [sandbox for sandbox in found if sandbox.name in SEPARATING]
    if not separating:
        raise IsolationRefused(
            f"{run.model} is Python code, which runs only where a sandbox keeps it apart, and none works here; "
            "'falaj doctor' says what each of them lacks"
        )
    return separating


class _NeverReadyError(Exception):
    """The program ended before it had begun: this sandbox does not show what it needs."""


def _run_in(sandbox: Sandbox, code: UserCode, report: Report) -> PredictionSummary:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(reading, "rb") as lines:
        try:
            process = sandbox.start(code, stdout=writing, stderr=errors.fileno())
        finally:
            os.close(writing)
        try:
            done = _follow(lines, process, errors, report)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return done
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(
    lines: BinaryIO, process: subprocess.Popen[bytes], errors: BinaryIO, report: Report
) -> PredictionSummary:
    """Report what the program reports, and return its result; raise its error."""
    is_ready = False
    for line in lines:
        ((kind, content),) = _message(line).items()
        if kind == "error":
            raise rebuild(content["code"], content["message"], content["faults"], {})
        if kind == "done":
            return PredictionSummary.model_validate(content)
        if kind == "progress":
            report(PredictionProgress.model_validate(content))
        is_ready = True
    status = process.wait()
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 2000))
    last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    if not is_ready:
        raise _NeverReadyError(last or f"it ended with status {status}")
    why = "killed, perhaps for lack of memory" if status in (-9, 137) else last or f"exit status {status}"
    raise Unavailable(
        f"the process of the prediction ended: {why}; the same command goes on where it stopped"
    )


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
        if isinstance(found, dict) and len(found) == 1 and isinstance(next(iter(found.values())), dict):
            return found
    except ValueError:
        pass
    raise Unavailable("the process of the prediction wrote what is not a report")


def _publish(folder: Path, output: Path, *, overwrite: bool) -> None:
    """Give the finished output its name. The folder was another process's: links in it are not followed."""
    made = folder / DATA
    if output.suffix == PARQUET:
        _take_over(made)
        if overwrite:
            os.replace(made, output)
        else:
            try:
                os.link(made, output, follow_symlinks=False)
            except FileExistsError:
                raise AlreadyExists(f"{output} was written by someone else meanwhile") from None
    else:
        made.unlink()  # the table has the other link to it
        table = folder / TABLE
        _take_over(table / TABLE_FILE)
        _take_over_folder(table)
        os.rename(table, output)
    _sync_folder(output.parent)
    shutil.rmtree(folder, ignore_errors=True)


def _take_over(path: Path) -> None:
    """Make a file that the program wrote one of this user's; Unavailable if it is a link or something else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the process of the prediction left no output: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unavailable("the process of the prediction left something else than a file")
        if os.fstat(handle).st_uid != os.geteuid():
            os.fchown(handle, os.geteuid(), os.getegid())
        os.fchmod(handle, 0o666 & ~_umask())
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_over_folder(table: Path) -> None:
    for folder, folders, files in os.walk(table):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                raise Unavailable("the process of the prediction left a link in the table")
            if path.is_file():
                _take_over(path)
    for folder, _, _ in os.walk(table):
        if os.stat(folder).st_uid != os.geteuid():
            os.chown(folder, os.geteuid(), os.getegid())
        os.chmod(folder, 0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
