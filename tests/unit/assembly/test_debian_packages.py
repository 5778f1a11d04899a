"""What is unpacked of Debian packages for the base of an image."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from falaj.assembly.images.debian import unpack
from falaj.errors import InvalidInput

MODULE = "./usr/lib/python3.11/os.py"


def packages(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            member.uid, member.gid = os.getuid(), os.getgid()
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def regular(name: str, *, mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.size = mode, 3
    return member


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.fixture(params=["3.11.4", "3.11.2"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide on one of two that `tarfile` can filter, as it can since 3.11.4."""
    if request.param == "3.11.2":
        unfiltered = tarfile.TarFile.extract

        def extract(self: tarfile.TarFile, member: Any, path: Any = "") -> None:
            unfiltered(self, member, path)

        monkeypatch.setattr(tarfile.TarFile, "extract", extract)


def test_what_an_image_needs_is_unpacked(tmp_path: Path) -> None:
    raw = packages(
        tmp_path / "debian.tar",
        regular(MODULE),
        regular("./usr/bin/dpkg"),
        regular("./lib64/loader", mode=0o6777),
        link("./usr/lib/ssl/certs", "/etc/ssl/certs"),
        regular("./var/cache/apt/archives/netbase_6.4_all.deb"),
    )

    found = unpack(raw, tmp_path / "rootfs")

    assert found == ("netbase=6.4",)
    assert (tmp_path / "rootfs" / MODULE).stat().st_size == 3
    assert (tmp_path / "rootfs/lib64/loader").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(tmp_path / "rootfs/usr/lib/ssl/certs") == "/etc/ssl/certs"
    assert not (tmp_path / "rootfs/usr/bin/dpkg").exists()


@pytest.mark.parametrize(
    "last", [regular("./lib64/out/file"), link("./lib64/out/file", "x"), regular("./lib64/../../file")]
)
def test_nothing_is_written_outside_the_base(tmp_path: Path, last: tarfile.TarInfo) -> None:
    (tmp_path / "outside").mkdir()
    raw = packages(tmp_path / "debian.tar", link("./lib64/out", str(tmp_path / "outside")), last)

    with pytest.raises(InvalidInput, match="outside the base"):
        unpack(raw, tmp_path / "rootfs")

    assert not list((tmp_path / "outside").iterdir())
