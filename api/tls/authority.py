"""Certificates of `--tls auto`: an authority of the state directory's own, and the certificates of its members. Pure.

The authority is drawn once (put-if-absent), so that all members of a directory have one, and whoever trusts it trusts the next
member, too. A member's certificate is made anew at each start and well before its end; nothing stores it."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import AUTHORITY_FILE

AUTHORITY_DAYS = 3_650
MEMBER_DAYS = 30
"""A member's certificate is made anew when half of it is over."""
BACKDATED_DAYS = 2
"""Certificates begin so long ago: a client whose clock is a day behind takes them."""
NAMES_MAX = 100
_NAME_CHARACTERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Authority:
    """The key, which never leaves the state directory, and the certificate that clients trust."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def stored(self) -> bytes:
        """Key and certificate, as they are stored."""
        return pem_of_key(self.key) + self.certificate_pem


@dataclass(frozen=True, slots=True)
class Pair:
    """A server's certificate, with what leads to its authority, and its key; both PEM."""

    certificate_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        return "Pair(...)"


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def draw_authority(now: datetime.datetime) -> Authority:
    """A new authority. `now`: with a time zone."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Holdfast authority {secrets.token_hex(4)}")])
    usage = _usage(signs_certificates=True)
    certificate = (
        _certificate(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def read_authority(content: bytes) -> Authority:
    """Raises CorruptStateError for a file that holds no key and certificate that belong to each other."""
    try:
        key = load_pem_private_key(content, None)
        certificate = x509.load_pem_x509_certificate(content)
    except (ValueError, TypeError) as error:
        raise CorruptStateError(f"{AUTHORITY_FILE} holds no authority", path=AUTHORITY_FILE, reason="not PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        text = f"key and certificate in {AUTHORITY_FILE} don't belong to each other"
        raise CorruptStateError(text, path=AUTHORITY_FILE, reason="foreign key")
    return Authority(key, certificate)


def issue_pair(authority: Authority, hosts: Iterable[str], now: datetime.datetime) -> Pair:
    """A member's certificate for these host names and addresses, NAMES_MAX at most."""
    named = list(dict.fromkeys(hosts))[:NAMES_MAX]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, named[0][:_NAME_CHARACTERS_MAX])])
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    end = authority.certificate.not_valid_after_utc
    certificate = (
        _certificate(subject, authority.certificate.subject, key.public_key(), now, MEMBER_DAYS, until=end)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in named]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(Encoding.PEM), pem_of_key(key))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
    *,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=BACKDATED_DAYS))
        .not_valid_after(end if until is None else min(end, until))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
