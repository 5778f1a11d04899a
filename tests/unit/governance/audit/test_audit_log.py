"""One gapless log, written in the transaction of what it records, and verifiable with the public key."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from falaj.errors import Conflict, FalajError, NotFound
from falaj.governance.audit import verify
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.governance.tables import audit_entries, audit_heads, audit_state, objects
from falaj.records.governance.identity import Role
from platforms import TWO_ZONES, OwnPlatform, make_platform
from polling import eventually
from processes import running

DOOMED = Path(__file__).parents[3] / "killed_platform.py"


def test_the_first_entry_is_the_bootstrap(platform: OwnPlatform) -> None:
    (first,) = platform.entries()

    assert (first["seq"], first["action"], first["outcome"]) == (0, "platform.bootstrap", "done")


def test_a_rolled_back_operation_leaves_only_its_failure(platform: OwnPlatform) -> None:
    owner = platform.users.whoami().principal.name
    before = len(platform.entries())

    with pytest.raises(Conflict):
        platform.workspaces.revoke("platform", owner, role=Role.ADMIN)

    (entry,) = platform.entries()[before:]
    assert (entry["outcome"], entry["error"]) == ("failed", "object.conflict")


@pytest.mark.slow
def test_threads_and_processes_write_one_gapless_log(platform: OwnPlatform) -> None:
    other = platform.again()
    before = len(platform.entries())

    def work(number: int) -> None:
        here = (platform, other)[number % 2]
        for turn in range(4):
            here.workspaces.create(f"team-{number}-{turn}")
            here.users.whoami()
            with suppress(NotFound):
                here.workspaces.show("nowhere")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    entries = platform.entries()
    assert [entry["seq"] for entry in entries] == list(range(len(entries)))
    assert len(entries) - before == 8 * 4 * 3
    assert platform.verify_audit().problems == ()
    assert other.verify_audit().problems == ()


@pytest.mark.slow
def test_rows_and_entries_match_after_kill_9(platform: OwnPlatform, tmp_path: Path) -> None:
    for name, enough in (("a", 9), ("b", 23)):
        with running(DOOMED, str(tmp_path), "create_workspaces", name) as writer:
            while int(writer.line()) < enough:
                pass
            writer.kill()

    made = {row["id"] for row in platform.rows(objects) if row["name"].startswith(("a-", "b-"))}
    entries = [entry for entry in platform.entries() if entry["action"] == "workspaces.create"]
    assert len(made) >= 34
    assert {ident for entry in entries for ident in entry["created"]} == made
    assert [entry["seq"] for entry in platform.entries()] == list(range(platform.count(audit_entries)))
    assert platform.verify_audit().problems == ()


# ---------------------------------------------------------------------------------- export, prove, list


def test_an_export_and_a_proof_are_checked_with_the_public_key_alone(
    platform: OwnPlatform, tmp_path: Path
) -> None:
    platform.workspaces.create("team-a")
    export, proof, program = (tmp_path / name for name in ("export.jsonl", "proof.json", "verify.py"))
    shutil.copy(verify.__file__, program)
    key = platform.audit.key().ed25519

    export.write_text(
        "".join(f"{line.model_dump_json(exclude_none=True)}\n" for line in platform.audit.export())
    )
    proof.write_text(platform.audit.inclusion_proof(1).model_dump_json())

    assert run_verifier(program, export, key)["ok"]
    assert run_verifier(program, proof, key)["ok"]
    assert not run_verifier(program, export, "ab" * 32)["ok"]


def test_every_entry_can_be_proved(platform: OwnPlatform) -> None:
    for number in range(6):
        platform.workspaces.create(f"team-{number}")
    key = bytes.fromhex(platform.audit.key().ed25519)

    proofs = [platform.audit.inclusion_proof(seq) for seq in range(8)]

    assert all(verify.verify_proof(json.loads(proof.model_dump_json()), key).ok for proof in proofs)
    assert [proof.entry["seq"] for proof in proofs] == list(range(8))
    with pytest.raises(NotFound):
        platform.audit.inclusion_proof(100)


@pytest.mark.parametrize("first", [1, 4, 7, 1000])
def test_a_part_of_the_log_is_checked_on_its_own(light_platform: OwnPlatform, first: int) -> None:
    for number in range(8):
        light_platform.workspaces.create(f"team-{number}")

    lines = [line.model_dump_json(exclude_none=True) for line in light_platform.audit.export(first=first)]

    report = verify.verify_export(lines, bytes.fromhex(light_platform.audit.key().ed25519))
    assert report.problems == []
    assert report.entries == max(0, len(light_platform.entries()) - 1 - first)  # except for audit.key itself


def test_the_log_is_a_table_for_analysis(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")

    table = platform.audit.table().read_all()

    assert table["seq"].to_pylist() == list(range(table.num_rows))
    assert "workspaces.create" in table["action"].to_pylist()


def test_an_auditor_of_a_workspace_sees_its_entries_only(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")
    home = platform.workspaces.show("team-a").id
    alia = platform.join("alia", Role.AUDITOR, workspace="team-a")
    for number in range(3):
        platform.put(f"theirs-{number}", b"x")
        platform.put(f"ours-{number}", b"x", workspace="team-a")

    with acting_as(alia):
        found = platform.audit.list(workspace="team-a", action="blobs.commit").items
        assert {entry.workspace for entry in platform.audit.list(workspace="team-a").items} == {home}
        with pytest.raises(NotFound):
            platform.audit.list(workspace="default")

    assert [entry.action for entry in found] == ["blobs.commit"] * 3


def test_lists_are_paged_from_the_newest_on(light_platform: OwnPlatform) -> None:
    for number in range(5):
        light_platform.workspaces.create(f"team-{number}")

    first = light_platform.audit.list(workspace="platform", action="workspaces.create", limit=3)
    rest = light_platform.audit.list(
        workspace="platform", action="workspaces.create", before=int(first.next or 0), limit=3
    )

    assert [entry.seq for entry in (*first.items, *rest.items)] == [5, 4, 3, 2, 1]
    assert rest.next is None


# -------------------------------------------------------------------------------------- witness, privacy


def test_every_head_goes_to_the_witness(tmp_path: Path) -> None:
    witness = tmp_path / "elsewhere.jsonl"
    toml = f'{TWO_ZONES}\n[audit]\nsign_every = 3600\nwitness = "{witness}"'

    with make_platform(tmp_path, toml=toml) as platform:
        for number in range(3):
            platform.workspaces.create(f"team-{number}")
            platform.parts.audit.sign_head()
            platform.parts.audit.sign_head()
        heads = platform.rows(audit_heads)

    lines = [json.loads(line) for line in witness.read_text().splitlines()]
    assert [line["size"] for line in lines] == [head["size"] for head in heads] == [2, 3, 4]
    assert [line["signature"] for line in lines] == [head["signature"] for head in heads]
    assert witness.stat().st_mode & 0o777 == 0o600


def test_heads_are_signed_while_the_platform_runs(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml="[audit]\nsign_every = 0.05") as platform:
        eventually(lambda: platform.count(audit_heads) == 1)
        platform.workspaces.create("team-a")

        eventually(lambda: max(head["size"] for head in platform.rows(audit_heads)) == 2)


@pytest.mark.slow
def test_inputs_are_never_in_clear(platform: OwnPlatform) -> None:
    word = "xylophon-4711"
    platform.workspaces.create(word)
    platform.tokens.issue(purpose=f"for {word}")
    platform.put(f"{word}.bin", word.encode(), workspace=word)
    platform.policies.check(
        text=f'forbid (principal, action, resource) when {{ resource.name == "{word}" }};'
    )
    for act in (
        lambda: platform.workspaces.show(f"{word}-gone"),
        lambda: platform.workspaces.create(word),
        lambda: platform.workspaces.create(f"{word} Not A Name"),
        lambda: platform.workspaces.create(unknown=word),  # type: ignore[call-arg]
        lambda: platform.blobs.upload(iter([b"x"]), zone=word),
    ):
        with pytest.raises(FalajError):
            act()

    held = [row for table in (audit_entries, audit_state, audit_heads) for row in platform.rows(table)]
    values = [value for row in held for value in row.values()]
    assert not [value for value in values if word in str(value) or word.encode() in as_bytes(value)]


def test_an_input_cannot_be_guessed_from_its_digest(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("team-a")

    digest = light_platform.entries()[-1]["input"]

    assert len(digest) == 64
    assert digest != hashlib.sha256(b'{"name":"team-a"}').hexdigest()


def test_a_request_id_and_a_token_are_in_the_entry(light_platform: OwnPlatform) -> None:
    issued = light_platform.tokens.issue(purpose="ci")

    with acting_as(light_platform.caller_of(issued.secret)), on_terms(request="req-7"):
        light_platform.users.whoami()

    entry = light_platform.entries()[-1]
    assert (entry["token"], entry["request"], entry["origin"]) == (issued.token.id, "req-7", "test")


def as_bytes(value: object) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else b""


def run_verifier(program: Path, export: Path, key: str) -> dict[str, object]:
    command: Sequence[str] = [sys.executable, "-I", str(program), str(export), "--public-key", key, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=export.parent, check=False)
    report: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report
