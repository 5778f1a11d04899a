"""Which functions and classes of the repository a test reaches, as the source tells.

A node is a function, a method, a class without its methods, a constant of a module, or the module's other statements
(`BODY`), which run at import. An edge says that one names the other. Programs count: a string that is a module's dotted
name, or the name of a file of ours, leads to all of it. Three kinds of edges need more than that:

- A method is reached where its class is, and something reached has its name as an attribute (in a test: also as a word
  of a string). One that nothing of ours calls by name is called by a library: it is reached with its class.
- The services are handed to every platform; a test reaches those that it or its helpers take as an attribute or name
  in a string (`platform.models`, "models.promote"), and those that code which it reaches takes from `services` or
  `platform`.
- An entry of a table (a dictionary constant with names as keys) is reached where something reached has its key as a
  string: the test, a module of the table's package, or, if the key has a dot, as operations have, any module. So is a
  module that is imported by a name made at run time.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

BODY = "<body>"
PLAIN_DECORATORS = frozenset(
    {
        "property",
        "cached_property",
        "staticmethod",
        "classmethod",
        "abstractmethod",
        "contextmanager",
        "operation",
        "cache",
    }
)
"""Those after which a method is called by its name, and not otherwise."""
FOLDERS = ("src", "tests", "tests/frameworks", "tests/kubernetes", "benchmarks", "examples", "scripts")
"""Where modules are imported from; a file belongs to the last one that contains it."""
SERVICES = ("falaj.control.services", "Services")
"""The class whose fields are the services."""
WIRING = ("falaj.assembly.services", "build_services")
"""The function that makes all services, by keywords of that class."""
HOLDERS = frozenset({"services", "platform"})
"""The names under which code has the services."""
SERVICE, DRIVER = "service ", "driver "
ON_REQUEST = ("falaj.drivers.kubernetes", "falaj.drivers.pkcs11")
"""Drivers that no default chooses: assembly leads there for a test that names them in a string."""
SMALLEST_TABLE = 4
DOTTED = re.compile(r"\bfalaj(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"[\w/.-]*\b\w+\.py\b")
COMMAND = re.compile(r"\bfalaj ([a-z-]+)(?: ([a-z-]+))?")
OPERATION = re.compile(r"^([a-z]+)(?:\.\w+)?$|/([a-z]+)/")
WORD = re.compile(r"[A-Za-z_][\w-]*")

Node = tuple[str, str]
"""A module's name and a name in it."""


@dataclass
class Mentions:
    """What one node names."""

    edges: set[Node] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    """Modules that are used whole: as a value, or as a program."""
    strings: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    services: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    """Packages of which a module is chosen by name at run time."""
    table: dict[str, Mentions] = field(default_factory=dict)
    methods: dict[str, Node] = field(default_factory=dict)


@dataclass
class Module:
    """A file of ours, taken apart."""

    name: str
    path: Path
    is_package: bool
    nodes: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    imports: dict[str, Node | str] = field(default_factory=dict)
    """What a name stands for: a node of another module, or a module."""

    def read(self, source: str) -> None:
        """Take the source apart."""
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.ClassDef):
                self._read_class(statement)
            for name in _defined(statement) or (BODY,):
                self.nodes[name].append(statement)

    def _read_class(self, node: ast.ClassDef) -> None:
        """Take the methods out of a class."""
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        node.body = [item for item in node.body if item not in methods]
        for method in methods:
            self.nodes[f"{node.name}.{method.name}"].append(method)

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to the package, not to its tests."""
        return self.name.partition(".")[0] == "falaj"

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


class CodeGraph:
    """All modules of a checkout, and what each of their nodes mentions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        self._by_import: dict[str, str] = {}
        """Modules that are imported by a name without their folder, such as those beside the tests."""
        self._by_file: dict[str, list[str]] = defaultdict(list)
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                self._add(path, root / folder)
        for module in self.modules.values():
            self._read(module)
        self._mentions: dict[Node, Mentions] = {}

    def module_of(self, path: str) -> str | None:
        """Return the name of the module in a file, given relative to the root."""
        return self.paths.get(path)

    @cached_property
    def paths(self) -> dict[str, str]:
        """The names of the modules by their files."""
        return {module.path.relative_to(self.root).as_posix(): name for name, module in self.modules.items()}

    # ------------------------------------------------------------------------------------------- modules

    def _add(self, path: Path, folder: Path) -> None:
        parts = path.relative_to(folder).with_suffix("").parts
        if any(part.startswith(".") for part in parts):
            return
        is_package = parts[-1] == "__init__"
        flat = ".".join(parts[:-1] if is_package else parts)
        inside = path.relative_to(self.root).with_suffix("").as_posix().replace("/", ".")
        name = flat if folder.name == "src" else inside.removesuffix(".__init__")
        self.modules[name] = Module(name, path, is_package)
        self._by_file[path.name].append(name)
        if folder.name != "src":
            self._by_import[flat] = name

    def _read(self, module: Module) -> None:
        module.read(module.path.read_text())
        for imported in _imports(module.nodes[BODY]):
            module.imports.update(self._imported(module, imported))

    def _imported(
        self, module: Module, statement: ast.Import | ast.ImportFrom
    ) -> Iterator[tuple[str, Node | str]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname and (found := self._resolve(alias.name)):
                    yield alias.asname, found
                elif not alias.asname and (found := self._resolve(alias.name.partition(".")[0])):
                    yield alias.name.partition(".")[0], found
            return
        source = self._resolve(statement.module or "")
        for alias in statement.names:
            name = alias.asname or alias.name
            if whole := self._resolve(f"{statement.module}.{alias.name}"):
                yield name, whole
            elif source:
                yield name, (source, alias.name)

    def _resolve(self, name: str) -> str | None:
        return name if name in self.modules else self._by_import.get(name)

    # ------------------------------------------------------------------------------------------ mentions

    def mentions(self, node: Node) -> Mentions:
        """Return what a node names; nodes that do not exist name nothing."""
        if node not in self._mentions:
            self._mentions[node] = self._read_mentions(node)
        return self._mentions[node]

    def _read_mentions(self, node: Node) -> Mentions:
        module = self.modules.get(node[0])
        found = Mentions()
        if module is None:
            return found
        if node[1] not in module.nodes:
            self._follow_name(module, node[1], found)
            return found
        if node == SERVICES or node[1] == "__all__":
            return found  # they name everything
        for statement in module.nodes[node[1]]:
            table = _table(statement)
            if node == WIRING:
                self._read_wiring(module, statement, found)
            elif table is not None:
                for key, value in table:
                    self._visit(module, value, found.table.setdefault(key, Mentions()))
            else:
                self._visit(module, statement, found)
            if isinstance(statement, ast.ClassDef):
                self._find_methods(module, statement, found)
        return found

    def _find_methods(self, module: Module, statement: ast.ClassDef, found: Mentions) -> None:
        prefix = f"{statement.name}."
        for name, (method, *_) in module.nodes.items():
            if not name.startswith(prefix):
                continue
            last = name.removeprefix(prefix)
            if last.startswith("__") or _is_decorated(method) or last not in self._attributes:
                found.edges.add((module.name, name))
            else:
                found.methods[last] = (module.name, name)

    @cached_property
    def _attributes(self) -> frozenset[str]:
        """All names that are used as attributes anywhere."""
        return frozenset(
            node.attr
            for module in self.modules.values()
            for statements in module.nodes.values()
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute)
        )

    def _read_wiring(self, module: Module, statement: ast.stmt, found: Mentions) -> None:
        """Read the function that makes the services: what is not for one of them is for all."""
        call = next(
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == SERVICES[1]
        )
        assert isinstance(statement, ast.FunctionDef)
        local = {
            target.id: line.value
            for line in statement.body
            if isinstance(line, ast.Assign)
            for target in ast.walk(line.targets[0])
            if isinstance(target, ast.Name) and line.value is not call
        }
        for keyword in call.keywords:
            entry = found.table.setdefault(f"{SERVICE}{keyword.arg}", Mentions())
            waiting: list[ast.AST] = [keyword.value]
            seen: set[str] = set()
            while waiting:
                expression = waiting.pop()
                self._visit(module, expression, entry)
                names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
                waiting += [local[name] for name in names & local.keys() - seen]
                seen |= names

    def _visit(self, module: Module, tree: ast.AST, found: Mentions) -> None:
        local = {name: target for node in _imports([tree]) for name, target in self._imported(module, node)}
        attributes: set[int] = set()
        for node in _walk(tree):
            if isinstance(node, ast.Attribute):
                self._visit_attribute(module, node, local, attributes, found)
            elif isinstance(node, ast.Name) and id(node) not in attributes:
                self._follow(module, node.id, local, found)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._read_string(module, node.value, found)
            elif isinstance(node, ast.JoinedStr):
                self._read_choice(node, found)

    def _visit_attribute(
        self,
        module: Module,
        node: ast.Attribute,
        local: dict[str, Node | str],
        attributes: set[int],
        found: Mentions,
    ) -> None:
        found.attributes.add(node.attr)
        holder = node.value
        if isinstance(holder, ast.Attribute | ast.Name):
            name = holder.attr if isinstance(holder, ast.Attribute) else holder.id
            if name.strip("_") in HOLDERS or not module.is_ours:
                found.services.add(node.attr)
        chain = _chain(node)
        if not chain:
            return
        target = local.get(chain[0]) or module.imports.get(chain[0])
        if isinstance(target, str):
            rest = chain[1:]
            while rest and (inner := self._resolve(f"{target}.{rest[0]}")):
                target, rest = inner, rest[1:]
            if rest == ["__path__"]:  # its modules are looked for
                found.modules.update(name for name in self.modules if name.startswith(f"{target}."))
            elif rest:
                found.edges.add((target, rest[0]))
                attributes.update(id(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name))

    def _follow(self, module: Module, name: str, local: dict[str, Node | str], found: Mentions) -> None:
        target = local.get(name) or module.imports.get(name)
        if isinstance(target, str):
            found.modules.add(target)
        elif target:
            found.edges.add(target)
        elif name in module.nodes:
            found.edges.add((module.name, name))

    def _follow_name(self, module: Module, name: str, found: Mentions) -> None:
        """Follow a name that a module has from elsewhere: imported, or loaded lazily from a table."""
        target = module.imports.get(name)
        if isinstance(target, str):
            found.modules.add(target)
        elif target:
            found.edges.add(target)
        for statements in module.nodes.values():
            for key, value in _table(statements[0]) or ():
                if key == name:
                    self._visit(module, value, found)

    def _read_string(self, module: Module, text: str, found: Mentions) -> None:
        found.strings.add(text)
        found.strings.update(word for command in COMMAND.findall(text) for word in command if word)
        if not module.is_ours:
            found.attributes.update(word.replace("-", "_") for word in WORD.findall(text))
            found.services.update(name for groups in OPERATION.findall(text) for name in groups)
            found.services.update(command[0] for command in COMMAND.findall(text))
        if not module.is_ours and (text == "falaj" or COMMAND.search(text)):
            found.modules.add("falaj.__main__")
        for dotted in DOTTED.findall(text):
            found.modules.update(self._programs(dotted))
        for file in FILE.findall(text):
            found.modules.update(
                name
                for name in self._by_file.get(file.rpartition("/")[2], ())
                if not self.modules[name].is_ours or self.modules[name].package == module.package
            )

    def _programs(self, dotted: str) -> Iterator[str]:
        if f"{dotted}.__main__" in self.modules:
            yield f"{dotted}.__main__"
        while "." in dotted:
            if dotted in self.modules and not self.modules[dotted].is_package:
                yield dotted
                return
            dotted = dotted.rpartition(".")[0]

    def _read_choice(self, node: ast.JoinedStr, found: Mentions) -> None:
        first = node.values[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.endswith("."):
            package = first.value.rstrip(".")
            if package in self.modules:
                found.packages.add(package)

    # --------------------------------------------------------------------------------------------- reach

    def reach(self, starts: Iterable[Node]) -> set[Node]:
        """Return the nodes that a test reaches, which begins at `starts`."""
        walk = _Walk(self)
        walk.run(starts)
        return walk.reached


class _Walk:
    """One search. A table's entry waits until its key is mentioned."""

    def __init__(self, graph: CodeGraph) -> None:
        self.graph = graph
        self.reached: set[Node] = set()
        self._todo: list[Node] = []
        self._strings: dict[str, set[str]] = defaultdict(set)
        """The modules that have a string; all tests count as one without a name."""
        self._services: set[str] = set()
        self._attributes: set[str] = set()
        self._methods: dict[str, list[Node]] = defaultdict(list)
        """What waits for an attribute."""
        self._tables: list[tuple[Module, str, Mentions]] = []
        """What waits: the module, the key and what follows from it."""

    def run(self, starts: Iterable[Node]) -> None:
        self._todo.extend(starts)
        while self._todo:
            while self._todo:
                self._take(self._todo.pop())
            self._open_tables()

    def _take(self, node: Node) -> None:
        module = self.graph.modules.get(node[0])
        if node in self.reached or module is None:
            return
        self.reached.add(node)
        self._import(module)
        found = self.graph.mentions(node)
        self._absorb(module, found)
        for name, method in found.methods.items():
            (self._todo if name in self._attributes else self._methods[name]).append(method)
        self._tables += [(module, key, entry) for key, entry in found.table.items()]
        for package in found.packages:
            self._tables += [
                (module, name.rpartition(".")[2], Mentions(modules={name}))
                for name in self.graph.modules
                if name.rpartition(".")[0] == package
            ]

    def _import(self, module: Module) -> None:
        name = module.name
        while name:
            if name in self.graph.modules and (name, BODY) not in self.reached:
                self._todo.append((name, BODY))
            name = name.rpartition(".")[0]

    def _absorb(self, module: Module, found: Mentions) -> None:
        for edge in found.edges - self.reached:
            driver = next((name for name in ON_REQUEST if edge[0].startswith(name)), "")
            if driver and not module.name.startswith(driver) and module.is_ours:
                self._tables.append((module, f"{DRIVER}{driver.rpartition('.')[2]}", Mentions(edges={edge})))
            else:
                self._todo.append(edge)
        for name in found.modules:
            self._todo.extend((name, own) for own in self.graph.modules[name].nodes)
        for text in found.strings:
            self._strings[text].add(module.name if module.is_ours else "")
        self._services |= found.services
        for name in found.attributes - self._attributes:
            self._todo.extend(self._methods.pop(name, ()))
        self._attributes |= found.attributes

    def _open_tables(self) -> None:
        waiting, self._tables = self._tables, []
        for module, key, entry in waiting:
            if not self._is_mentioned(module, key):
                self._tables.append((module, key, entry))
            elif key.startswith(DRIVER):
                self._todo.extend(entry.edges)
            else:
                self._absorb(module, entry)

    def _is_mentioned(self, table: Module, key: str) -> bool:
        if key.startswith(SERVICE):
            return key.removeprefix(SERVICE) in self._services
        if key.startswith(DRIVER):
            name = key.removeprefix(DRIVER)
            return any(name in text for text, places in self._strings.items() if "" in places)
        inside = f"{table.package}."
        return any(
            not place or (place != table.name and ("." in key or place.startswith(inside)))
            for place in self._strings.get(key, ())
        )


def _defined(statement: ast.stmt) -> tuple[str, ...]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (statement.name,)
    if isinstance(statement, ast.Assign) and all(
        isinstance(target, ast.Name) for target in statement.targets
    ):
        return tuple(target.id for target in statement.targets if isinstance(target, ast.Name))
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return (statement.target.id,)
    return ()


def _table(statement: ast.stmt) -> list[tuple[str, ast.expr]] | None:
    """Return the entries of a constant that is a dictionary of names."""
    value = getattr(statement, "value", None) if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.Dict) or len(value.keys) < SMALLEST_TABLE:
        return None
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return list(zip(keys, value.values, strict=True)) if len(keys) == len(value.keys) else None


def _chain(node: ast.Attribute) -> list[str]:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return [value.id, *reversed(names)] if isinstance(value, ast.Name) else []


def _imports(trees: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    for tree in trees:
        for node in _walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node


def _is_decorated(method: ast.stmt) -> bool:
    """Whether a decorator may hand the method to others, who call it."""
    assert isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
    names = [
        ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in method.decorator_list
    ]
    return not PLAIN_DECORATORS.issuperset(names)


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, but for documentation and what only a type checker sees."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))
