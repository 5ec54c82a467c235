"""Certificates of `--tls-cert` and `--tls-key`: read and judged before a server uses them.

What a browser or worker would refuse is refused here, by name: a key of another certificate, one with a pass phrase, an expired
certificate. A pair that is being replaced file by file is for a moment such a pair, too."""

from __future__ import annotations

import datetime
import logging
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from holdfast.api.tls.authority import Pair
from holdfast.statebackends.errors import InvalidConfigError

log = logging.getLogger("holdfast.tls")

FILE_BYTES_MAX = 1024 * 1024


def read_pair(certificate: Path, key: Path, now: datetime.datetime) -> Pair:
    """The pair in two files. Raises InvalidConfigError naming the file and what is wrong with it."""
    chain_pem, key_pem = _read(certificate, "tls_cert"), _read(key, "tls_key")
    if key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("the key %s can be read by other users: chmod 600 it", key)
    check_pair(Pair(chain_pem, key_pem), now, certificate=str(certificate), key=str(key))
    return Pair(chain_pem, key_pem)


def check_pair(pair: Pair, now: datetime.datetime, *, certificate: str, key: str) -> None:
    """Raise InvalidConfigError unless clients would take the pair now. `certificate`, `key`: what messages call them."""
    try:
        found = x509.load_pem_x509_certificates(pair.certificate_pem)[0]
    except ValueError as error:
        raise InvalidConfigError(f"{certificate} holds no certificate in PEM", setting="tls_cert", path=certificate) from error
    try:
        private = load_pem_private_key(pair.key_pem, None)
    except TypeError as error:
        text = f"the key {key} has a pass phrase, which nobody could type at a restart: give one without"
        raise InvalidConfigError(text, setting="tls_key", path=key) from error
    except ValueError as error:
        raise InvalidConfigError(f"{key} holds no private key in PEM", setting="tls_key", path=key) from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*form) != found.public_key().public_bytes(*form):
        raise InvalidConfigError(f"the key {key} is not that of the certificate {certificate}", setting="tls_key", path=key)
    if now >= found.not_valid_after_utc:
        text = f"the certificate {certificate} expired at {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise InvalidConfigError(text, setting="tls_cert", path=certificate)
    if now < found.not_valid_before_utc:
        text = f"the certificate {certificate} is valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; by the clock of "
        raise InvalidConfigError(f"{text}this machine it is {now:%Y-%m-%d %H:%M}", setting="tls_cert", path=certificate)


def expires_at(pair: Pair) -> datetime.datetime:
    """End of a pair's certificate."""
    return x509.load_pem_x509_certificates(pair.certificate_pem)[0].not_valid_after_utc


def hosts_in(pair: Pair) -> frozenset[str]:
    """Host names and addresses that a pair's certificate is for, in lower case."""
    certificate = x509.load_pem_x509_certificates(pair.certificate_pem)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    found = {str(name).lower() for name in names.get_values_for_type(x509.DNSName)}
    return frozenset(found | {str(address) for address in names.get_values_for_type(x509.IPAddress)})


def _read(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfigError(f"can't read {path}: {error.strerror or error}", setting=setting, path=str(path)) from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes", setting=setting, path=str(path))
    return content
