"""What is in certificate files, checked before anything is served with it."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from baton.servicekit.errors import TlsError
from baton.servicekit.groups import TlsSettings

#: What the library raises for what it cannot read: of a certificate, much of it only when that part is looked at.
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)


@dataclass(frozen=True, slots=True)
class Material:
    """PEM bytes that fit together. expires: when the first of the own chain does; None without one."""

    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    roots: bytes | None = None
    expires: datetime.datetime | None = None


def read_material(tls: TlsSettings, now: datetime.datetime | None = None) -> Material:
    """Raises TlsError for a file that is missing, no PEM or damaged, a certificate out of its time, and a key that is not the certificate's."""
    now = now or datetime.datetime.now(datetime.UTC)
    roots = None
    if tls.ca_file is not None:
        roots = _read("--tls-ca-file", tls.ca_file)
        with _reading("--tls-ca-file", tls.ca_file, "certificate"):
            _check_roots(roots, tls.ca_file, now)
    if tls.cert_file is None or tls.key_file is None:
        return Material(roots=roots)
    key, chain = _read("--tls-key-file", tls.key_file), _read("--tls-cert-file", tls.cert_file)
    with _reading("--tls-cert-file", tls.cert_file, "certificate"):
        certificates = x509.load_pem_x509_certificates(chain)
        for certificate in certificates:
            problem = _out_of_time(certificate, now)
            if problem:
                raise TlsError(f"--tls-cert-file={str(tls.cert_file)!r}: the certificate of {_name(certificate)} {problem}")
        certified = _public_bytes(certificates[0].public_key())
        expires = min(certificate.not_valid_after_utc for certificate in certificates)
    with _reading("--tls-key-file", tls.key_file, "private key without a password"):
        own = _public_bytes(serialization.load_pem_private_key(key, password=None).public_key())
    if own != certified:
        raise TlsError(f"--tls-key-file={str(tls.key_file)!r} is not the key of the certificate in --tls-cert-file={str(tls.cert_file)!r}")
    return Material(chain, key, roots, expires)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag}={str(path)!r}: {error.strerror or error}") from error


@contextlib.contextmanager
def _reading(flag: str, path: Path, what: str) -> Iterator[None]:
    """Whatever is wrong with the file is said of the file: a service that reads it again keeps what it has."""
    try:
        yield
    except _UNREADABLE as error:
        raise TlsError(f"{flag}={str(path)!r} holds no PEM {what} that can be read") from error


def _check_roots(pem: bytes, path: Path, now: datetime.datetime) -> None:
    """A bundle may carry some that are out of time; not only such."""
    found = x509.load_pem_x509_certificates(pem)
    problems = [_out_of_time(certificate, now) for certificate in found]
    if all(problems):
        raise TlsError(f"--tls-ca-file={str(path)!r}: the certificate of {_name(found[0])} {problems[0]}")


def _public_bytes(key: CertificatePublicKeyTypes | PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _out_of_time(certificate: x509.Certificate, now: datetime.datetime) -> str:
    """What is wrong; empty when nothing is."""
    if certificate.not_valid_after_utc <= now:
        return f"has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
    if certificate.not_valid_before_utc > now:
        return f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC on, which is yet to come"
    return ""


def _name(certificate: x509.Certificate) -> str:
    return repr(certificate.subject.rfc4514_string() or f"serial number {certificate.serial_number:x}")
