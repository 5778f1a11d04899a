"""Images: their Dockerfiles, locks and archives, and what is refused before anything is built."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from pydantic import TypeAdapter, ValidationError

from falaj.assembly.images import build, builders, debian
from falaj.assembly.images.archives import (
    NAME_ANNOTATION,
    layer_files,
    read_image,
    rename_image,
    write_image,
    write_layer,
)
from falaj.assembly.images.build import (
    ImageRequest,
    build_folder,
    build_image,
    check_request,
    preview,
    record_build,
    recorded_builds,
)
from falaj.assembly.images.builders import ContainerBuilder, choose_builder
from falaj.assembly.images.context import constraints, locked_versions, pack_falaj, require_locked
from falaj.assembly.images.kinds import RECIPES, ImageSettings, render_dockerfile
from falaj.assembly.images.lock import Pin, normalized, parse_lock
from falaj.assembly.images.programs import Finished, run_program
from falaj.assembly.images.virtualenv_layer import with_interpreter
from falaj.errors import AlreadyExists, InvalidInput, Unavailable
from falaj.records.record import utc_now
from falaj.records.training.images import BaseImage, ImageBuild, PinnedImage, TaggedImage
from falaj.version import VERSION
from offline_index import offline_index

HASH = "a" * 64
DIGEST = f"sha256:{HASH}"


@pytest.fixture(autouse=True)
def mmdebstrap_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the base be made, whatever this machine and its Python are."""
    monkeypatch.setitem(debian.SUITES, debian.python_version(), "bookworm")
    monkeypatch.setattr(debian, "require_mmdebstrap", lambda: None)
    monkeypatch.setattr(build, "require_mmdebstrap", lambda: None)


# --------------------------------------------------------------------------------------------- Dockerfiles


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("base", ["debian", f"registry.example.com/python:3.11-slim@{DIGEST}"])
def test_a_dockerfile_is_multi_stage_non_root_and_installs_by_hash(kind: Any, base: str) -> None:
    lock = "numpy==2.4.6\n"
    text = render_dockerfile(ImageSettings(kind, base, lock))

    stages = re.findall(r"^FROM .*$", text, re.MULTILINE)
    assert stages[1:] == ["FROM base AS packages", "FROM base"]
    assert stages[0] == ("FROM scratch AS base" if base == "debian" else "FROM ${BASE} AS base")
    last = text.rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert "RUN" not in last
    assert '"--require-hashes"' in text
    assert '"--no-index"' in text
    assert f'LABEL org.opencontainers.image.version="{VERSION}"' in text
    assert f'LABEL dev.falaj.lock="sha256:{hashlib.sha256(lock.encode()).hexdigest()}"' in text


def test_no_dockerfile_uses_a_shell_or_names_a_registry() -> None:
    for kind in RECIPES:
        text = preview(ImageRequest(kind))

        runs = [line for line in text.splitlines() if line.startswith(("RUN", "CMD"))]
        assert len(runs) == 5
        assert all(isinstance(json.loads(line.partition(" ")[2]), list) for line in runs)
        assert not re.search(r"docker\.io|ghcr|quay|https?://", text)


def test_the_settings_of_an_archive_are_those_of_the_dockerfile() -> None:
    settings = ImageSettings("server", "debian", "x==1\n")

    config, text = settings.config(), render_dockerfile(settings)

    assert config["User"] == "65532:65532"
    assert f"CMD {json.dumps(config['Cmd'])}" in text
    for each in config["Env"]:  # type: ignore[attr-defined]
        name, _, value = each.partition("=")
        assert f'ENV {name}="{value}"' in text


# --------------------------------------------------------------------------------------------------- locks


def test_a_lock_may_have_hashes_markers_extras_and_continued_lines() -> None:
    pins = parse_lock(
        f"# made by uv\nnumpy==2.4.6 \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{'b' * 64}  # two files\n"
        "uvicorn[standard]==0.54.0 ; python_version >= '3.11'\n\nTorch == 2.13.0+cpu\n",
        name="env.txt",
    )

    assert [each.pin for each in pins] == ["numpy==2.4.6", "uvicorn==0.54.0", "Torch==2.13.0+cpu"]
    assert pins[0].hashes == {HASH, "b" * 64}
    assert pins[1].text == "uvicorn[standard]==0.54.0 ; python_version >= '3.11'"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("numpy", "one version"),
        ("numpy>=2", "one version"),
        ("numpy==2.*", "one version"),
        ("numpy~=2.4", "one version"),
        ("numpy==2.4,<3", "one version"),
        ("-e .", "options"),
        ("--index-url https://evil.example", "options"),
        ("-r other.txt", "options"),
        ("https://evil.example/x.whl", "no address"),
        ("x @ git+https://evil.example/x", "no address"),
        ("git+ssh://evil.example/x", "no address"),
        ("./x-1-py3-none-any.whl", "no address"),
        ("../x", "no address"),
        ("numpy==2.4.6 --global-option=x", "no options other than --hash"),
        ("numpy==2.4.6 --hash=md5:abc", "sha256"),
        ("numpy==$(touch x)", "one version"),
    ],
)
def test_a_line_that_is_not_locked_is_named_with_its_number(line: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_lock(f"scipy==1.17.0\n{line}\n", name="my env.txt")

    (fault,) = refused.value.faults
    assert fault.where == "my env.txt:2"
    assert words in str(fault.allowed)
    assert "lock the file again" in str(fault.fix)


def test_all_faults_of_a_lock_are_collected() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_lock("a\nb==1\n-e .\nB==2\n", name="env.txt")

    assert [each.where for each in refused.value.faults] == ["env.txt:1", "env.txt:3", "env.txt: B"]


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_an_empty_lock_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a locked requirements file"):
        parse_lock(text, name="env.txt")


def test_the_constraints_of_the_project_are_a_lock() -> None:
    pins = constraints()

    assert {"torch", "numpy", "pydantic"} <= {each.name for each in pins}


@pytest.mark.parametrize("kind", RECIPES)
def test_all_that_the_packages_of_an_image_need_is_locked(kind: Any) -> None:
    wanted = [Requirement(each) for each in RECIPES[kind].requirements(bare=False)]

    needed = installed_dependencies(wanted)

    known = locked_versions([])
    assert sorted(needed - known.keys() - {"falaj"}) == []


def installed_dependencies(wanted: list[Requirement]) -> set[str]:
    """Return all packages that `wanted` need, by what the installed ones declare.

    Without those that torch pins itself: they are the libraries of its CUDA build, which other builds do not have.
    """
    found, seen = set[str](), set[str]()
    while wanted:
        each = wanted.pop()
        found.add(normalized(each.name))
        if str(each) not in seen:
            seen.add(str(each))
            declared = [Requirement(line) for line in metadata.requires(each.name) or ()]
            extras = each.extras or {""}
            wanted += [
                one
                for one in declared
                if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
                if each.name != "torch" or not str(one.specifier).startswith("==")
            ]
    return found


def test_a_given_lock_counts_more_than_the_projects_own() -> None:
    known = locked_versions([Pin("NumPy", "1.26.4", "NumPy==1.26.4")])

    assert known["numpy"] == "1.26.4"
    assert "torch" in known


def test_a_package_that_no_lock_has_is_named() -> None:
    pins = [Pin("left-pad", "1.0", "left-pad==1.0", frozenset([HASH]))]

    with pytest.raises(InvalidInput, match="not all locked") as refused:
        require_locked(pins, {"numpy": "2.4.6"}, [], name="env.txt")

    assert "add left-pad==1.0 to env.txt" in str(refused.value)


def test_a_wheel_with_another_hash_than_the_lock_has_is_refused() -> None:
    pins = [Pin("demo", "1.0", "demo==1.0", frozenset(["c" * 64]))]
    added = [Pin("Demo", "1.0", "Demo==1.0", frozenset([HASH]))]

    with pytest.raises(InvalidInput, match="one of the 1 hashes"):
        require_locked(pins, {"demo": "1.0"}, added, name="env.txt")


# ----------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    "given", [f"localhost/falaj-worker@{DIGEST}", f"r.example.com:5000/a/b_c/d-e:1.0@{DIGEST}"]
)
def test_an_image_by_its_digest_is_pinned(given: str) -> None:
    assert TypeAdapter(PinnedImage).validate_python(given) == given


@pytest.mark.parametrize(
    "given",
    [
        *("falaj-worker:1", "team/worker:1", "registry.example.com/worker", "registry.example.com/worker:"),
        *(
            "localhost/Worker:1",
            "localhost/w:1 --privileged",
            "--tag/x:1",
            "localhost/w:$(id)",
            "localhost/w:1\n",
        ),
        *("localhost/../w:1", f"localhost/w@{DIGEST}", "localhost/w:" + "1" * 200, ""),
    ],
)
def test_a_tag_without_a_host_or_with_other_characters_is_refused(given: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(TaggedImage).validate_python(given)


@pytest.mark.parametrize("given", ["python", "python:latest", "--help", "a b:1", "python:3.11;id", "scratch"])
def test_a_base_without_a_version_is_refused(given: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(BaseImage).validate_python(given)


@pytest.mark.parametrize(
    "given", ["python:3.11-slim", f"python@{DIGEST}", f"r.example.com/python:3.11@{DIGEST}"]
)
def test_a_base_has_a_version_or_a_digest(given: str) -> None:
    assert TypeAdapter(BaseImage).validate_python(given) == given


# ------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tag": "worker:1"}, "HOST/NAME:TAG"),
        ({"tag": "localhost/w:1;reboot"}, "HOST/NAME:TAG"),
        ({"base": "python"}, "a tag other than latest"),
        ({"mirror": "'; reboot"}, "an address like"),
        ({"kind": "server", "bare": True}, "for the image worker"),
        ({"kind": "nothing"}, "platform, worker, server"),
        ({"environment": Path("/no/such file.txt")}, "a requirements file"),
        ({"output": Path("/no/such/folder/x.tar")}, "a folder that can be written to"),
        ({"output": Path("x.tar"), "push": True}, "without --output"),
        ({"builder": "kaniko", "output": Path("x.tar")}, "auto, podman, buildah, docker, none"),
        ({"builder": "none"}, "that is where the image goes"),
        ({"builder": "none", "output": Path("x.tar"), "base": "python:3.11-slim"}, "no image can be pulled"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_made(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidInput) as refused:
        build_image(ImageRequest(**({"kind": "worker"} | options)), print)

    assert words in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_with_a_space_in_its_name_gives_a_plain_tag(tmp_path: Path) -> None:
    lock = tmp_path / "My Env (2).txt"
    lock.write_text("demo==1.0\n")
    request = ImageRequest("worker", environment=lock)

    check_request(request)

    assert request.reference == f"localhost/falaj-worker:{VERSION}-my-env-2"


def test_an_archive_that_exists_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_text("precious")

    with pytest.raises(AlreadyExists, match=r"x\.tar exists"):
        build_image(ImageRequest("worker", output=tmp_path / "x.tar"), print)

    assert (tmp_path / "x.tar").read_text() == "precious"


def test_a_full_disk_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "write_context", full)

    with pytest.raises(Unavailable, match="is full"):
        build_image(ImageRequest("worker", builder="none", output=tmp_path / "x.tar"), print)

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_deleted_by_the_next_and_what_another_uses_is_not(tmp_path: Path) -> None:
    (tmp_path / ".falaj-image-x" / "context").mkdir(parents=True)
    (tmp_path / ".falaj-image-link").symlink_to(tmp_path)
    killed = subprocess.Popen(
        [sys.executable, "-c", BUILDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())

    with build_folder(tmp_path) as folder:
        assert (left.exists(), folder.exists()) == (True, True)
        killed.kill()
        killed.communicate()
        with build_folder(tmp_path):
            assert (left.exists(), folder.exists()) == (False, True)

    assert [each.name for each in tmp_path.iterdir()] == [".falaj-image-link"]


BUILDS = """
import sys
from pathlib import Path
from falaj.assembly.images.build import build_folder
with build_folder(Path(sys.argv[1])) as folder:
    (folder / "wheels").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_program_that_finds_the_disk_full_is_understood() -> None:
    with pytest.raises(OSError, match="No space left"):
        run_program(["python3", "-c", "import sys; sys.exit('pip: No space left on device')"], print)


# ------------------------------------------------------------------------------------------------- builders


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The builders that this machine seems to have; docker answers if it is there."""
    found = set[str]()
    monkeypatch.setattr(builders, "is_there", lambda name: name in found)
    return found


def test_the_first_builder_that_is_there_is_taken(programs: set[str]) -> None:
    programs |= {"docker", "buildah"}

    assert choose_builder("auto", is_file=False) == ContainerBuilder("buildah")
    assert choose_builder("docker", is_file=False) == ContainerBuilder("docker")


def test_without_a_builder_a_file_can_be_written(programs: set[str]) -> None:
    assert choose_builder("auto", is_file=True) is None


@pytest.mark.parametrize(
    ("wanted", "words"), [("auto", "--output FILE.tar"), ("podman", "apt install podman")]
)
def test_a_missing_builder_is_named_with_how_to_get_one(programs: set[str], wanted: str, words: str) -> None:
    with pytest.raises(Unavailable, match=re.escape(words)):
        choose_builder(wanted, is_file=False)


def test_a_docker_without_its_daemon_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert not builders.is_there("docker")


def test_a_base_that_cannot_be_pulled_is_told_from_other_faults() -> None:
    lines = [
        "STEP 1/2",
        "Error: initializing source docker://x: pinging container registry: dial tcp: no such host",
    ]

    fault = ContainerBuilder("podman")._build_fault(Finished(125, lines), "r.example.com/python:3.11")

    assert "cannot get the base r.example.com/python:3.11" in fault.message
    assert "--base debian" in fault.message


# ------------------------------------------------------------------------------------------------- archives


def test_an_archive_is_read_by_every_runtime_and_the_same_files_make_the_same_digest(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin/run").write_text("x")
    (root / "bin/run").chmod(0o700)
    (root / "secret").write_text("y")
    (root / "secret").chmod(0o600)
    (root / "link").symlink_to("/bin/run")
    digests = []
    for name in ("a.tar", "b.tar"):
        os.utime(root / "secret", (len(digests) * 1000, 5))
        write_layer(tmp_path / "layer", root, shared=("tmp",))
        made = write_image(tmp_path / name, [tmp_path / "layer"], {"User": "65532:65532"}, "localhost/w:1")
        digests.append(made.digest)

    config, names = read_image(tmp_path / "a.tar")

    assert digests[0] == digests[1]
    assert names == ["localhost/w:1", f"localhost/w@{digests[0]}"]
    assert config["config"]["User"] == "65532:65532"
    with tarfile.open(tmp_path / "a.tar") as archive:
        manifest = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        index = json.load(archive.extractfile("index.json"))  # type: ignore[arg-type]
        assert manifest[0]["RepoTags"] == ["localhost/w:1"]
        assert set(manifest[0]["Layers"]) <= set(archive.getnames())
    assert index["manifests"][0]["annotations"][NAME_ANNOTATION] == "localhost/w:1"
    modes = {
        member.name: (oct(member.mode), member.uid, member.mtime)
        for _, member in layer_files(tmp_path / "a.tar")
    }
    assert modes["tmp"] == ("0o1777", 0, 0)
    assert modes["bin/run"] == ("0o755", 0, 0)
    assert modes["secret"] == ("0o644", 0, 0)


def test_the_archive_of_a_builder_gets_the_names_and_keeps_its_digest(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    write_layer(tmp_path / "layer", tmp_path / "root")
    first = write_image(tmp_path / "a.tar", [tmp_path / "layer"], {}, "localhost/other:1")

    second = rename_image(tmp_path / "a.tar", tmp_path / "b.tar", "localhost/w:2")

    assert second == first
    assert read_image(tmp_path / "b.tar")[1] == ["localhost/w:2", f"localhost/w@{first.digest}"]
    with tarfile.open(tmp_path / "b.tar") as archive:
        assert len(archive.getnames()) == len(set(archive.getnames()))


def test_an_archive_without_an_oci_layout_is_refused_with_the_fix(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass

    with pytest.raises(Unavailable, match="before version 25"):
        rename_image(tmp_path / "a.tar", tmp_path / "b.tar", "localhost/w:2")


def test_falaj_is_packed_as_it_is_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    first, second = pack_falaj(tmp_path / "a"), pack_falaj(tmp_path / "b")

    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = set(wheel.namelist())
        assert {"falaj/__init__.py", "falaj/constraints.txt", "falaj/assembly/images/Dockerfile"} <= names
        assert b"falaj.apps.cli:main" in wheel.read(f"falaj-{VERSION}.dist-info/entry_points.txt")
        assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"#!/x/bin/python3\nimport a\n", b"#!/opt/falaj/bin/python3\nimport a\n"),
        (
            b"#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\nimport a\n",
            b"#!/opt/falaj/bin/python3\nimport a\n",
        ),
        (b"#!/bin/sh\necho\n", b"#!/bin/sh\necho\n"),
        (b"\x7fELF", b"\x7fELF"),
    ],
)
def test_programs_of_a_virtualenv_get_the_interpreter_of_the_image(given: bytes, expected: bytes) -> None:
    assert with_interpreter(given) == expected


# --------------------------------------------------------------------------------------------------- records


def test_builds_are_stored_and_found_again_the_newest_first(tmp_path: Path) -> None:
    made = ImageBuild(
        reference="localhost/falaj-worker:1",
        digest=DIGEST,
        kind="worker",
        version="1",
        python="3.11",
        base="debian bookworm",
        packages=("numpy==2.4.6",),
        size_bytes=5,
        builder="none",
        built_at=utc_now(),
        took_s=1.0,
    )
    later = made.model_copy(update={"digest": f"sha256:{'b' * 64}", "built_at": utc_now()})

    record_build(tmp_path, made)
    record_build(tmp_path, later)
    (tmp_path / "images" / "damaged.json").write_text("{")

    assert recorded_builds(tmp_path) == [later, made]
    assert made.pinned == f"localhost/falaj-worker@{DIGEST}"


# ------------------------------------------------------------------------------------- a build, without network


@pytest.mark.slow
def test_an_environment_that_lacks_a_dependency_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_index(tmp_path / "index", monkeypatch, demo="other", other="")
    lock = tmp_path / "env.txt"
    lock.write_text("demo==1.0\n")

    with pytest.raises(InvalidInput, match=r"add other==1.0 to env.txt"):
        build_image(
            ImageRequest("worker", bare=True, environment=lock, builder="none", output=tmp_path / "x.tar"),
            print,
        )

    assert not (tmp_path / "x.tar").exists()


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_said_with_pips_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_index(tmp_path / "index", monkeypatch)

    with pytest.raises(
        Unavailable, match=r"cannot get the packages of the image: .*(numpy|cryptography)"
    ) as refused:
        build_image(ImageRequest("worker", builder="none", output=tmp_path / "x.tar"), print)

    assert "PIP_INDEX_URL" in str(refused.value)


@pytest.mark.slow
def test_without_a_builder_falaj_writes_the_image_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_index(tmp_path / "index", monkeypatch, demo="")
    lock = tmp_path / "my env.txt"
    wheel = hashlib.sha256((tmp_path / "index/demo-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock.write_text(f"demo==1.0 --hash=sha256:{wheel}\n")

    def small_base(target: Path, **_options: Any) -> tuple[str, ...]:
        (tmp_path / "rootfs/usr/bin").mkdir(parents=True)
        (tmp_path / "rootfs/usr/bin/python3").write_text("")
        write_layer(target, tmp_path / "rootfs")
        return ("python3=3.11",)

    target = tmp_path / "a folder" / "x.tar"
    target.parent.mkdir()
    lines = list[str]()

    made = build_image(
        ImageRequest("worker", bare=True, environment=lock, builder="none", output=target),
        lines.append,
        make_base=small_base,
    )

    files = {member.name: member for _, member in layer_files(target)}
    site = "opt/falaj/lib/python" + made.python + "/site-packages"
    assert made.packages == ("demo==1.0", f"falaj=={VERSION}")
    assert made.archive == str(target)
    assert {f"{site}/demo.py", f"{site}/falaj/__init__.py", "etc/passwd"} <= set(files)
    assert any(name.startswith(f"{site}/falaj/__pycache__/") for name in files)
    assert files["opt/falaj/bin/python3"].linkname == "/usr/bin/python3"
    assert not [name for name in files if re.search(r"/bin/(sh|gcc|cc|pip)[^/]*$", name)]
    assert str(tmp_path) not in json.dumps(read_image(target)[0])
    assert [path.name for path in target.parent.iterdir()] == ["x.tar"]
    assert "writing the image" in lines


@pytest.mark.on_request("FALAJ_TEST_IMAGES")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["podman", "buildah"])
def test_a_builder_makes_the_image_from_debian_packages(name: Any, tmp_path: Path) -> None:
    if not builders.is_there(name) or shutil.which("mmdebstrap") is None:
        pytest.skip(f"needs {name} and mmdebstrap")
    target = tmp_path / "x.tar"

    made = build_image(ImageRequest("worker", bare=True, builder=name, output=target), print)

    config, names = read_image(target)
    assert names[1] == made.pinned
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Labels"]["dev.falaj.kind"] == "worker"
    files = {member.name for _, member in layer_files(target)}
    assert "usr/bin/python3" in files
    assert not [each for each in files if re.search(r"bin/(sh|bash|gcc|cc|apt|pip\d*)$", each)]
    assert made.size_bytes < 100e6
