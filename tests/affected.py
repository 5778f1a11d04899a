"""Which tests a change affects: `affected.py COMMIT` lists them; `pytest --affected FILE` runs only these slow ones.

Affected is a test that reaches a function, class or constant that differs since the commit (see code_graph), or that a
file affects which imports do not show (`OTHER_FILES`). Where that cannot be known (`UNSURE`), all are affected.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from pathlib import Path, PurePath

import pytest

from code_graph import BODY, CodeGraph, Module, Node

ROOT = Path(__file__).parents[1]
EVERYTHING = "everything"
MANY_FILES = 60
"""From here on the functions of a file are not looked at one by one: it would take longer than running some of them."""
SIXTH = "besides, sixth"
SIXTHS = 6
"""Of the tests that are not affected, one in this many runs besides; the commit says which."""

UNSURE = (
    *("pyproject.toml", "constraints.txt", "Makefile", ".ci/*", "scripts/setup.py"),
    *("tests/conftest.py", "tests/affected.py", "tests/code_graph.py", "tests/*/conftest.py"),
    *("src/falaj/ports/*", "src/falaj/errors.py"),
)
"""What all tests depend on."""

OTHER_FILES: Mapping[str, tuple[str, ...]] = {
    "README.md": ("tests/scenarios/test_documentation.py",),
    "docs/tutorial.md": ("tests/scenarios/test_tutorial.py",),
    "docs/howto/*": ("tests/scenarios/test_howtos.py", "tests/scenarios/test_contributor_pages.py"),
    "docs/reference/*": ("tests/scenarios/test_howtos.py",),
    "docs/*": (),
    "*.md": (),
    "src/*/service.py": ("tests/unit/api/test_openapi.py",),  # it sends to every operation
    "src/falaj/drivers/sql/migrations/*": (
        "tests/unit/governance/test_migrations.py",
        "tests/scenarios/test_old_home.py",
    ),
    "tests/data/old_home/*": ("tests/scenarios/test_old_home.py",),
    "tests/frameworks/constraints.txt": ("tests/frameworks/test_frameworks.py",),
    "benchmarks/results/*": (),
    "LICENSE": (),
    ".gitignore": (),
}
"""Test files that are affected by files, as patterns: what the source does not say. Quick tests run always."""


# ------------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """What differs since a commit: files, and nodes of the modules among them."""

    files: frozenset[str]
    nodes: frozenset[Node]


def changes_since(commit: str, graph: CodeGraph, root: Path = ROOT) -> Change:
    """Return what differs between a commit and the working tree."""
    names = git(root, "diff", "--name-only", "--no-renames", "-z", commit).split("\0")
    names += git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    files = frozenset(name for name in names if name)
    nodes = {node for name in files for node in changed_nodes(name, commit, graph, root)}
    return Change(files, frozenset(nodes))


def changed_nodes(name: str, commit: str, graph: CodeGraph, root: Path) -> Iterator[Node]:
    """Yield the nodes of a file that differ; those of all modules beside it if it is data of theirs."""
    module = graph.module_of(name)
    if module is not None:
        before = nodes_at(root, commit, name)
        for own, statements in graph.modules[module].nodes.items():
            if dumped(statements) != before.get(own, ""):
                yield module, own
    elif name.startswith("src/") and not name.endswith(".py"):
        folder = PurePath(name).parent
        while not (beside := [path for path in graph.paths if PurePath(path).parent == folder]):
            folder = folder.parent
        for path in beside:
            found = graph.modules[graph.paths[path]]
            yield from ((found.name, own) for own in found.nodes)


def nodes_at(root: Path, commit: str, name: str) -> dict[str, str]:
    shown = subprocess.run(
        ["git", "show", f"{commit}:{name}"], cwd=root, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        return {}
    module = Module("", Path(), is_package=False)
    module.read(shown.stdout)
    return {own: dumped(statements) for own, statements in module.nodes.items()}


def dumped(statements: Iterable[ast.stmt]) -> str:
    return "\n".join(ast.dump(statement) for statement in statements)


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


# --------------------------------------------------------------------------------------------- selection


class Selection:
    """The tests that a change affects."""

    def __init__(self, graph: CodeGraph, change: Change) -> None:
        self.graph = graph
        self.change = change

    @cached_property
    def unsure(self) -> list[str]:
        """The changed files that may affect anything."""
        return sorted(
            name
            for name in self.change.files
            if matches(name, UNSURE)
            or not (name.startswith("src/") or name.endswith(".py") or matches(name, OTHER_FILES))
        )

    @cached_property
    def files(self) -> frozenset[str]:
        """Test files of which all tests are affected."""
        named = {
            test
            for name in self.change.files
            for pattern, tests in OTHER_FILES.items()
            if matches(name, (pattern,))
            for test in tests
        }
        return frozenset(
            named | {name for name in self.change.files if PurePath(name).name.startswith("test_")}
        )

    def affects(self, file: str, *functions: str) -> bool:
        """Tell whether the change affects one of these tests in a file."""
        if self.unsure or file in self.files:
            return True
        module = self.graph.module_of(file)
        if module is None:
            return True
        begin = {node for function in functions for node in starts(self.graph, module, function)}
        return not self.change.nodes.isdisjoint(self.graph.reach(begin))

    def affected(self, tests: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
        """Return the affected ones of these functions of files; all of a file, if many files are affected."""
        files = [file for file, functions in tests.items() if self.affects(file, *functions)]
        return [
            (file, function)
            for file in files
            for function in tests[file]
            if len(files) > MANY_FILES or self.affects(file, function)
        ]


def starts(graph: CodeGraph, module: str, function: str) -> set[Node]:
    """Return a test and the fixtures that pytest makes for it."""
    modules = [module, *conftests(graph, module)]
    found: set[Node] = {(module, function), (module, BODY)}
    for name in modules[:-1]:  # a change of the last, which is for all tests, affects all anyway
        found |= {
            (name, own) for own, (first, *_) in graph.modules[name].nodes.items() if is_automatic(first)
        }
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        for name in requested(graph, node):
            fixture = next(
                (
                    (home, name)
                    for home in modules
                    if name in graph.modules[home].nodes | graph.modules[home].imports
                ),
                None,
            )
            if fixture is not None and fixture not in found:
                found.add(fixture)
                waiting.append(fixture)
    return found


def conftests(graph: CodeGraph, module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        if f"{module}.conftest" in graph.modules:
            yield f"{module}.conftest"


def requested(graph: CodeGraph, node: Node) -> set[str]:
    """Return the names that a test or fixture may ask pytest for: its parameters and its strings."""
    statements = graph.modules[node[0]].nodes.get(node[1], ())
    parameters = {
        argument.arg
        for statement in statements
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*statement.args.args, *statement.args.kwonlyargs)
    }
    return parameters | graph.mentions(node).strings


def is_automatic(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and any(
        "autouse=True" in ast.unparse(decorator) for decorator in statement.decorator_list
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------- command line


def test_functions(graph: CodeGraph, folders: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the test functions of every file below `folders`, also those of classes."""
    return {
        path: [name for name in graph.modules[module].nodes if name.rpartition(".")[2].startswith("test_")]
        for path, module in sorted(graph.paths.items())
        if PurePath(path).name.startswith("test_") and path.startswith(tuple(folders))
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="what is compared with the working tree")
    parser.add_argument("folders", nargs="*", default=["tests/"], help="where tests are looked for")
    arguments = parser.parse_args(words)
    graph = CodeGraph(ROOT)
    selection = Selection(graph, changes_since(arguments.commit, graph))
    sixth = int(git(ROOT, "rev-parse", "HEAD")[:8], 16) % SIXTHS
    print(f"{SIXTH} {sixth}")
    if selection.unsure:
        print(EVERYTHING)
        print(f"all tests: {', '.join(selection.unsure)} may affect any", file=sys.stderr)
        return 0
    tests = test_functions(graph, arguments.folders)
    affected = selection.affected(tests)
    print(*(f"{file}::{function}" for file, function in affected), sep="\n")
    total = sum(map(len, tests.values()))
    print(f"{len(affected)} of {total} test functions are affected", file=sys.stderr)
    return 0


# ------------------------------------------------------------------------------------------- pytest plug-in


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--affected",
        type=Path,
        help="of the slow tests, run those that this file lists, and one in six others",
    )


@pytest.hookimpl(trylast=True)  # after tests were marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file: Path | None = config.getoption("--affected")
    if file is None:
        return
    first, *listed = file.read_text().splitlines()
    chosen, sixth = frozenset(listed), int(first.removeprefix(SIXTH))
    if EVERYTHING in chosen:
        return
    left_out = {
        item
        for item in items
        if item.get_closest_marker("slow")
        and (name := test_name(item)) not in chosen
        and sixth_of(name) != sixth
    }
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def test_name(item: pytest.Item) -> str:
    """Return the file and function of a test, without its parameters."""
    file, _, rest = item.nodeid.partition("::")
    return f"{file}::{rest.partition('[')[0].replace('::', '.')}"


def sixth_of(name: str) -> int:
    return int(sha256(name.encode()).hexdigest()[:8], 16) % SIXTHS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
