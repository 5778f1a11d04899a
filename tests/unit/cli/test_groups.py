"""The commands of the groups, on a real home: effects, output and confirmation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.commands import blobs
from falaj.apps.cli.commands.lineage import draw_lineage
from falaj.apps.cli.output import tables
from falaj.apps.cli.output.values import encodable, format_value, printable
from falaj.control.workflows import service as workflows_service
from falaj.errors import Interrupted
from falaj.governance.blobs.service import Blobs
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.lineage import LineageNode
from falaj.records.names import ObjectId
from falaj.records.sizes import format_size

FORBID = '@id("no-personal")\nforbid (principal, action == Action::"blobs.read", resource)\n'
FORBID += 'when { resource.classes.contains("personal") };\n'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.fixture
def data(falaj: CommandLine) -> Path:
    path = falaj.folder / "data.bin"
    path.write_bytes(bytes(range(256)) * 5000)
    return path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---------------------------------------------------------------------------------- generated commands


def test_a_write_prints_its_result_and_the_undo_command(falaj: CommandLine) -> None:
    falaj.done("workspaces", "create", "risk")
    falaj.done("users", "create", "sara")

    ran = falaj.done("workspaces", "grant", "risk", "sara", "--role", "developer")

    assert ran.out == (
        "sara is developer in risk\n  undo   falaj workspaces revoke risk sara --role developer\n"
    )
    undone = falaj.done(*ran.out.split("falaj ")[1].split())
    assert undone.out.startswith("sara is no longer developer in risk\n")


def test_json_is_the_record(falaj: CommandLine) -> None:
    made = falaj.json("workspaces", "create", "risk")
    listed = falaj.json("workspaces", "list")
    shown = falaj.json("workspaces", "show", "risk")

    assert made == shown
    assert made in listed["items"]
    assert listed["next"] is None


def test_a_list_is_aligned_text_where_there_is_no_terminal(falaj: CommandLine) -> None:
    ran = falaj.done("keys", "list")

    head, *rows = ran.out.splitlines()
    assert head.split() == ["workspace", "version", "root", "created", "destroyed"]
    assert [row.split()[0] for row in rows] == ["default", "platform"]
    assert {row.index("file-") for row in rows} == {head.index("root")}


def test_a_terminal_gets_the_columns_that_fit(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")

    narrow = falaj.done("workspaces", "list").out
    shown = falaj.done("workspaces", "show", "default").out

    assert all(len(line) <= 40 for line in narrow.splitlines())
    assert "workspace_" not in narrow
    assert "workspace_" in shown


def test_a_part_of_a_list_names_the_command_for_the_rest(falaj: CommandLine) -> None:
    for name in ("a", "b", "c"):
        falaj.done("groups", "create", name)

    first = falaj.done("groups", "list", "--limit", "2")
    rest = falaj.done(*first.err.split("falaj ")[1].split())

    assert first.out.split("\n")[1].startswith("a")
    assert rest.out.split("\n")[1].startswith("c")
    assert rest.err == ""


def test_an_empty_list_is_nothing_on_stdout(falaj: CommandLine) -> None:
    ran = falaj.done("groups", "list")

    assert (ran.out, ran.err) == ("", "none\n")


@pytest.mark.slow
def test_options_may_be_repeated_or_joined_by_commas(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")

    label = falaj.json("objects", "label", "blob:raw", "--only", "AE,SA", "--class", "a", "--class", "b")

    assert set(label["object"]["label"]["only"]) == {"AE", "SA"}
    assert set(label["object"]["label"]["classes"]) == {"a", "b"}


def test_times_are_typed_short_or_as_iso(falaj: CommandLine) -> None:
    short = falaj.json("tokens", "issue", "--purpose", "ci", "--expires-in", "12h")["token"]
    long = falaj.json("tokens", "issue", "--purpose", "ci", "--expires-in", "PT12H")["token"]

    assert lifetime(short) == lifetime(long) == 12 * 3600


def lifetime(token: dict[str, str]) -> float:
    made, ends = (datetime.fromisoformat(token[name]) for name in ("created_at", "expires_at"))
    return (ends - made).total_seconds()


def test_a_stream_is_a_line_for_each_record(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")

    ran = falaj.done("lineage", "graph", "blob:raw", "--json")

    assert [json.loads(line)["kind"] for line in ran.out.splitlines()] == ["blob", "operation"]


@pytest.mark.slow
def test_every_reading_command_without_arguments_prints(falaj: CommandLine) -> None:
    typed = [
        "users list",
        "users whoami",
        "tokens list",
        "policies list",
        "policies schema",
        "zones list",
        "blobs list",
    ]
    typed += [
        "audit list",
        "audit key",
        "audit verify",
        "workflows list",
        "platform status",
        "platform metrics",
    ]

    for command in typed:
        assert falaj.done(*command.split()).out or command.endswith("list")
        assert falaj.json(*command.split()) is not None


def test_an_arrow_table_is_written_to_a_file_or_as_json(falaj: CommandLine) -> None:
    import pyarrow as pa

    falaj.done("audit", "table", "--output", "log.arrow")
    rows = [json.loads(line) for line in falaj.done("audit", "table", "--json").out.splitlines()]

    table = pa.ipc.open_stream(falaj.folder / "log.arrow").read_all()
    assert table.column_names == list(rows[0])
    assert table["action"][0].as_py() == rows[0]["action"] == "platform.bootstrap"


# --------------------------------------------------------------------------------------- confirmation


def test_irreversible_commands_ask_first(
    falaj: CommandLine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falaj.done("blobs", "put", data, "raw")

    nobody = falaj("blobs", "delete", "raw")
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    declined = falaj("blobs", "delete", "raw")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    agreed = falaj("blobs", "delete", "raw")

    assert (nobody.status, declined.status, agreed.status) == (2, 1, 0)
    assert "--yes" in nobody.err
    assert declined.err.startswith("blobs delete raw: Delete a blob")
    assert "nothing was done" in declined.err
    assert agreed.out.startswith("blob raw is deleted")


def test_yes_does_not_ask(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")

    falaj.done("blobs", "delete", "raw", "--yes")

    assert falaj("blobs", "show", "raw").status == 1


def test_keys_are_destroyed_when_the_name_is_typed(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    falaj.done("workspaces", "create", "risk")

    nobody = falaj("keys", "destroy", "risk")
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    wrong = falaj("keys", "destroy", "risk")
    monkeypatch.setattr(sys, "stdin", Terminal("risk\n"))
    right = falaj("keys", "destroy", "risk")

    assert (nobody.status, wrong.status, right.status) == (2, 1, 0)
    assert "that is not 'risk'" in wrong.err
    assert right.out.startswith("the keys of risk are destroyed")


# ---------------------------------------------------------------------------------------------- blobs


def test_a_file_comes_back_as_it_was(falaj: CommandLine, data: Path) -> None:
    put = falaj.done("blobs", "put", data, "raw", "--only", "AE", "--class", "personal")
    got = falaj.done("blobs", "get", "raw")

    assert put.out.startswith("blob raw is stored: 1.22 MiB in zone local, only AE; personal\n")
    assert got.out == "raw: 1.22 MiB, digest verified\n"
    assert (falaj.folder / "raw").read_bytes() == data.read_bytes()
    assert list(falaj.folder.glob(".*")) == []


def test_a_name_conflict_keeps_the_uploaded_bytes(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")

    ran = falaj("blobs", "put", data, "raw")

    assert ran.status == 1
    assert ran.err.startswith("error[object.exists] ")
    fix = ran.err.split("fix      falaj ")[1].replace("OTHER", "second").split()
    assert falaj.done(*fix).out.startswith("blob second is stored")


def test_an_empty_file_and_standard_input_can_be_stored(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (falaj.folder / "empty").write_bytes(b"")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed")))

    assert falaj.json("blobs", "put", "empty", "none")["size_bytes"] == 0
    assert falaj.json("blobs", "put", "-", "typed")["size_bytes"] == 5
    falaj.done("blobs", "get", "none", "out")
    assert (falaj.folder / "out").read_bytes() == b""
    assert falaj.done("blobs", "get", "typed", "-").out == "typed"


def test_a_download_replaces_nothing_unless_forced(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")
    (falaj.folder / "raw").write_text("mine")

    ran = falaj("blobs", "get", "raw")

    assert ran.status == 1
    assert "--force" in ran.err
    assert (falaj.folder / "raw").read_text() == "mine"
    falaj.done("blobs", "get", "raw", "--force")
    assert (falaj.folder / "raw").read_bytes() == data.read_bytes()


def test_an_interrupted_download_continues(
    falaj: CommandLine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = falaj.json("blobs", "put", data, "raw")["id"]
    starts: list[int] = []
    whole = Blobs.read

    def read(self: Blobs, blob: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        starts.append(offset)
        if not offset:
            yield from whole(self, blob, length=1000)
        if len(starts) < 3:
            raise Interrupted("the line was cut")
        yield from whole(self, blob, offset=offset)

    monkeypatch.setattr(Blobs, "read", read)
    broken = falaj("blobs", "get", "raw")
    part = falaj.folder / f".raw.{ident}.part"
    held = part.stat().st_size
    falaj.done("blobs", "get", "raw")

    assert broken.status == 1
    assert "the same command resumes" in broken.err
    assert (held, starts) == (1000, [0, 1000, 1000])
    assert (falaj.folder / "raw").read_bytes() == data.read_bytes()
    assert not part.exists()


def test_a_partial_file_of_other_bytes_is_detected(falaj: CommandLine, data: Path) -> None:
    ident = falaj.json("blobs", "put", data, "raw")["id"]
    (falaj.folder / f".raw.{ident}.part").write_bytes(b"something else")

    ran = falaj("blobs", "get", "raw")

    assert ran.status == 1
    assert ran.err.startswith("error[data.damaged] ")
    falaj.done("blobs", "get", "raw")


@pytest.mark.parametrize("target", ["nowhere/raw", "data.bin/raw"])
def test_a_download_into_a_missing_folder_is_refused(falaj: CommandLine, data: Path, target: str) -> None:
    falaj.done("blobs", "put", data, "raw")

    assert falaj("blobs", "get", "raw", target).status == 2


def test_bytes_are_not_written_onto_a_terminal(
    falaj: CommandLine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falaj.done("blobs", "put", data, "raw")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    ran = falaj("blobs", "read", "raw")

    assert (ran.status, ran.out) == (2, "")
    falaj.done("blobs", "read", "raw", "--offset", "1", "--length", "2", "--output", "out")
    assert (falaj.folder / "out").read_bytes() == b"\x01\x02"


@pytest.mark.slow
def test_a_refused_download_leaves_nothing_behind(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw", "--class", "personal")
    (falaj.folder / "p.cedar").write_text(FORBID)
    falaj.done("policies", "publish", "p", "p.cedar")

    ran = falaj("blobs", "get", "raw", "out")

    assert ran.status == 1
    assert ran.err.startswith("error[policy.denied] ")
    assert list(falaj.folder.glob(".*")) == []


# --------------------------------------------------------------------------------------------- lineage


def test_lineage_is_drawn_as_a_tree(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw", "--only", "AE")
    falaj.done("blobs", "put", data, "clean", "--source", "blob:raw")

    lines = falaj.done("lineage", "show", "blob:raw").out.splitlines()
    up = falaj.done("lineage", "show", "blob:clean", "--direction", "up", "--depth", "2").out.splitlines()

    assert [line.split("  20")[0] for line in lines] == [
        "blob:raw  zone local  only AE",
        "├─ came from",
        "│  └─ blobs.upload",
        "└─ went into",
        "   └─ blobs.upload",
        "      └─ blob:clean  zone local  only AE",
    ]
    assert [line.split("  20")[0] for line in up] == [
        "blob:clean  zone local  only AE",
        "└─ came from",
        "   └─ blobs.upload",
        "      └─ blob:raw  zone local  only AE",
    ]


def test_a_node_that_is_reached_twice_is_drawn_once() -> None:
    nodes = [
        node("start", 0),
        node("left", 1, "start"),
        node("right", 1, "start"),
        node("both", 2, "left", "right"),
        node("end", 3, "both"),
    ]

    assert draw_lineage(nodes) == [
        "blob:start",
        "└─ went into",
        "   ├─ blob:left",
        "   │  └─ blob:both",
        "   │     └─ blob:end",
        "   └─ blob:right",
        "      └─ blob:both (drawn above)",
    ]


def test_a_tree_is_drawn_with_what_the_terminal_can_show() -> None:
    tree = "\n".join(draw_lineage([node("start", 0), node("end", 1, "start")]))

    assert encodable(tree, encoding="utf-8") == tree
    assert encodable(tree, encoding="ascii").splitlines()[1:] == ["`- went into", "   `- blob:end"]


def test_lineage_may_be_deep() -> None:
    nodes = [node("n0", 0), *(node(f"n{i}", i, f"n{i - 1}") for i in range(1, 5000))]

    assert len(draw_lineage(nodes)) == 5001


def node(name: str, depth: int, *next_to: str) -> LineageNode:
    near = tuple(ObjectId(each) for each in next_to)
    return LineageNode(id=ObjectId(name), kind="blob", name=name, depth=depth, next_to=near)


# ---------------------------------------------------------------------------------------------- audit


def test_an_export_verifies_offline(
    falaj: CommandLine, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    falaj("workspaces", "show", "nowhere")
    key = falaj.json("audit", "key")["ed25519"]
    exported = falaj.done("audit", "export", "log.jsonl")
    proof = falaj.done("audit", "inclusion-proof", "1").out
    (falaj.folder / "proof.json").write_text(proof)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("FALAJ_HOME", str(elsewhere / "home"))

    sound = falaj.done(*exported.out.split("falaj ")[1].split())
    as_json = falaj.json("audit", "verify", "log.jsonl", "--public-key", key)
    proved = falaj.done("audit", "verify", "proof.json", "--public-key", key)

    assert sound.out.startswith("sound: ")
    assert as_json["ok"]
    assert proved.out.startswith("sound: ")
    assert list(elsewhere.iterdir()) == []


def test_a_changed_export_is_detected(falaj: CommandLine) -> None:
    key = falaj.json("audit", "key")["ed25519"]
    falaj.done("audit", "export", "log.jsonl")
    log = falaj.folder / "log.jsonl"
    log.write_text(log.read_text().replace('"platform.bootstrap"', '"platform.lost"'))

    ran = falaj("audit", "verify", "log.jsonl", "--public-key", key)

    assert ran.status == 1
    assert "Entry 0 was edited" in ran.out


def test_an_export_replaces_nothing_unless_forced(falaj: CommandLine) -> None:
    falaj.done("audit", "export", "log.jsonl")

    assert falaj("audit", "export", "log.jsonl").status == 1
    falaj.done("audit", "export", "log.jsonl", "--force")
    assert list(falaj.folder.glob(".*")) == []


def test_an_export_to_standard_output(falaj: CommandLine) -> None:
    lines = [json.loads(line) for line in falaj.done("audit", "export", "-").out.splitlines()]

    assert lines[0]["falaj_audit"] == 1
    assert [line["entry"]["seq"] for line in lines if "entry" in line] == list(range(lines[0]["size"]))


def test_the_log_of_the_platform_is_verified(falaj: CommandLine) -> None:
    ran = falaj.done("audit", "verify")

    assert ran.out.startswith("sound: ")
    assert falaj.json("audit", "verify")["ok"]


def test_an_export_needs_the_public_key(falaj: CommandLine) -> None:
    falaj.done("audit", "export", "log.jsonl")

    ran = falaj("audit", "verify", "log.jsonl")

    assert ran.status == 2
    assert "falaj audit key" in ran.err
    assert falaj("audit", "verify", "--public-key", "00").status == 2
    (falaj.folder / "not-a-key").write_text("nothing")
    assert falaj("audit", "verify", "log.jsonl", "--public-key", "not-a-key").status == 2


# -------------------------------------------------------------------------------------------- policies


@pytest.mark.slow
def test_a_policy_is_checked_published_and_withdrawn(falaj: CommandLine) -> None:
    (falaj.folder / "p.cedar").write_text(FORBID)

    checked = falaj.done("policies", "check", "p.cedar")
    published = falaj.done("policies", "publish", "p", "p.cedar")
    shown = falaj.done("policies", "show", "p")
    withdrawn = falaj.done(*published.out.split("falaj ")[1].split())

    assert checked.out == "p.cedar can be published: 1 rule\n"
    assert published.out.startswith("policy p, version 1, is in force in default\n")
    assert FORBID in shown.out
    assert withdrawn.out.startswith("policy p is out of force in default\n")


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (b"", 2, "which is empty"),
        (b" \n", 2, "which is empty"),
        (b"\xff\xfe", 2, "UTF-8"),
        (b"permit (", 2, "p.cedar cannot be published"),
        (b'permit (principal, action == Action::"blob.reed", resource);', 2, "unrecognized action"),
        (b" " * (1 << 20) + b"x", 2, "at most 1 MiB"),
    ],
)
def test_an_invalid_policy_is_refused(falaj: CommandLine, text: bytes, status: int, words: str) -> None:
    (falaj.folder / "p.cedar").write_bytes(text)

    ran = falaj("policies", "check", "p.cedar")

    assert ran.status == status
    assert words in ran.err


def test_examples_pass_without_a_home(
    falaj: CommandLine, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("nothing") / "home"
    monkeypatch.setenv("FALAJ_HOME", str(home))
    (falaj.folder / "p.cedar").write_text(FORBID)
    (falaj.folder / "examples.toml").write_text(EXAMPLES)

    ran = falaj.done("policies", "test", "examples.toml")

    assert ran.out == "2 examples passed, 0 failed\n"
    assert not home.exists()


def test_examples_that_fail_are_shown_with_the_rule(falaj: CommandLine) -> None:
    (falaj.folder / "p.cedar").write_text(FORBID)
    (falaj.folder / "examples.toml").write_text(EXAMPLES.replace('"deny"', '"allow"'))

    ran = falaj("policies", "test", "examples.toml")

    assert ran.status == 1
    assert ran.out.splitlines()[1].split()[:4] == ["2", "allow", "deny", "p.cedar#no-personal"]
    assert ran.out.splitlines()[-1] == "1 example passed, 1 failed"
    assert [each["passed"] for each in falaj("policies", "test", "examples.toml", "--json").json] == [
        True,
        False,
    ]


EXAMPLES = """
policies = ["*.cedar"]

[[example]]
who = "sara"
roles = {risk = ["developer"]}
action = "blobs.upload"
resource = {workspace = "risk"}
expect = "allow"

[[example]]
who = "sara"
roles = {risk = ["developer"]}
action = "blobs.read"
resource = {workspace = "risk", classes = ["personal"]}
expect = "deny"
"""


# ---------------------------------------------------------------------------------------- tokens, work


def test_the_secret_of_a_token_is_alone_on_stdout(falaj: CommandLine) -> None:
    ran = falaj.done("tokens", "issue", "--purpose", "ci", "--action", "blobs.read,blobs.list")

    assert ran.out.startswith("fj_token_")
    assert len(ran.out.splitlines()) == 1
    assert "shown only once" in ran.err
    revoked = falaj.done(*ran.err.split("falaj ")[1].split())
    assert revoked.out.endswith("is revoked\n")


@pytest.mark.parametrize(("state", "status"), [(WorkflowState.DONE, 0), (WorkflowState.FAILED, 1)])
def test_work_is_watched_until_it_ends(
    falaj: CommandLine, data: Path, monkeypatch: pytest.MonkeyPatch, state: WorkflowState, status: int
) -> None:
    falaj.done("blobs", "put", data, "raw")
    copy = falaj.done("blobs", "copy", "raw", "local", "--name", "copied")
    ident = copy.out.split()[1]

    def changes(*_: Any, **__: Any) -> Iterator[WorkflowRun]:
        first = WorkflowRun(
            id=ident,
            workspace="workspace_01",
            workflow="blobs.copy",
            state=WorkflowState.RUNNING,
            doing="copying",
            created_at=datetime.now(UTC),
        )
        yield from (first, first.model_copy(update={"state": state, "doing": None}))

    monkeypatch.setattr(workflows_service, "stream_changes", changes)
    ran = falaj("workflows", "watch", ident)

    assert ran.status == status
    assert ran.out == f"blobs.copy running, step 0: copying\nblobs.copy {state}\n"
    assert len(falaj("workflows", "watch", ident, "--json").out.splitlines()) == 2


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 40, "5 TiB"), (640 << 20, "640 MiB")],
)
def test_sizes(count: int, words: str) -> None:
    assert format_size(count) == words
    assert format_value(count, "size_bytes") == words


def test_terminal_control_characters_are_escaped() -> None:
    assert printable("a\x1b[0m\u202e\nb\tc") == "a\\x1b[0m\\u202e\nb\tc"


@pytest.mark.slow
def test_a_name_from_the_server_cannot_escape_the_folder(falaj: CommandLine, data: Path) -> None:
    falaj.done("blobs", "put", data, "raw")
    import falaj as fj

    with fj.open(falaj.home) as platform:
        found = platform.blobs.show("raw").model_copy(update={"name": "../../evil"})

    assert blobs._target(None, found) == Path("evil")
