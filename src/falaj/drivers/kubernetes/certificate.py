"""The certificate by which pods recognize the controller: made once for a home, self-signed, and pinned by the pods."""

from __future__ import annotations

import contextlib
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from falaj.drivers.fsync import sync_directory
from falaj.drivers.processes.attempt_folder import open_private

FROM, UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""It is compared byte by byte, so time proves nothing, and the clocks of nodes may be wrong."""


def ensure_certificate(path: Path) -> Path:
    """Return the PEM file with key and certificate; create it if it does not exist, readable by its owner alone."""
    if path.exists():
        return path
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=open_private) as file:
            file.write(make_certificate())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)
    return path


def public_part(path: Path) -> str:
    """Return the certificate in a PEM file, without the key."""
    text = path.read_text()
    return text[text.index("-----BEGIN CERTIFICATE-----") :]


def make_certificate() -> bytes:
    """Return a new key and its self-signed certificate in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "falaj agent")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
