"""The list of packages that a run keeps: with a digest of each package's files, the same wherever it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.ports.cluster.python_packages import list_packages, read_packages

RECORD = """demo/__init__.py,sha256=abc,10
demo/__pycache__/__init__.cpython-311.pyc,,
../../../bin/demo,sha256={program},200
demo-1.0.dist-info/INSTALLER,sha256={installer},4
demo-1.0.dist-info/METADATA,sha256=def,100
demo-1.0.dist-info/RECORD,,
"""


def site(folder: Path, record: str | None) -> tuple[str]:
    info = folder / "demo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    if record is not None:
        (info / "RECORD").write_text(record)
    return (str(folder),)


def digest(folder: Path, record: str | None) -> str | None:
    text = list_packages("3.11", "python", site(folder, record))
    ((name, version, files),) = read_packages(text)
    assert (name, version) == ("demo", "1.0")
    return files


def test_the_digest_is_that_of_the_files_not_of_the_installation(tmp_path: Path) -> None:
    first = digest(tmp_path / "a", RECORD.format(program="1", installer="pip"))
    same = digest(tmp_path / "b", RECORD.format(program="2", installer="uv"))
    other = digest(tmp_path / "c", RECORD.format(program="1", installer="pip").replace("abc", "xyz"))

    assert first == same
    assert first != other


@pytest.mark.parametrize("record", [None, "", "nonsense", "a,b\nc,,\n"])
def test_a_package_without_a_record_has_no_digest(tmp_path: Path, record: str | None) -> None:
    assert digest(tmp_path / "a", record) is None


def test_other_lines_are_left_out() -> None:
    text = "# Python 3.11\n# image demo\n\nnumpy==2.4\nbad line\n-e git+https://x\ntorch==2.13  # files sha256:xy\n"

    assert list(read_packages(text)) == [("numpy", "2.4", None)]
