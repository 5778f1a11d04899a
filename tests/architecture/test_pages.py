"""Pages and examples name what exists: files of the repository, and public names of `falaj`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRIVATE = re.compile(r"^.*\b(?:import|from) falaj\..*$", re.MULTILINE)

FOR_CONTRIBUTORS = {
    "add-a-driver.md",
    "add-an-operation.md",
    "add-an-aggregation.md",
    "add-a-console-page.md",
}
"""Pages about the code itself: they import what is private."""

FOLDERS = ("src", "tests", "docs", "scripts", "benchmarks", "examples")
PACKAGES = tuple(path.name for path in (ROOT / "src" / "falaj").iterdir() if path.is_dir())
STATUS = re.compile(r"^Status: (accepted.*?|replaced by .*?)\n\n", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`([^`\s]+)`")
EVENTS = {"falaj.monitoring.alert"}
"""Events that begin like a module."""
PLACEHOLDER = re.compile(r"<\w+>|[A-Z]{3,}|…")
"""A part of a path that stands for any name: `commands/<group>.py`, `test_PAGE.py`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    written = {Path(name).name for name in re.findall(r"^```.*\bfile=(\S+)", text, re.MULTILINE)}

    named = {name for name in QUOTED.findall(BLOCK.sub("", text)) if is_path(name)}

    assert sorted(name for name in named if Path(name).name not in written and not exists(name)) == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("control/jobs/reconciler.py", True),
        ("control/jobs/keeper.py", False),
        ("governance/isolation.decide", True),
        ("governance/isolation.resolve", False),
        ("src/falaj/apps/cli/commands/<group>.py", True),
        ("src/falaj/ports/", True),
        ("src/falaj/<service>/service.py", True),
        ("governance/isolation", True),
        ("falaj.scheduling.decision", True),
        ("falaj.scheduling.eviction", False),
        ("src/falaj/spread/", False),
        ("inference/protocol.py", True),
        ("test_own_quota.py", True),
        ("test_keeper.py", False),
        ("tests/contracts/test_launcher_*.py", True),
    ],
)
def test_a_path_is_known_by_its_file(name: str, there: bool) -> None:
    assert is_path(name)
    assert exists(name) is there


def is_path(name: str) -> bool:
    """Tell whether a quoted text is a Python file, or lies in a folder of the repository or of the package."""
    if name.startswith("falaj."):
        return name.split(".")[1] in PACKAGES and name not in EVENTS
    first, slash, _rest = name.partition("/")
    return bool(slash and first in FOLDERS + PACKAGES) or name.endswith(".py")


def exists(name: str) -> bool:
    """Tell whether a file or folder of the repository ends with the path; `package/module.name` is a name in it."""
    if name.startswith("falaj."):
        name = name.removeprefix("falaj.").replace(".", "/")
    pattern = PLACEHOLDER.sub("*", name.rstrip("/"))
    below = [f"{folder}/**/{pattern}" for folder in FOLDERS]
    if any(next(ROOT.glob(path), None) for path in (pattern, *below, *(f"{path}.py" for path in below))):
        return True
    module, _, attribute = name.rpartition(".")
    return any(
        re.search(rf"^(?:def|class) {attribute}\b|^{attribute}\b", path.read_text(), re.MULTILINE)
        for path in (ROOT / "src" / "falaj").glob(f"**/{module}.py")
    )


def test_every_page_is_in_the_table_of_contents() -> None:
    docs = ROOT / "docs"
    contents = (docs / "README.md").read_text()
    parts = {page for page in docs.glob("reference/runtime/*.md") if page.name != "index.md"}
    pages = {page for page in docs.glob("**/*.md") if page.parent.name != "decisions"} - parts

    missing = [page for page in sorted(pages) if f"({page.relative_to(docs).as_posix()})" not in contents]

    assert missing == [docs / "README.md"]


def test_every_decision_has_a_status_and_is_listed_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(page for page in folder.glob("[0-9]*.md") if not page.name.startswith("0000"))

    listed = re.findall(r"^\| \[\d+\]\((.*?)\)", (folder / "README.md").read_text(), re.MULTILINE)

    assert listed == [page.name for page in pages]
    assert [page.name for page in pages if not STATUS.search(page.read_text())] == []


def test_a_decision_that_is_replaced_says_by_which() -> None:
    statuses = {
        page.name: found[1]
        for page in sorted(ROOT.glob("docs/decisions/0*.md"))
        if (found := STATUS.search(page.read_text()))
    }
    replacing = [
        (name, old)
        for name, status in statuses.items()
        for old in re.findall(r"eplaces .*?\]\((.*?)\)", status)
    ]

    assert replacing
    assert [(old, name) for name, old in replacing if name not in statuses[old]] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_public_names_only(example: Path) -> None:
    assert private_uses(example.read_text()) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in FOR_CONTRIBUTORS], ids=lambda page: page.name
)
def test_blocks_of_pages_use_public_names_only(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text())

    found = [use for kind, code in blocks if kind == "python" for use in private_uses(code)]
    found += [use for kind, code in blocks if kind == "sh" for use in PRIVATE.findall(code)]

    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import falaj.records.sizes",
        "from falaj.errors import NotFound",
        "from falaj import records",
        "import falaj as fj\nfj.records",
        "def late():\n    import falaj\n    return falaj.assembly.home",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert private_uses(code) != []


def private_uses(code: str) -> list[str]:
    """Return the names of `falaj` that the code imports or reads, and that are not public."""
    tree = ast.parse(code)
    return [name for name in _names_of(tree) if name not in falaj.__all__]


def _names_of(tree: ast.Module) -> Iterator[str]:
    """Yield what is imported of `falaj`, and the attributes of the module under the name that it is imported as."""
    called = {"falaj", "fj"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.startswith("falaj."))
                called |= {each.asname or each.name for each in names if each.name == "falaj"}
            case ast.ImportFrom(module="falaj", level=0, names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), level=0) if module.startswith("falaj."):
                yield module
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in called:
                yield attribute
            case _:
                pass
