"""A certificate authority for development, and a certificate for each service that it signs: mutual TLS without waiting for anybody.

    python development_ca.py FOLDER gateway prefill decode
    python development_ca.py FOLDER gateway=gateway.example.org,10.0.0.1 prefill=*.baton-prefill.baton.svc client

writes FOLDER/ca.pem and, for each name, FOLDER/NAME/{cert,key,ca}.pem. A certificate holds for NAME (or the names and addresses behind
`=`), localhost and 127.0.0.1, for servers and clients alike. The authority's key is FOLDER/ca-key.pem: who has it can be any service, so
this is no way to run a fleet that matters. Give clients an authority of their own (another FOLDER): who shows a certificate of the services' may
speak to servers as a gateway does. Called again it keeps the authority, and makes anew what ends within a third of its life; services read
the files again while they run.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_DAYS = 3650
#: Clocks differ: a certificate holds from a little before it was made.
_EARLIER = datetime.timedelta(minutes=5)

Key = ec.EllipticCurvePrivateKey


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="development_ca", description="A certificate authority for development.", epilog="Names: NAME or NAME=HOST,ADDRESS,..."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME[=HOST,...]")
    parser.add_argument("--days", type=float, default=30.0, help="how long certificates hold (default: 30)")
    parser.add_argument(
        "--bundle", type=Path, nargs=2, metavar=("TARGET", "OTHER"), help="write this authority's certificate and those in OTHER to TARGET"
    )
    parser.add_argument("--peers-ca", type=Path, help="what NAME/ca.pem shall hold: who signs those that it talks to (default: this authority)")
    parser.add_argument("--owner", type=int, help="user id that gets the services' files (needs root)")
    options = parser.parse_args(argv)
    if options.days <= 0:
        parser.error(f"--days={options.days:g} must be above 0")
    return options


def main(argv: list[str]) -> int:
    options = arguments(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    ca_cert, ca_key = _authority(options.folder)
    if options.bundle:
        target, other = options.bundle
        _write(target, other.read_bytes() + _pem(ca_cert), options.owner)
    for words in options.names:
        name, _, hosts = words.partition("=")
        if not name or "/" in name or name.startswith("."):
            sys.stderr.write(f"development_ca: {words!r}: a name is a folder's name, as in gateway or gateway=gateway.example.org\n")
            return 2
        folder = options.folder / name
        if _is_fresh(folder / "cert.pem", ca_cert):
            continue
        cert, key = _issue(name, tuple(hosts.split(",")) if hosts else (name,), options.days, ca_cert, ca_key)
        folder.mkdir(exist_ok=True)
        _write(folder / "ca.pem", options.peers_ca.read_bytes() if options.peers_ca else _pem(ca_cert), options.owner)
        _write(folder / "key.pem", _key_pem(key), options.owner)
        _write(folder / "cert.pem", _pem(cert), options.owner)
        if options.owner is not None:
            os.chown(folder, options.owner, options.owner)
        sys.stdout.write(f"{folder}: {', '.join(_names(cert))}, until {cert.not_valid_after_utc:%Y-%m-%d}\n")
    return 0


def _authority(folder: Path) -> tuple[x509.Certificate, Key]:
    """The one that is there, else a fresh one."""
    cert_file, key_file = folder / "ca.pem", folder / "ca-key.pem"
    if cert_file.exists() and key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(key, Key)
        return x509.load_pem_x509_certificate(cert_file.read_bytes()), key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton development authority")])
    cert = (
        _builder(name, name, key.public_key(), _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _key_pem(key), None)
    _write(cert_file, _pem(cert), None)
    return cert, key


def _issue(name: str, hosts: tuple[str, ...], days: float, ca_cert: x509.Certificate, ca_key: Key) -> tuple[x509.Certificate, Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = [_alternative(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    ca_identity = ca_cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    cert = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), ca_cert.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identity), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return cert, key


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key, serial_number=x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names(cert: x509.Certificate) -> list[str]:
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _is_fresh(path: Path, ca_cert: x509.Certificate) -> bool:
    """Signed by this authority, and more than a third of its life to come."""
    if not path.exists():
        return False
    cert = x509.load_pem_x509_certificate(path.read_bytes())
    life = cert.not_valid_after_utc - cert.not_valid_before_utc
    try:
        cert.verify_directly_issued_by(ca_cert)
    except Exception:  # a signature of another key, or of another kind of key: both have exceptions of their own
        return False
    return cert.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > life / 3


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, content: bytes, owner: int | None) -> None:
    """Whole or not at all, readable by its owner only: a service may be reading it."""
    fresh = path.with_name(f".{path.name}.fresh")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    if owner is not None:
        os.chown(fresh, owner, owner)
    fresh.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
