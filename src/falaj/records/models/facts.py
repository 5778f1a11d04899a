"""Facts of how a model version was made: its packages, its hardware, its licence."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from falaj.records.names import ObjectId, TextRule
from falaj.records.record import Record

LICENCE_RULE = "an SPDX licence expression, like Apache-2.0, MIT OR GPL-2.0-only, or LicenseRef-Proprietary"

Sha256 = Annotated[str, TextRule("[0-9a-f]{64}", "a SHA-256 is 64 of 0-9 and a-f", limit=64)]
CommitHash = Annotated[
    str, TextRule("[0-9a-f]{40}|[0-9a-f]{64}", "a commit is its full hash: 40 or 64 of 0-9 and a-f", limit=64)
]
EntryPoint = Annotated[
    str,
    TextRule(
        r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*",
        "an entry point is a module and what it defines, like nets.churn:ChurnNet",
        limit=300,
    ),
]
OneLine = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f\u2028\u2029]*$")]
PackageName = Annotated[
    str,
    TextRule(
        r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?",
        "a package is A-Z, a-z, 0-9, '.', '_' and '-', like scikit-learn",
        limit=200,
    ),
]
PackageVersion = Annotated[
    str,
    TextRule(
        r"[A-Za-z0-9][A-Za-z0-9.!+_-]*", "a version is A-Z, a-z, 0-9, '.', '!', '+', '_', '-'", limit=200
    ),
]


def _spdx(text: str) -> str:
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        raise ValueError(f"a licence is {LICENCE_RULE}") from None


Licence = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_spdx)]


class PackagePin(Record):
    """A Python package that a version was made with.

    `sha256` is the hash of its archive, as locks have it; `files_sha256` that of its installed files, as
    `environment.txt` of a job has it.
    """

    name: PackageName
    version: PackageVersion
    sha256: Sha256 | None = None
    files_sha256: Sha256 | None = None

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


class CodeReference(Record):
    """The code that defines the network whose weights a version has: named and pinned, and never run by the platform.

    `entry` is the class or function that makes the network, like nets.churn:ChurnNet. The source is in one of four
    places: in `file`, a file of the version; in `package`, one of the version's packages; at `commit` of `repository`;
    or in an uploaded archive, such as the code of the job, whose `archive` is the id of the blob. `sha256` is that of
    the source file or of the archive; for files and archives the platform finds it out.
    """

    entry: EntryPoint
    file: OneLine | None = None
    package: PackageName | None = None
    repository: OneLine | None = None
    commit: CommitHash | None = None
    archive: ObjectId | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _in_one_place(self) -> Self:
        if (self.repository is None) != (self.commit is None):
            raise ValueError("a repository is named together with a commit of it")
        if sum(each is not None for each in (self.file, self.package, self.commit, self.archive)) > 1:
            raise ValueError(
                "code is in a file of the version, a package, a commit or an archive: in one of them"
            )
        return self

    @property
    def definition(self) -> str:
        """The name that the source defines: the part behind the colon, up to a dot."""
        return self.entry.partition(":")[2].partition(".")[0]

    def describe(self) -> str:
        """Return it in one line."""
        places = {
            "file": self.file,
            "package": self.package,
            "archive": self.archive,
            "commit": None if self.commit is None else f"{self.commit} of {self.repository}",
        }
        where = next((f" in {kind} {place}" for kind, place in places.items() if place), "")
        return f"{self.entry}{where}{f', sha256 {self.sha256}' if self.sha256 else ''}"


class TrainingHardware(Record):
    """The machine that a version was trained on, as far as it is known: what the job had on each of its nodes."""

    machine: OneLine = ""
    system: OneLine = ""
    cpu_model: OneLine = ""
    cpus: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=2**60)] | None = None
    gpus: Annotated[tuple[OneLine, ...], Field(max_length=1024)] = ()
    driver: OneLine = ""
    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1

    def describe(self) -> str:
        """Return it in one line."""
        cpus = "" if self.cpus is None else f"{self.cpus} CPU{'s' * (self.cpus != 1)}"
        gpus = [f"{self.gpus.count(each)} × {each}" for each in dict.fromkeys(self.gpus)]
        parts = [self.machine, cpus, self.cpu_model, *gpus, self.driver, self.system]
        if self.nodes > 1:
            parts.insert(0, f"{self.nodes} nodes")
        return ", ".join(part for part in parts if part)


Packages = Annotated[tuple[PackagePin, ...], Field(max_length=5000)]
