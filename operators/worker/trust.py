"""Which certificates a client of a coordinator trusts, and what is wrong where it does not.

One rule for workers, drivers and the command line: the authorities that it was given, and no others; without any those of the
system."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path

from holdfast.statebackends.errors import InvalidConfigError, TransportSecurityError
from holdfast.statebackends.layout import CA_FILE

CA_BYTES_MAX = 1024 * 1024

_NOT_YET, _EXPIRED, _WRONG_NAMES = 9, 10, (62, 64)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, ..._CERT_HAS_EXPIRED, ..._HOSTNAME_MISMATCH and ..._IP_ADDRESS_MISMATCH."""
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"})
_NOTHING_SHARED = ("HANDSHAKE_FAILURE", "PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS", "NO_CIPHERS", "NO_SHARED")


def read_authorities(path: str | os.PathLike[str]) -> str:
    """Certificates in a PEM file. Raises InvalidConfigError naming the file."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(CA_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"can't read the certificates in {path}: {error}", setting="ca", path=str(path)) from error
    check_authorities(text, origin=str(path))
    return text


def check_authorities(authorities: str, *, origin: str) -> None:
    """Raise InvalidConfigError for a text that holds no certificates. `origin`: what messages call it."""
    try:
        ssl.create_default_context(cadata=authorities or "none")  # an empty text would stand for the system's
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfigError(f"{origin} holds no certificate in PEM", setting="ca", path=origin) from error


def authorities_of(state_directory: str | None) -> str | None:
    """What a coordinator of the directory published there; None where nothing can be read."""
    try:
        return read_authorities(Path(state_directory) / CA_FILE) if state_directory else None
    except InvalidConfigError:
        return None


@functools.lru_cache(maxsize=16)
def client_context(authorities: str | None) -> ssl.SSLContext:
    """TLS of a client: TLS 1.2 or later, names are checked. `authorities`: PEM; None: those of the system."""
    context = ssl.create_default_context(cadata=authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def transport_failure(error: BaseException, url: str) -> TransportSecurityError | None:
    """What a failed request says about TLS; None if it failed for another reason."""
    found = _ssl_error(error)
    if found is None:
        return None
    said = str(getattr(found, "reason", None) or "")
    if isinstance(found, ssl.SSLCertVerificationError):
        reason, text = _of_certificate(found)
    elif said in _NO_TLS:
        reason, text = "no_tls", "it answers without TLS: its URL begins with http://"
    elif any(part in said for part in _NOTHING_SHARED):
        reason, text = "handshake", f"no TLS that both sides know: {said}"
    else:
        return None  # the connection broke, as any may
    return TransportSecurityError(f"can't talk to the coordinator at {url} securely: {text}", url=url, reason=reason)


def _of_certificate(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    if error.verify_code == _EXPIRED:
        return "expired", "by the clock of this machine its certificate has expired"
    if error.verify_code == _NOT_YET:
        return "not_yet_valid", "by the clock of this machine its certificate is not valid yet"
    if error.verify_code in _WRONG_NAMES:
        return "wrong_name", f"its certificate is for another host: {error.verify_message}"
    how = "give the authority with --ca, ca= of the Environment or HOLDFAST_CA, or --state-dir"
    text = f"its certificate is not trusted ({error.verify_message}): {how}"
    return "untrusted", text


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """In the causes of an error; urllib3 wraps it."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None or isinstance(seen, ssl.SSLError):
            return seen
        inner = next((each for each in (*seen.args, getattr(seen, "reason", None)) if isinstance(each, BaseException)), None)
        seen = inner or seen.__cause__ or seen.__context__
    return None
