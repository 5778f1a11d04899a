"""Code archives: what is packed, and that unpacking writes nothing outside its folder."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from falaj.errors import InvalidInput, TooLarge
from falaj.ports.parsers import ByteSource
from falaj.training import code_archive
from falaj.training.code_archive import pack_code, parse_code, write_code


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def unpack_code(archive: io.BytesIO, folder: Path) -> None:
    """As the platform does it, but for the process in which archives are parsed."""
    data = archive.getvalue()
    source = ByteSource(len(data), lambda offset, length: data[offset : offset + length])
    write_code(parse_code([source], {}), folder)


def unpacked(archive: bytes, folder: Path) -> dict[str, str]:
    folder.mkdir()
    unpack_code(io.BytesIO(archive), folder)
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_script_is_packed_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import model")
    (tmp_path / "model.py").write_text("x = 1")
    (tmp_path / "data.csv").write_text("a,b")

    packed = pack_code(tmp_path / "train.py")

    assert (packed.script, packed.origin.commit) == ("train.py", None)
    assert unpacked(packed.archive, tmp_path / "out") == {"train.py": "import model", "model.py": "x = 1"}


def test_a_repository_is_packed_without_ignored_files(tmp_path: Path) -> None:
    files = {"train.py": "1", "lib/deep.py": "2", ".gitignore": "*.bin\n", "big.bin": "3", "new.toml": "4"}
    git(tmp_path, "init")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", "train.py", "lib", ".gitignore")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "train.py").write_text("changed")
    (tmp_path / "lib" / "deep.py").unlink()

    packed = pack_code(tmp_path / "train.py")

    found = unpacked(packed.archive, tmp_path / "out")
    assert found == {"train.py": "changed", ".gitignore": "*.bin\n", "new.toml": "4"}
    assert packed.origin.commit == git(tmp_path, "rev-parse", "HEAD")
    assert "+changed" in packed.origin.diff


def test_the_same_code_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")

    assert pack_code(tmp_path / "train.py").archive == pack_code(str(tmp_path / "train.py")).archive


@pytest.mark.parametrize("name", ["missing.py", ".", ""])
def test_a_missing_script_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        pack_code(tmp_path / name)

    assert refused.value.faults[0].where == "script"


def test_too_much_code_is_refused_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "LARGEST_BYTES", 10)
    (tmp_path / "train.py").write_text("x" * 11)

    with pytest.raises(TooLarge) as refused:
        pack_code(tmp_path / "train.py")

    assert "git ignore" in (refused.value.faults[0].fix or "")


def hostile(name: str, **changes: object) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        for key, value in changes.items():
            setattr(member, key, value)
        tar.addfile(member, io.BytesIO(b"x") if member.isreg() else None)
    return raw.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        hostile("/etc/cron.d/evil"),
        hostile("../evil.py"),
        hostile("a/../../evil.py"),
        hostile("a\\..\\evil.py"),
        hostile("link", type=tarfile.SYMTYPE, linkname="/etc/passwd", size=0),
        hostile("hard", type=tarfile.LNKTYPE, linkname="../../x", size=0),
        hostile("device", type=tarfile.CHRTYPE, size=0),
        hostile("pipe", type=tarfile.FIFOTYPE, size=0),
        b"not an archive",
        hostile("train.py")[:-20],
        b"",
    ],
    ids=lambda archive: str(len(archive)),
)
def test_paths_that_escape_the_folder_are_refused(tmp_path: Path, archive: bytes) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    with pytest.raises(InvalidInput):
        unpack_code(io.BytesIO(archive), folder)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_decompression_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "LARGEST_BYTES", 10)
    bomb = hostile("zeros", size=1)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 1 << 20
        tar.addfile(member, io.BytesIO(bytes(1 << 20)))

    with pytest.raises(TooLarge):
        unpack_code(io.BytesIO(raw.getvalue()), tmp_path)
    assert len(raw.getvalue()) < 5_000
    assert len(bomb) < 5_000


def with_head(kind: bytes, size: int) -> bytes:
    """Return an archive whose first member is an extension header, which tarfile reads into memory."""
    head = tarfile.TarInfo("x")
    head.type, head.size = kind, size
    return gzip.compress(head.tobuf(tarfile.GNU_FORMAT) + bytes(size), 1)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.usefixtures("traced")
def test_an_archive_header_does_not_fill_memory(tmp_path: Path, kind: bytes) -> None:
    bomb = with_head(kind, 64 << 20)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    with pytest.raises(TooLarge):
        unpack_code(io.BytesIO(bomb), tmp_path)

    most = tracemalloc.get_traced_memory()[1]
    assert most - before < 8 << 20


def test_folders_count_towards_the_entry_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MOST_FILES", 10)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for number in range(11):
            member = tarfile.TarInfo(f"folder{number}")
            member.type = tarfile.DIRTYPE
            tar.addfile(member)

    with pytest.raises(TooLarge):
        unpack_code(io.BytesIO(raw.getvalue()), tmp_path)


@pytest.mark.parametrize(
    "archive",
    [
        hostile("d/" * 1000 + "x"),
        hostile("x", pax_headers={"size": "-5"}),
        gzip.compress(b"no header".ljust(512, b"\0") + bytes(1024)),
    ],
    ids=["very deep", "less than nothing", "an unreadable header"],
)
def test_malformed_archives_are_refused(tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(InvalidInput):
        unpack_code(io.BytesIO(archive), tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_archive_does_not_end_at_a_header_that_cannot_be_read(tmp_path: Path) -> None:
    """tarfile takes it for the end, and the files behind it would be missing in silence."""
    files = gzip.decompress(hostile("first.py"))[:1024], gzip.decompress(hostile("second.py"))
    archive = gzip.compress(files[0] + b"no header".ljust(512, b"\0") + files[1])

    with pytest.raises(InvalidInput, match="header"):
        unpack_code(io.BytesIO(archive), tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        *(("a.py", "a.py"), ("a.py", "./a.py"), ("a.py", "A.py"), ("d/a.py", "D/a.py")),
        *(("a", "a/b.py"), ("a/b.py", "a"), ("a/b.py", "A"), ("A", "a/b/c.py"), (".",)),
        ("d/" + "x" * 256,),
    ],
)
def test_a_path_is_there_once(tmp_path: Path, names: tuple[str, ...]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))

    with pytest.raises(InvalidInput, match="code is not valid"):
        unpack_code(io.BytesIO(data.getvalue()), tmp_path)


def test_a_folder_may_be_named_after_what_is_in_it(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name in ("lib/deep/a.py", "lib", "lib/deep", "lib", "."):
            member = tarfile.TarInfo(name)
            member.type = tarfile.REGTYPE if name.endswith(".py") else tarfile.DIRTYPE
            tar.addfile(member)

    unpack_code(io.BytesIO(data.getvalue()), tmp_path)

    assert (tmp_path / "lib" / "deep" / "a.py").is_file()
