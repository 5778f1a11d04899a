"""The command line as a whole: its commands, help, errors and exit status."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import SOURCE, CommandLine, command_line, environment, make_template
from falaj.apps.cli import app
from falaj.apps.cli.commands.reference import page
from falaj.apps.cli.generation.groups import group_commands
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.session import Session
from falaj.assembly.home import open_home
from falaj.control.services import all_operations, service_types
from falaj.errors import Conflict

ROOT = Path(__file__).parents[3]
CLI = ROOT / "src" / "falaj" / "apps" / "cli"
SUGGESTION = re.compile(r'\("(?:next|undo|then|or|watch)", f?"([a-z]+) ([a-z][a-z-]*)')
HEAVY = {"pydantic", "sqlalchemy", "rich", "cedarpy", "cryptography", "httpx", "obstore", "pyarrow"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


# ------------------------------------------------------------------------------------------- commands


def test_the_table_of_groups_names_every_group() -> None:
    assert list(app.GROUPS) == list(service_types())


def test_every_group_declares_its_presentation() -> None:
    assert all(presentation_of(group) is not None for group in app.GROUPS)


@pytest.mark.parametrize("name", sorted(name for name, op in all_operations().items() if not op.internal))
def test_every_operation_has_a_command_with_help(name: str, falaj: CommandLine) -> None:
    operation = all_operations()[name]
    verb = operation.verb.replace("_", "-")
    verb = presentation_of(operation.group).options.get(verb, verb).partition(" ")[0]

    ran = falaj.done(operation.group, verb, "--help")

    assert f"Usage: falaj {operation.group} {verb}" in ran.out
    is_declared = verb in presentation_of(operation.group).commands
    assert is_declared or operation.summary[:30] in " ".join(ran.out.split())


@pytest.mark.parametrize("name", sorted(name for name, op in all_operations().items() if op.internal))
def test_internal_operations_have_no_command(name: str, falaj: CommandLine) -> None:
    operation = all_operations()[name]
    verb = operation.verb.replace("_", "-")

    ran = falaj(operation.group, verb)

    assert (ran.status, "No such command" in ran.err) == (2, True)
    assert f"\n  {verb} " not in falaj.done(operation.group, "--help").out
    assert f"falaj {operation.group} {verb} " not in page()


def test_every_command_reads_with_json() -> None:
    commands = {
        (group, verb): made for group in app.GROUPS for verb, made in app.load_command(group).commands.items()
    }

    silent = [
        key for key, made in commands.items() if "--json" not in {o for p in made.params for o in p.opts}
    ]

    assert silent == []
    optional = sum(len(presentation_of(group).options) for group in app.GROUPS)
    assert len(commands) >= sum(not op.internal for op in all_operations().values()) - optional


@pytest.mark.parametrize("group", list(app.GROUPS))
def test_messages_help_and_examples_are_about_operations_of_the_group(group: str) -> None:
    presentation = presentation_of(group)
    operations = {op.name: op for op in all_operations().values() if op.group == group}
    parameters = {name for op in operations.values() for name in op.parameters}

    assert set(presentation.messages) <= set(operations)
    assert not any(operations[name].mode.reads for name in presentation.messages)
    assert {*presentation.help, *presentation.examples} <= parameters


@pytest.mark.parametrize("file", sorted(CLI.rglob("*.py")), ids=lambda file: file.stem)
def test_commands_that_messages_suggest_exist(file: Path) -> None:
    """A tuple ("next", "GROUP VERB …") names a command; so does a value of `lists`."""
    suggested = set(SUGGESTION.findall(file.read_text()))

    unknown = {
        (group, verb)
        for group, verb in suggested
        if group not in app.COMMANDS and (group not in app.GROUPS or verb not in group_commands(group))
    }

    assert unknown == set()


def test_lists_name_commands_that_exist() -> None:
    lists = {kind: made for group in app.GROUPS for kind, made in presentation_of(group).lists.items()}
    commands = [made if isinstance(made, str) else made("churn@3") for made in lists.values()]

    assert all(verb in group_commands(group) for group, verb, *_ in (each.split() for each in commands))
    assert lists["model_version"]("churn@3") == "models versions churn"  # type: ignore[operator]
    assert lists["model_version"]("$(x)@3") == "models list"  # type: ignore[operator]


def test_commands_of_groups_are_typed_with_dashes() -> None:
    assert "who-can" in group_commands("policies")


def test_the_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "reference" / "cli.md").read_text()

    assert written == page(), "run: falaj reference > docs/reference/cli.md"


def test_help_names_commands_and_groups(falaj: CommandLine) -> None:
    ran = falaj.done("--help")

    assert all(f"\n  {name} " in ran.out for name in [*app.COMMANDS, *app.GROUPS])
    assert "reference" not in ran.out
    assert falaj.done().out == ran.out
    assert falaj.done("-h").out == ran.out


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; from falaj.apps.cli.app import run; run(['--help']); print(*sys.modules, file=sys.stderr)"

    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=True
    )

    assert {name.partition(".")[0] for name in ran.stderr.split()} & HEAVY == set()


def test_version(falaj: CommandLine) -> None:
    assert falaj.done("--version").out == "falaj 0.1.0\n"


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("wrkspaces list", "No such command 'wrkspaces'. Did you mean 'workspaces'?"),
        ("workspaces lits", "Did you mean 'list'?"),
        ("workspaces create", "Missing argument 'NAME'"),
        ("workspaces grant risk sara", "Missing option '--role'"),
        ("workspaces list --limt 3", "No such option: --limt"),
        ("workspaces show a b", "unexpected extra argument"),
        ("workspaces show --home", "requires an argument"),
    ],
)
def test_misuse_shows_the_usage(falaj: CommandLine, typed: str, words: str) -> None:
    ran = falaj(*typed.split())

    assert ran.status == 2
    assert ran.err.startswith("error[usage] ")
    assert words in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("typed", "where", "given"),
    [
        ("workspaces create Bad!", "NAME", "Bad!"),
        ("workspaces grant risk sara --role boss", "--role", "boss"),
        ("workspaces list --limit 0", "--limit", "0"),
        ("workspaces list --limit many", "--limit", "many"),
        ("tokens issue --purpose ci --expires-in 7days", "--expires-in", "7days"),
        ("tokens issue --purpose ci --expires-in 30", "--expires-in", "30"),
        ("tokens issue --purpose ci --expires-in 900d", "--expires-in", "900d"),
        ("tokens issue --purpose ci --action nothing", "--action", "nothing"),
        ("audit list --outcome fine", "--outcome", "fine"),
        ("objects label blob:a --only uae", "--only", "uae"),
        ("blobs put falaj.toml Bad!", "NAME", "Bad!"),
        ("blobs put nowhere.bin name", "FILE", "nowhere.bin"),
        ("blobs put . name", "FILE", "."),
        ("policies check nowhere.cedar", "FILE", "nowhere.cedar"),
        ("lineage show blob:a --direction left", "--direction", "left"),
        ("audit verify nowhere.jsonl --public-key 00", "EXPORT", "nowhere.jsonl"),
        ("completion tcsh", "SHELL", "tcsh"),
        ("up --port http", "--port", "http"),
        ("login example.com --token", "url", "example.com"),
        ("--url example.com workspaces list", "url", "example.com"),
    ],
)
def test_invalid_input_is_named_as_it_was_typed(
    falaj: CommandLine, typed: str, where: str, given: str
) -> None:
    ran = falaj(*typed.split())

    assert ran.status == 2
    head, *rows = ran.err.splitlines()
    assert head.startswith("error[input.invalid] ")
    assert head.endswith(f"{where} is not valid")
    assert rows[0].split() == ["given", *given.split()]
    assert rows[1].startswith("  allowed  ")


def test_every_fault_is_named_at_once(falaj: CommandLine) -> None:
    ran = falaj("objects", "label", "Blob!", "--only", "uae", "--class", "Personal")

    assert ran.status == 2
    assert "3 values are not valid" in ran.err
    assert all(f"\n  {where}\n" in ran.err for where in ("OBJECT", "--only", "--class"))


def test_a_refusal_exits_with_1(falaj: CommandLine) -> None:
    ran = falaj("workspaces", "show", "nowhere")

    assert ran.status == 1
    assert ran.err.splitlines() == [
        "error[object.not_found] there is no workspace 'nowhere', or you may not see it",
        "  look     falaj workspaces list",
    ]


def test_an_error_escapes_terminal_control_characters(falaj: CommandLine) -> None:
    ran = falaj("workspaces", "show", "a\x1b[2Jb")

    assert "\x1b" not in ran.err
    assert "x1b" in ran.err


def test_an_interrupt_prints_no_traceback(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(session: Session) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "platform", interrupt)

    assert falaj("workspaces", "list") == (ran := falaj("workspaces", "list"))
    assert (ran.status, ran.out, ran.err) == (130, "", "")


def test_an_internal_error_shows_no_traceback_without_debug(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: Session) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Session, "platform", fail)

    ran = falaj("workspaces", "list")
    monkeypatch.setenv("FALAJ_DEBUG", "1")
    debugged = falaj("workspaces", "list")

    assert ran.status == 1
    assert ran.err.startswith("error[internal] ZeroDivisionError: by zero\n")
    assert "Traceback" not in ran.err
    assert "Traceback" in debugged.err


def test_an_internal_error_is_in_the_log_of_the_home(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("falaj.governance.identity.service.workspace_record", lambda found: 1 / 0)

    ran = falaj("workspaces", "show", "default")

    assert ran.status == 1
    assert ran.err.startswith("error[internal] workspaces.show failed")
    assert "Traceback" not in ran.err
    assert "ZeroDivisionError" in (falaj.home / "logs" / "cli.log").read_text()


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    command = f"{sys.executable} -c 'from falaj.apps.cli import main; main()' audit export - | true"

    ran = subprocess.run(["bash", "-c", command], env=environment(tmp_path), capture_output=True, text=True)

    assert (ran.returncode, ran.stderr) == (0, "")


# ------------------------------------------------------------------------------------ which platform


def test_a_missing_home_is_created_by_a_command_that_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with command_line(tmp_path, capsys) as falaj:
        first, second = (falaj.done("workspaces", "create", name) for name in ("one", "two"))

    assert first.err == f"created a new home in {tmp_path / 'home'}\n"
    assert second.err == ""


READING = [
    name.replace(".", " ").replace("_", "-")
    for name, op in all_operations().items()
    if op.mode.reads and not op.internal and all(p.default is not p.empty for p in op.parameters.values())
]
READING.remove("audit export")  # it needs a file


@pytest.mark.parametrize(
    "typed", [*READING, "whoami", "doctor", "status", "config show", "jobs top", "jobs show last"]
)
def test_a_command_that_reads_creates_no_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    with command_line(tmp_path, capsys) as falaj:
        ran = falaj(*typed.split())

    assert not (tmp_path / "home").exists()
    if typed not in ("doctor", "config show"):
        assert ran.status == 1
    if ran.status == 1 and typed not in ("doctor", "status"):
        assert ran.err.startswith(f"error[object.not_found] there is no home at {tmp_path / 'home'}")
        assert "falaj init" in ran.err


def test_wrong_input_makes_no_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with command_line(tmp_path, capsys) as falaj:
        assert falaj("workspaces", "create", "Bad!").status == 2
        assert falaj("status").status == 1
        assert falaj("config", "check").status == 0

    assert not (tmp_path / "home").exists()


def test_a_home_that_is_a_file_is_refused(falaj: CommandLine) -> None:
    (falaj.folder / "file").write_text("")

    ran = falaj("--home", "file", "zones", "list")

    assert ran.status == 2
    assert "home is not valid" in ran.err


def test_global_options_may_be_anywhere(falaj: CommandLine) -> None:
    falaj.done("workspaces", "create", "risk", "--home", "other")

    before = falaj.done("--home", "other", "--json", "workspaces", "show", "risk").json
    behind = falaj.done("workspaces", "show", "risk", "--json", "--home", "other").json

    assert before == behind
    assert falaj("workspaces", "show", "risk").status == 1


def test_the_commands_that_are_suggested_reach_the_same_platform(falaj: CommandLine) -> None:
    ran = falaj.done("--home", "other home", "workspaces", "create", "risk")

    assert "falaj --home 'other home' workspaces grant risk USER" in ran.out


def test_a_home_and_a_url_are_two_platforms(falaj: CommandLine) -> None:
    ran = falaj("--home", "other", "workspaces", "list", "--url", "http://127.0.0.1:1")

    assert ran.status == 2
    assert "--home and --url" in ran.err


def test_a_url_is_connected_to(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = connections(monkeypatch)
    monkeypatch.setenv("FALAJ_URL", "http://platform:7480/")

    falaj("workspaces", "list")
    falaj("--url", "https://other", "workspaces", "list")
    named = falaj("--home", "home", "workspaces", "list")

    assert addresses == ["http://platform:7480", "https://other"]
    assert named.status == 0


def test_a_home_on_which_a_platform_runs_is_connected_to(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = connections(monkeypatch)
    home = open_home(falaj.home)
    home.running.write_text(f'{{"url": "http://127.0.0.1:7480", "pid": {os.getpid()}}}')

    with home.lock():
        falaj("workspaces", "list")
    left_behind = falaj("workspaces", "list")

    assert addresses == ["http://127.0.0.1:7480"]
    assert left_behind.status == 0


def test_a_home_that_another_process_has_open_is_busy(falaj: CommandLine) -> None:
    with open_home(falaj.home).lock():
        ran = falaj("workspaces", "list")

    assert ran.status == 1
    assert ran.err.startswith("error[home.busy] ")
    assert "falaj status" in ran.err


def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the addresses that are connected to, and refuse every connection."""
    addresses: list[str] = []

    def connect(url: str, token: str | None = None) -> Any:
        addresses.append(url)
        raise Conflict("not now")

    monkeypatch.setattr("falaj.sdk.remote.connect", connect)
    return addresses


# ----------------------------------------------------------------------------------------- completion


@pytest.mark.slow
def test_the_script_completes_in_bash(falaj: CommandLine, tmp_path: Path) -> None:
    script = falaj.done("completion", "bash").out
    program = tmp_path / "bin" / "falaj"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from falaj.apps.cli import main; main()' \"$@\"\n"
    )
    program.chmod(0o755)
    (tmp_path / "script").write_text(script)
    code = (
        f"source {tmp_path}/script\n"
        'complete() { COMP_WORDS=(falaj "$@"); COMP_CWORD=$#; _falaj_completion falaj; echo ${COMPREPLY[*]}; }\n'
        "complete work\ncomplete workspaces gr\ncomplete workspaces grant risk sara --role dev\n"
    )
    places = environment(tmp_path) | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
    }

    ran = subprocess.run(["bash", "-c", code], env=places, capture_output=True, text=True, check=True)

    assert ran.stdout.splitlines() == ["workspaces workflows", "grant", "developer"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_there_are_scripts_for_other_shells(falaj: CommandLine, shell: str) -> None:
    assert f"_FALAJ_COMPLETE=complete_{shell}" in falaj.done("completion", shell).out


def test_an_option_that_is_repeated_is_named_in_the_singular(falaj: CommandLine) -> None:
    shown = falaj.done("features", "plan", "--help").out

    assert "--entity" in shown
    assert "--entitie" not in shown
