"""Write requirements.lock, which has the hashes of what constraints.txt pins, or print the part of it for an extra.

    lock.py renew          asks the indexes that pip is configured with; in a virtualenv with the extra dev
    lock.py select demo    for pip install --no-deps --require-hashes -r; standard library only

torch is left out: its builds for CPUs and for CUDA are different files, and the latter needs packages of its own.
So are the files of folders and local indexes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("any", "manylinux", "macosx")
MACHINES = ("any", "x86_64", "aarch64", "arm64", "universal2")
UNLOCKED = {"falaj", "torch"}
HEADER = "# Written by scripts/lock.py from constraints.txt: who needs each package, and its files.\n"
STANZA = re.compile(r"^# for (?P<groups>[^\n]*)\n(?P<requirement>(?:.*\\\n)*.*\n)", re.MULTILINE)


def main() -> int:
    match sys.argv[1:]:
        case ["renew"]:
            LOCK.write_text(renewed())
        case ["select", extra]:
            print(select(extra), end="")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def select(extra: str) -> str:
    """Return the locked requirements of an extra, or of the dependencies alone if it is empty."""
    stanzas = list(STANZA.finditer(LOCK.read_text()))
    return "".join(each["requirement"] for each in stanzas if (extra or "base") in each["groups"].split())


def renewed() -> str:
    """Return the text of the lock."""
    pins = pinned_versions()
    groups = {group: needed_on(group) for group in extras()}
    stanzas, faults = [HEADER], []
    for name, hashes in found_hashes(pins):
        owners = [group for group, needed in groups.items() if name in needed]
        pythons = sorted({python for group in owners for python in groups[group][name]}, key=PYTHONS.index)
        if not hashes or not owners:
            faults.append(f"{name}=={pins[name]}: {'no file has a hash' if owners else 'nothing needs it'}")
            continue
        marker = "" if len(pythons) == len(PYTHONS) else f' ; python_version in "{" ".join(pythons)}"'
        lines = [f"{name}=={pins[name]}{marker}", *(f"    --hash=sha256:{each}" for each in sorted(hashes))]
        stanzas.append(f"# for {' '.join(owners)}\n" + " \\\n".join(lines) + "\n")
    if faults:
        raise SystemExit("constraints.txt cannot be locked:\n" + "\n".join(faults))
    return "".join(stanzas)


def pinned_versions() -> dict[str, str]:
    """Return the versions of constraints.txt, except those that are not locked by hashes."""
    from bill_of_materials import locked_versions

    return {name: version for name, version in locked_versions().items() if name not in UNLOCKED}


def extras() -> list[str]:
    """Return the groups of requirements that a set-up installs: the dependencies, and collections of extras."""
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return ["base", *sorted({"demo", "dev"} & declared.keys())]


def needed_on(group: str) -> dict[str, set[str]]:
    """Return the packages of a group, and the Pythons that need them."""
    from bill_of_materials import dependency_graph

    root, found = "falaj" if group == "base" else f"falaj[{group}]", dict[str, set[str]]()
    for python in PYTHONS:
        for patch in ("0", "9"):  # some packages are for the first patch releases alone
            machine = {"python_version": python, "python_full_version": f"{python}.{patch}"}
            for name in dependency_graph(root, environment=machine):
                found.setdefault(name, set()).add(python)
    return found


def found_hashes(pins: dict[str, str]) -> Iterator[tuple[str, set[str]]]:
    """Yield the hashes of the files of each package, as the indexes that pip is configured with publish them."""
    from pip._internal.commands import create_command
    from pip._internal.index.collector import LinkCollector, parse_links

    command: Any = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        collector = LinkCollector.create(command._build_session(options), options=options)
        for name, version in sorted(pins.items()):
            sources = collector.collect_sources(name, lambda _: None).index_urls
            places = [each.link for each in sources if each is not None and each.link is not None]
            pages = [collector.fetch_response(link) for link in places if link.scheme == "https"]
            files = [link for page in pages if page is not None for link in parse_links(page)]
            yield name, {str(each.hash) for each in files if each.hash and is_wanted(each.filename, version)}


def is_wanted(file: str, version: str) -> bool:
    """Tell whether a file is a source or a wheel of this version that a supported machine can install."""
    from packaging.utils import (
        InvalidSdistFilename,
        InvalidWheelFilename,
        parse_sdist_filename,
        parse_wheel_filename,
    )
    from packaging.version import Version

    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == Version(version)
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    return found == Version(version) and any(runs_on(tag.interpreter, tag.abi, tag.platform) for tag in tags)


def runs_on(interpreter: str, abi: str, platform: str) -> bool:
    minor = re.fullmatch(r"(?:cp|py)3(\d*)", interpreter)
    if minor is None or not (platform.startswith(PLATFORMS) and platform.endswith(MACHINES)):
        return False
    known = [int(python.partition(".")[2]) for python in PYTHONS]
    exact = interpreter.startswith("cp") and abi != "abi3"
    return not minor[1] or (
        int(minor[1]) in known and not abi.endswith("t") if exact else int(minor[1]) <= max(known)
    )


if __name__ == "__main__":
    sys.exit(main())
