"""Jobs in YAML: parsed, refused with the line of each fault, and written so that they can be read again."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.errors import FalajError, InvalidInput
from falaj.records.training.jobs import JobSpec
from falaj.sdk.definition_files.job_yaml import read_job, spell_job
from falaj.sdk.definition_files.yaml_lines import read_yaml
from falaj.sdk.job_fields import FIELDS, SYNONYMS
from falaj.sdk.job_request import JobRequest, build_spec
from falaj.sdk.training import prepare

GOOD = """
# the nightly job
script: code/train.py
name: nightly
args: [--lr, 1.10, --quick, yes]
queue: risk
framework: torch
nodes: 2
processes: 2:4
memory: 8GiB
timeout: 90m
inputs:
  training: churn@3
env:
  VERSION: 1.10
  SINCE: 2026-01-01
  ON: on
secrets:
  DB_PASSWORD: secret:db
affinity:
  pools: [fast]
  spread: true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)")
    return tmp_path


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "job.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def refused(folder: Path, text: str | bytes) -> list[str]:
    """Return the places of the faults, without the folder."""
    file = written(folder, text)
    with pytest.raises(InvalidInput) as error:
        prepare(read_job(file))
    assert "Traceback" not in str(error.value)
    return [fault.where.replace(f"{file}:", "") for fault in error.value.faults]


def test_a_job_is_read_without_yaml_type_surprises(folder: Path) -> None:
    ready = prepare(read_job(written(folder, GOOD)))

    spec = ready.spec
    assert (spec.name, spec.script, spec.queue) == ("nightly", "train.py", "risk")
    assert spec.args == ("--lr", "1.10", "--quick", "yes")
    assert spec.env == {"VERSION": "1.10", "SINCE": "2026-01-01", "ON": "on"}
    assert (spec.nodes, spec.processes_min, spec.processes, spec.memory_bytes) == (2, 2, 4, 8 << 30)
    assert spec.affinity.spread
    assert spec.secrets == {"DB_PASSWORD": "secret:db"}


def test_a_printed_job_file_is_read_back(folder: Path) -> None:
    ready = prepare(read_job(written(folder, GOOD)))

    again = prepare(read_job(written(folder, spell_job(ready.spec, script="code/train.py"))))

    assert again.spec == ready.spec


@pytest.mark.parametrize("script", ["x" * 300 + ".py", r'"a\0b.py"'])
def test_an_invalid_script_name_is_reported_as_a_fault(folder: Path, script: str) -> None:
    assert refused(folder, f"cpus: 1\nscript: {script}\n") == ["2 script"]
    with pytest.raises(InvalidInput):
        prepare(JobRequest(), script=script)


def test_every_fault_has_its_line(folder: Path) -> None:
    text = "script: code/train.py\nmemory: lots\n\ncpu: 2\nenv:\n  A: 1\n  a-b: 2\ngpus: many\ntimeout: 5\n"

    assert refused(folder, text) == ["2 memory", "4 cpu", "7 env.a-b", "8 gpus", "9 timeout"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("script: code/train.py\n\tcpus: 2\n", ["2"]),
        ("script: code/train.py\ncpus:\t2\nenv:\n\t A: 1\n", ["2"]),
        ("cpus: 1\nscript: code/train.py\ncpus: 2\n", ["3 cpus"]),
        ("script: code/train.py\nenv:\n  A: 1\n  A: 2\n", ["4 env.A"]),
        ("script: code/train.py\nenv: &all {A: 1}\n", ["2 env"]),
        ("script: code/train.py\nargs: *all\n", ["2 args"]),
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", ["1 a", "2 b", "2 b.0", "2 b.1", "3 c.0", "3 c.1"]),
        ("script: !!python/object/apply:os.system ['true']\n", ["1 script"]),
        ("script: code/train.py\nenv: !!set {A}\n", ["2 env"]),
        ("script: code/train.py\n---\nscript: code/train.py\n", ["2"]),
        ("script: code/train.py\nqueue:\n", ["2 queue"]),
        ("script: code/train.py\nenv: {A: }\n", ["2 env.A"]),
        ("script: code/train.py\n? [a, b]\n: c\n", ["2"]),
        ("script: code/train.py\n<<: {cpus: 2}\n", ["2 <<"]),
        ("script: gone.py\ncpus: none\n", ["1 script", "2 cpus"]),
        ("script: [code/train.py]\n", ["1 script"]),
        ("- script: code/train.py\n", ["1"]),
        ("just words\n", ["1"]),
        ("", ["1"]),
        ("# nothing\n", ["1"]),
        ("script: 'code/train.py\n", ["2"]),
        ("script: {code\n", ["2"]),
        ("script: code/train.py\nargs: --epochs 3\n", ["2 args"]),
        ("script: code/train.py\nenv: [A]\n", ["2 env"]),
        ("script: code/train.py\ncpus: true\n", ["2 cpus"]),
        ("script: code/train.py\naffinity:\n  pool: fast\n  colour: red\n", ["4 affinity.colour"]),
    ],
    ids=repr,
)
def test_yaml_that_is_wrong_is_refused_by_line(folder: Path, text: str, where: list[str]) -> None:
    assert refused(folder, text) == where


@pytest.mark.parametrize(
    "raw",
    [b"script: \xff\xfe\n", b"script: a\x00b\n", b"script: a\x07b\n", b"x" * (1 << 20) + b": 1\n"],
    ids=["latin", "nul", "bell", "large"],
)
def test_binary_content_is_refused(folder: Path, raw: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"job\.yaml is not valid"):
        read_job(written(folder, raw))


def test_a_missing_file_is_refused(folder: Path) -> None:
    for path in (folder / "gone.yaml", folder):
        with pytest.raises(InvalidInput, match="--file is not valid"):
            read_job(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000], ids=["lists", "maps", "dashes"]
)
def test_deep_nesting_is_refused_quickly(folder: Path, text: str) -> None:
    began = time.process_time()

    with pytest.raises(InvalidInput):
        read_job(written(folder, text))

    assert time.process_time() - began < 20


def test_a_file_with_a_byte_order_mark_is_read(folder: Path) -> None:
    assert read_yaml(written(folder, b"\xef\xbb\xbfscript: a\n")).values == {"script": "a"}


def test_a_job_without_a_script_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        prepare(JobRequest(), file=written(folder, "cpus: none\n"))

    assert {fault.where.rpartition(" ")[2] for fault in error.value.faults} == {"script", "cpus"}


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab:-[]{}&*!?|>'\"%#,~1. \n\t")), max_size=60))
def test_arbitrary_text_is_refused_with_a_message(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "strange.yaml"
    file.write_text(text)

    with suppress(FalajError):
        spec = build_spec(read_job(file), name="x", script="x.py")
        assert isinstance(spec, JobSpec)


def test_a_script_given_as_option_overrides_the_file(folder: Path) -> None:
    file = written(folder, "script: gone.py\n")

    ready = prepare(JobRequest(), script=folder / "code" / "train.py", file=file)

    assert (ready.spec.name, ready.spec.script) == ("train", "train.py")


def test_the_job_in_the_reference_is_valid(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "jobs.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (folder / "train.py").write_text("")

    spec = prepare(JobRequest(), file=written(folder, text)).spec

    assert spec.args == ("--epochs", "3", "--lr", "0.10")
    assert spec.env == {"VERSION": "1.10"}


def test_the_reference_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "jobs.md").read_text()
    missing = {name for name in FIELDS if f"`{name}`" not in page}

    assert missing == {*SYNONYMS.values(), "processes_min"}
