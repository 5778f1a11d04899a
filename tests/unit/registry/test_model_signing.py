"""Signatures of versions: the `model_signing` of OpenSSF agrees on what is exported, and every change is found."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import model_files
from falaj.drivers.keyfile.keys import KeyFile
from falaj.errors import Damaged, FalajError, InvalidInput, KeyUnavailable
from falaj.governance.audit.verify import canonical
from falaj.governance.encryption.signing_keys import SigningKey
from falaj.governance.operations.caller import acting_as
from falaj.ports.keys import KeyService
from falaj.records.governance.identity import Role
from falaj.records.registry import SignatureFormat
from falaj.registry.service import Models
from falaj.registry.signing.bundles import verify_bundle
from falaj.registry.signing.signer import sign_files
from falaj.registry.tables import versions
from model_servers import constant
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import Register, Token  # type: ignore[attr-defined]

DIGESTS = {"model.onnx": "11" * 32, "a/b.json": "22" * 32, "manifest.json": "33" * 32}
prefixes = (f"signing{number}" for number in count())


@pytest.fixture(params=["keyfile", "pkcs11"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> KeyService:
    if request.param == "keyfile":
        return KeyFile.create(tmp_path / "keys.json")
    token: Token = request.getfixturevalue("softhsm")
    from falaj.drivers.pkcs11.keys import Pkcs11Keys

    return Pkcs11Keys.open_or_create(token.module, token.label, token.pin, prefix=next(prefixes))


def find_in(keys: KeyService) -> Callable[[str], Any]:
    known = {key.fingerprint: key.public_key for key in map(SigningKey.from_der, keys.ecdsa_keys())}
    return known.get


def verify_command(folder: Path, public_key: Path) -> list[str]:
    options = ["--signature", str(folder / "model.sig"), "--public_key", str(public_key)]
    return ["verify", "key", str(folder), *options]


def model_signing(folder: Path, public_key: Path) -> Result:
    """Run the command of the package in this process, where it is loaded once."""
    from model_signing._cli import main

    return CliRunner().invoke(main, verify_command(folder, public_key))


# ------------------------------------------------------------------------------------------------ the format


def test_the_package_and_the_platform_agree_on_a_signature(keys: KeyService, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    contents = {"model.onnx": b"graph", "a/b.json": b"{}", "a/c": b""}
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    from hashlib import sha256

    digests = {path: sha256(content).hexdigest() for path, content in contents.items()}

    text = sign_files("churn@1", digests, keys)

    (folder / "model.sig").write_text(text)
    (tmp_path / "falaj.pub").write_text(SigningKey.from_der(keys.ecdsa_keys()[-1]).pem)
    command = [sys.executable, "-I", "-m", "model_signing", *verify_command(folder, tmp_path / "falaj.pub")]
    ran = subprocess.run(command, capture_output=True, text=True)  # as somebody without Falaj would
    found = verify_bundle(text, find_in(keys), where="churn@1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (found.name, found.digests) == ("churn@1", digests)


def test_what_the_package_signs_with_a_key_of_its_own_is_verified_here(tmp_path: Path) -> None:
    """The verifier is one of the format, and not of our own signatures alone."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )
    from model_signing import hashing, signing

    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m").write_bytes(b"graph")
    how = hashing.Config().set_ignored_paths(paths=["model.sig"], ignore_git_paths=False)
    config = signing.Config().use_elliptic_key_signer(private_key=tmp_path / "key.pem")
    config.set_hashing_config(how).sign(tmp_path / "model", tmp_path / "model.sig")
    key = SigningKey.from_pem(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    )

    found = verify_bundle(
        (tmp_path / "model.sig").read_text(), {key.fingerprint: key.public_key}.get, where="m"
    )

    assert (found.name, list(found.digests)) == ("model", ["m"])


def test_no_byte_of_a_signature_can_be_changed(tmp_path: Path) -> None:
    keys = KeyFile.create(tmp_path / "keys.json")
    find, text = find_in(keys), sign_files("churn@1", DIGESTS, keys)
    verify_bundle(text, find, where="churn@1")

    for place in range(len(text)):
        changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        with pytest.raises(Damaged):
            verify_bundle(changed, find, where="churn@1")
    for cut in range(0, len(text), 37):
        with pytest.raises(Damaged):
            verify_bundle(text[:cut], find, where="churn@1")


def edited(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    bundle = json.loads(text)
    change(bundle)
    return json.dumps(bundle)


def with_payload(bundle: dict[str, Any], **changes: Any) -> None:
    envelope = bundle["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"])) | changes
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda bundle: bundle.update(more=1),
        lambda bundle: bundle["dsseEnvelope"]["signatures"].append(bundle["dsseEnvelope"]["signatures"][0]),
        lambda bundle: bundle["dsseEnvelope"]["signatures"].clear(),
        lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain"),
        lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=None),
        lambda bundle: bundle["verificationMaterial"].update(tlogEntries=[{}]),
        lambda bundle: with_payload(bundle, predicateType="https://model_signing/Digests/v0.1"),
        lambda bundle: with_payload(bundle, subject=[]),
        lambda bundle: with_payload(bundle, predicate={}),
        lambda bundle: bundle.clear(),
    ],
)
def test_another_bundle_than_the_platform_makes_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    keys = KeyFile.create(tmp_path / "keys.json")
    text = edited(sign_files("churn@1", DIGESTS, keys), change)

    with pytest.raises(Damaged):
        verify_bundle(text, find_in(keys), where="churn@1")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "1", '{"dsseEnvelope": 1}', "[" * 100_000, "\ud800"]
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Damaged):
        verify_bundle(text, find_in(KeyFile.create(tmp_path / "keys.json")), where="churn@1")


def test_the_key_of_another_platform_is_refused(tmp_path: Path) -> None:
    ours, theirs = KeyFile.create(tmp_path / "a.json"), KeyFile.create(tmp_path / "b.json")

    with pytest.raises(Damaged, match="not a key of this platform"):
        verify_bundle(sign_files("churn@1", DIGESTS, theirs), find_in(ours), where="churn@1")


# -------------------------------------------------------------------------------------------------- exports


@pytest.fixture
def exported(light_platform: OwnPlatform, models: Models, register: Register, tmp_path: Path) -> Path:
    """A version as files, and beside it the public key: `model` and `falaj.pub`."""
    made = register(card="# Churn", metrics={"auc": 0.5})
    light_platform.export(made.reference, tmp_path / "model", to="files")
    (tmp_path / "falaj.pub").write_text(models.signing_key(made.reference).pem)
    return tmp_path / "model"


def test_model_signing_verifies_an_exported_version(exported: Path) -> None:
    ran = model_signing(exported, exported.parent / "falaj.pub")

    assert ran.exit_code == 0, ran.output
    assert sorted(path.name for path in exported.iterdir()) == ["manifest.json", "model.onnx", "model.sig"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TAMPERED: dict[str, Callable[[Path], object]] = {
    "file": lambda folder: flip(folder / "model.onnx"),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "signature": lambda folder: flip(folder / "model.sig"),
    "missing file": lambda folder: (folder / "model.onnx").unlink(),
    "extra file": lambda folder: (folder / "more.bin").write_bytes(b"x"),
    "key": lambda folder: (folder.parent / "falaj.pub").write_text(
        SigningKey.from_der(KeyFile.create(folder.parent / "other.json").ecdsa_keys()[0]).pem
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_model_signing_refuses_an_altered_export(exported: Path, tamper: Callable[[Path], object]) -> None:
    tamper(exported)

    ran = model_signing(exported, exported.parent / "falaj.pub")

    assert ran.exit_code != 0, ran.output


@pytest.mark.slow
def test_model_signing_refuses_the_signature_of_another_version(
    light_platform: OwnPlatform, models: Models, register: Register, tmp_path: Path
) -> None:
    for number in (1, 2):
        light_platform.export(register(metrics={"n": number}).reference, tmp_path / str(number), to="files")
    (tmp_path / "falaj.pub").write_text(models.signing_key("churn@1").pem)

    (tmp_path / "1" / "model.sig").write_bytes((tmp_path / "2" / "model.sig").read_bytes())

    assert model_signing(tmp_path / "1", tmp_path / "falaj.pub").exit_code != 0
    assert model_signing(tmp_path / "2", tmp_path / "falaj.pub").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["triton", "kserve", "edge"])
def test_model_signing_verifies_the_layouts_of_other_systems(
    light_platform: OwnPlatform, tmp_path: Path, to: str
) -> None:
    light_platform.put("file", constant(tmp_path / "m.onnx", 3.0).read_bytes())
    light_platform.models.register("churn", files=("file",), paths=("model.onnx",))

    made = light_platform.export("churn@1", tmp_path / "out", to=to)
    (tmp_path / "falaj.pub").write_text(made.public_key)

    ran = model_signing(tmp_path / "out", tmp_path / "falaj.pub")

    assert ran.exit_code == 0, ran.output
    flip(tmp_path / "out" / "export.json")
    assert model_signing(tmp_path / "out", tmp_path / "falaj.pub").exit_code != 0


@pytest.mark.parametrize("name", ["model.sig", "manifest.json", "Model.SIG"])
def test_a_file_may_not_take_the_name_of_the_signature(
    light_platform: OwnPlatform, models: Models, name: str
) -> None:
    blobs = [light_platform.put(f"b{n}", data).id for n, data in enumerate([model_files.onnx(), b"{}"])]

    with pytest.raises(InvalidInput, match=name):
        models.register("churn", files=tuple(blobs), paths=("model.onnx", name))

    made = models.register("churn", files=tuple(blobs), paths=("model.onnx", f"files/{name}"))
    assert made.reference == "churn@1"


# ---------------------------------------------------------------------------------------- keys and versions


def test_a_version_says_how_and_by_which_key_it_is_signed(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    made = register()

    key = models.signing_key("churn@1")
    *_, check = models.verify("churn@1")
    assert (made.signed_as, made.key) == (SignatureFormat.OPENSSF, key.fingerprint)
    assert (check.ok, check.signed_as, check.key) == (True, SignatureFormat.OPENSSF, key.fingerprint)


@pytest.mark.slow
def test_versions_signed_before_a_rotation_stay_verifiable(
    light_platform: OwnPlatform, models: Models, register: Register, tmp_path: Path
) -> None:
    old = register()

    turned = light_platform.keys.rotate_signing()

    new = register()
    assert (old.key != new.key, new.key, turned.keys) == (True, turned.fingerprint, 2)
    for version in (old, new):
        *_, check = models.verify(version.reference)
        assert (check.ok, check.key) == (True, version.key)
        folder = tmp_path / str(version.number)
        light_platform.export(version.reference, folder, to="files")
        (tmp_path / "falaj.pub").write_text(models.signing_key(version.reference).pem)
        ran = model_signing(folder, tmp_path / "falaj.pub")
        assert ran.exit_code == 0, ran.output
    with acting_as(light_platform.join("dana", Role.DEVELOPER)), pytest.raises(FalajError):
        light_platform.keys.rotate_signing()
    assert light_platform.keys.rotate().rewrapped >= 1
    assert models.version("churn@1").key == old.key


def test_a_manifest_that_was_changed_and_hashed_again_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    """Who can write the database alone has no key: the signature of another platform does not help."""
    made = register()
    (row,) = light_platform.rows(versions)
    manifest = json.loads(row["manifest"]) | {"card": "# Better"}

    light_platform.sql(
        "UPDATE registry_versions SET manifest = :manifest", {"manifest": canonical(manifest).decode()}
    )

    with pytest.raises(Damaged, match="changed after it was signed"):
        models.version(made.reference)


# --------------------------------------------------------------------------------------------- every load


def test_an_altered_byte_is_refused_and_in_the_audit_log(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    header = b'{"w":{"dtype":"U8","shape":[3145728],"data_offsets":[0,3145728]}}'
    register(data=model_files.safetensors(header, bytes(3 << 20)))
    files = [path for path in light_platform.home.blobs.rglob("*") if path.is_file()]
    (stored,) = [path for path in files if not path.name.startswith(".store.")]
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)

    with pytest.raises(Damaged):
        b"".join(models.read("churn@1", light_platform.models.version("churn@1").files[0].path))

    entry = light_platform.entries()[-1]
    assert (entry["action"], entry["outcome"], entry["error"]) == ("models.read", "failed", Damaged.code)


def test_an_altered_manifest_is_refused_and_in_the_audit_log(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(card="# Churn")
    light_platform.sql("UPDATE registry_versions SET manifest = replace(manifest, '# Churn', '# Burn')")

    with pytest.raises(Damaged):
        models.read("churn@1", "model.onnx")

    entry = light_platform.entries()[-1]
    assert (entry["action"], entry["outcome"], entry["error"]) == ("models.read", "failed", Damaged.code)


def test_registering_without_the_key_leaves_nothing(
    light_platform: OwnPlatform, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = light_platform.put("m", model_files.onnx())

    def locked(_message: bytes) -> None:
        raise KeyUnavailable("the token is locked")

    monkeypatch.setattr(light_platform.parts.keys, "sign_ecdsa", locked)
    with pytest.raises(KeyUnavailable):
        models.register("churn", files=(blob.id,))

    assert light_platform.count(versions) == 0
    assert models.list().items == ()
