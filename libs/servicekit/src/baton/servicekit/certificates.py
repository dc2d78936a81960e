"""What is in certificate files, checked before anything is served with it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from baton.servicekit.errors import TlsError
from baton.servicekit.groups import TlsSettings


@dataclass(frozen=True, slots=True)
class Material:
    """PEM bytes that fit together. expires: when the first of the own chain does; None without one."""

    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    roots: bytes | None = None
    expires: datetime.datetime | None = None


def read_material(tls: TlsSettings, now: datetime.datetime | None = None) -> Material:
    """Raises TlsError for a file that is missing or no PEM, a certificate out of its time, and a key that is not the certificate's."""
    now = now or datetime.datetime.now(datetime.UTC)
    roots = None
    if tls.ca_file is not None:
        roots = _read("--tls-ca-file", tls.ca_file)
        _check_roots(roots, tls.ca_file, now)
    if tls.cert_file is None or tls.key_file is None:
        return Material(roots=roots)
    key, chain = _read("--tls-key-file", tls.key_file), _read("--tls-cert-file", tls.cert_file)
    certificates = _parse("--tls-cert-file", tls.cert_file, chain)
    for certificate in certificates:
        problem = _out_of_time(certificate, now)
        if problem:
            raise TlsError(f"--tls-cert-file={str(tls.cert_file)!r}: the certificate of {_name(certificate)} {problem}")
    _check_pair(certificates[0], key, tls)
    return Material(chain, key, roots, min(certificate.not_valid_after_utc for certificate in certificates))


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag}={str(path)!r}: {error.strerror or error}") from error


def _parse(flag: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise TlsError(f"{flag}={str(path)!r} holds no PEM certificate that can be read") from error


def _check_roots(pem: bytes, path: Path, now: datetime.datetime) -> None:
    """A bundle may carry some that are out of time; not only such."""
    found = _parse("--tls-ca-file", path, pem)
    problems = [_out_of_time(certificate, now) for certificate in found]
    if all(problems):
        raise TlsError(f"--tls-ca-file={str(path)!r}: the certificate of {_name(found[0])} {problems[0]}")


def _check_pair(certificate: x509.Certificate, key: bytes, tls: TlsSettings) -> None:
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise TlsError(f"--tls-key-file={str(tls.key_file)!r} holds no PEM private key without a password") from error
    public = [part.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for part in (private.public_key(), certificate.public_key())]
    if public[0] != public[1]:
        raise TlsError(f"--tls-key-file={str(tls.key_file)!r} is not the key of the certificate in --tls-cert-file={str(tls.cert_file)!r}")


def _out_of_time(certificate: x509.Certificate, now: datetime.datetime) -> str:
    """What is wrong; empty when nothing is."""
    if certificate.not_valid_after_utc <= now:
        return f"has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
    if certificate.not_valid_before_utc > now:
        return f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC on, which is yet to come"
    return ""


def _name(certificate: x509.Certificate) -> str:
    return repr(certificate.subject.rfc4514_string() or f"serial number {certificate.serial_number:x}")
