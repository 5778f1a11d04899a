"""The KeyService contract, on a key file and on a PKCS#11 token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from falaj.drivers.keyfile.keys import KeyFile
from falaj.errors import Damaged, KeyUnavailable
from falaj.ports.keys import KeyService, WrappedKey

if TYPE_CHECKING:
    from conftest import Token

KEY = bytes(range(32))
CONTEXT = b"workspace w, data key 1"

Opener = Callable[[], KeyService]
prefixes = (f"test{number}" for number in count())


@pytest.fixture(params=["keyfile", "pkcs11"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Return a function that opens the keys of this test."""
    if request.param == "keyfile":
        return lambda: KeyFile.open_or_create(tmp_path / "keys.json")
    token: Token = request.getfixturevalue("softhsm")
    from falaj.drivers.pkcs11.keys import Pkcs11Keys

    prefix = next(prefixes)
    return lambda: Pkcs11Keys.open_or_create(token.module, token.label, token.pin, prefix=prefix)


@pytest.fixture
def keys(opener: Opener) -> Iterator[KeyService]:
    opened = opener()
    yield opened
    opened.close()


def test_a_wrapped_key_is_unwrapped(keys: KeyService) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)

    assert wrapped.root == keys.root
    assert KEY not in wrapped.ciphertext
    assert keys.unwrap(wrapped, context=CONTEXT) == KEY


def test_wrapping_twice_gives_different_bytes(keys: KeyService) -> None:
    assert keys.wrap(KEY, context=CONTEXT) != keys.wrap(KEY, context=CONTEXT)


def test_another_context_does_not_unwrap(keys: KeyService) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)

    with pytest.raises(Damaged):
        keys.unwrap(wrapped, context=b"workspace v, data key 1")


@pytest.mark.parametrize("position", [0, 11, 12, 30, -1])
def test_an_altered_key_is_damaged(keys: KeyService, position: int) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)
    altered = bytearray(wrapped.ciphertext)
    altered[position] ^= 1

    with pytest.raises(Damaged):
        keys.unwrap(WrappedKey(wrapped.root, bytes(altered)), context=CONTEXT)


@pytest.mark.parametrize("kept", [0, 5, 12, 20, 59])
def test_a_truncated_key_is_damaged(keys: KeyService, kept: int) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)

    with pytest.raises(Damaged):
        keys.unwrap(WrappedKey(wrapped.root, wrapped.ciphertext[:kept]), context=CONTEXT)


def test_the_service_continues_after_a_damaged_key(keys: KeyService) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)
    with pytest.raises(Damaged):
        keys.unwrap(WrappedKey(wrapped.root, b"x" * 60), context=CONTEXT)

    assert keys.unwrap(wrapped, context=CONTEXT) == KEY


def test_earlier_roots_still_unwrap_after_rotation(keys: KeyService) -> None:
    before = keys.wrap(KEY, context=CONTEXT)

    names = [keys.rotate() for _ in range(10)]

    assert len({before.root, *names}) == 11
    assert keys.root == names[-1]
    assert keys.wrap(KEY, context=CONTEXT).root == names[-1]
    assert keys.unwrap(before, context=CONTEXT) == KEY


def test_an_unknown_root_is_unavailable(keys: KeyService) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)
    digit = "0" if wrapped.root[-1] != "0" else "1"

    for unknown in ("elsewhere-1", wrapped.root[:-1] + digit):
        with pytest.raises(KeyUnavailable, match=unknown):
            keys.unwrap(WrappedKey(unknown, wrapped.ciphertext), context=CONTEXT)


def test_a_wrapped_key_is_unwrapped_after_reopening(opener: Opener) -> None:
    first = opener()
    wrapped, public = first.wrap(KEY, context=CONTEXT), first.public_key()
    first.close()

    second = opener()

    assert second.unwrap(wrapped, context=CONTEXT) == KEY
    assert second.public_key() == public
    second.close()


def test_two_open_services_do_not_interfere(opener: Opener) -> None:
    first, second = opener(), opener()
    wrapped = first.wrap(KEY, context=CONTEXT)

    first.close()

    assert second.unwrap(wrapped, context=CONTEXT) == KEY
    second.close()


def test_after_closing_nothing_works(keys: KeyService) -> None:
    wrapped = keys.wrap(KEY, context=CONTEXT)

    keys.close()

    with pytest.raises(KeyUnavailable):
        keys.unwrap(wrapped, context=CONTEXT)


def test_what_is_kept_beside_the_keys_is_there_after_opening_again(opener: Opener) -> None:
    first = opener()
    assert first.kept("log-1") is None

    for number in (9, 10, 11):
        first.keep("log-1", b"head %d" % number)
    first.keep("log-2", b"another")
    first.rotate()
    assert first.kept("log-1") == b"head 11"
    first.close()

    second = opener()
    assert (second.kept("log-1"), second.kept("log-2"), second.kept("log-3")) == (
        b"head 11",
        b"another",
        None,
    )
    second.close()


@pytest.mark.parametrize("message", [b"", b"head 17", b"x" * 100_000])
def test_a_signature_verifies_with_the_public_key(keys: KeyService, message: bytes) -> None:
    signature = keys.sign(message)

    public = Ed25519PublicKey.from_public_bytes(keys.public_key())
    public.verify(signature, message)
    with pytest.raises(InvalidSignature):
        public.verify(signature, message + b".")


def test_rotation_keeps_the_signing_key(keys: KeyService) -> None:
    public = keys.public_key()

    keys.rotate()

    assert keys.public_key() == public


def verify_ecdsa(public_key: bytes, signature: bytes, message: bytes) -> None:
    public = serialization.load_der_public_key(public_key)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.curve.name == "secp256r1"
    public.verify(signature, message, ec.ECDSA(hashes.SHA256()))


@pytest.mark.parametrize("message", [b"", b"DSSEv1 2 {}", b"x" * 100_000])
def test_an_ecdsa_signature_verifies_with_the_newest_p256_key(keys: KeyService, message: bytes) -> None:
    signed = keys.sign_ecdsa(message)

    assert keys.ecdsa_keys() == (signed.public_key,)
    verify_ecdsa(signed.public_key, signed.signature, message)
    with pytest.raises(InvalidSignature):
        verify_ecdsa(signed.public_key, signed.signature, message + b".")


def test_a_p256_key_that_was_rotated_still_verifies(opener: Opener) -> None:
    first = opener()
    old, roots = first.sign_ecdsa(b"m"), first.root
    later = [first.rotate_ecdsa() for _ in range(3)]
    first.close()

    keys = opener()
    new = keys.sign_ecdsa(b"m")

    assert keys.ecdsa_keys() == (old.public_key, *later)
    assert len(set(keys.ecdsa_keys())) == 4
    assert new.public_key == later[-1]
    verify_ecdsa(old.public_key, old.signature, b"m")
    verify_ecdsa(new.public_key, new.signature, b"m")
    assert keys.root == roots
    keys.close()


def test_rotating_the_root_keeps_the_p256_key(keys: KeyService) -> None:
    before = keys.ecdsa_keys()

    keys.rotate()

    assert keys.ecdsa_keys() == before


def test_a_rotation_elsewhere_is_felt_at_once(opener: Opener) -> None:
    here, there = opener(), opener()
    here.sign_ecdsa(b"m")

    made = there.rotate_ecdsa()

    assert here.sign_ecdsa(b"m").public_key == made
    here.close()
    there.close()


def test_two_rotations_of_the_p256_key_at_once_lose_none(keys: KeyService) -> None:
    first = keys.ecdsa_keys()

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: keys.rotate_ecdsa(), range(8)))

    assert {*made, *first} == set(keys.ecdsa_keys())
    assert len(set(made)) == 8


def test_a_closed_service_signs_nothing(keys: KeyService) -> None:
    keys.close()

    with pytest.raises(KeyUnavailable):
        keys.sign_ecdsa(b"m")
    with pytest.raises(KeyUnavailable):
        keys.ecdsa_keys()


def test_eight_threads_get_right_answers(keys: KeyService) -> None:
    public = Ed25519PublicKey.from_public_bytes(keys.public_key())

    def work(number: int) -> bytes:
        own = bytes([number]) * 32
        public.verify(keys.sign(own), own)
        return keys.unwrap(keys.wrap(own, context=own), context=own)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(work, range(64)))

    assert answers == [bytes([number]) * 32 for number in range(64)]


def test_repr_shows_no_secret(keys: KeyService, softhsm: Token) -> None:
    assert softhsm.pin not in repr(keys).replace(softhsm.label, "")
    assert "b'" not in repr(keys)


class TestKeyFile:
    """Guarantees of the file."""

    def test_a_new_file_has_its_first_p256_key_already_and_is_not_written(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        KeyFile.create(path).close()
        before = path.read_bytes()

        made = [KeyFile.open(path).sign_ecdsa(b"m") for _ in range(2)]

        assert made[0] == made[1]
        assert path.read_bytes() == before


class TestToken:
    """Guarantees that only a token gives."""

    @pytest.mark.parametrize("label", ["root", "signing", "ecdsa"])
    def test_the_key_cannot_be_extracted(self, softhsm: Token, label: str) -> None:
        import pkcs11
        from pkcs11 import Attribute, ObjectClass

        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        prefix = next(prefixes)
        keys = Pkcs11Keys.open_or_create(softhsm.module, softhsm.label, softhsm.pin, prefix=prefix)
        session = pkcs11.lib(str(softhsm.module)).get_token(token_label=softhsm.label).open()
        kind = ObjectClass.SECRET_KEY if label == "root" else ObjectClass.PRIVATE_KEY
        labels = [each.label for each in session.get_objects({Attribute.CLASS: kind})]
        (name,) = [each for each in labels if each.startswith(f"{prefix}-{label}")]

        key = session.get_key(object_class=kind, label=name)

        with pytest.raises(pkcs11.exceptions.AttributeSensitive):
            key[Attribute.VALUE]
        assert key[Attribute.NEVER_EXTRACTABLE]
        assert key[Attribute.ALWAYS_SENSITIVE]
        assert key[Attribute.LOCAL]
        keys.close()

    # python-pkcs11 complains when it drops a search whose session is gone.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_session_that_dies_is_opened_again(self, softhsm: Token) -> None:
        import pkcs11

        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        keys = Pkcs11Keys.open_or_create(softhsm.module, softhsm.label, softhsm.pin, prefix=next(prefixes))
        wrapped = keys.wrap(KEY, context=CONTEXT)

        pkcs11.lib(str(softhsm.module)).reinitialize()

        assert keys.unwrap(wrapped, context=CONTEXT) == KEY
        keys.close()

    def test_a_wrong_pin_is_tried_once(self, softhsm: Token, monkeypatch: pytest.MonkeyPatch) -> None:
        from falaj.drivers.pkcs11 import keys as driver

        tries = []
        login = driver.open_session
        monkeypatch.setattr(driver, "open_session", lambda *given: tries.append(given) or login(*given))

        with pytest.raises(KeyUnavailable, match="PinIncorrect") as refusal:
            driver.Pkcs11Keys.open(softhsm.module, softhsm.label, "not-the-pin")

        assert len(tries) == 1
        assert "not-the-pin" not in str(refusal.value)

    def test_a_token_without_keys_is_unavailable(self, softhsm: Token) -> None:
        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        with pytest.raises(KeyUnavailable, match="NoSuchKey nobody-root-"):
            Pkcs11Keys.open(softhsm.module, softhsm.label, softhsm.pin, prefix="nobody")

    @pytest.mark.parametrize(("module", "label"), [("/nowhere/module.so", None), (None, "no-such-token")])
    def test_a_missing_token_is_unavailable(
        self, softhsm: Token, module: str | None, label: str | None
    ) -> None:
        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        with pytest.raises(KeyUnavailable, match="is unavailable"):
            Pkcs11Keys.open(module or softhsm.module, label or softhsm.label, softhsm.pin)
