"""What a failed request to S3 means: may it be repeated, may it have happened, and what is its caller told?

Knows boto's exceptions and S3's error codes, and no operation. It needs no boto installed to be imported."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from holdfast.statebackends.errors import (
    HoldfastError,
    InvalidConfigError,
    ObjectMissingError,
    OutOfSpaceError,
    StorageAccessError,
    StorageThrottledError,
    StorageUnavailableError,
)


class FailureKind(StrEnum):
    """What the caller of one request does differently."""

    MISSING = "missing"
    """No such object."""
    NO_BUCKET = "no bucket"
    NO_UPLOAD = "no upload"
    """The multipart upload was completed or aborted."""
    CREDENTIALS = "credentials"
    DENIED = "denied"
    EXISTS = "exists"
    """A precondition failed: 412."""
    CONFLICT = "conflict"
    """Another request on the same name was under way; this one did nothing: 409."""
    RANGE = "range"
    """Nothing at that offset: 416."""
    THROTTLED = "throttled"
    """Refused unread."""
    UNREACHED = "unreached"
    """The request never got there."""
    UNCLEAR = "unclear"
    """No answer, or one that does not say whether anything was done."""
    FULL = "full"
    """A quota is used up, or the store has no space: 507. It has answered; some of its disks may have the object."""
    UNSUPPORTED = "unsupported"
    """The store does not know this request: 501."""
    INVALID = "invalid"
    """A name or a setting that no store would take."""
    OTHER = "other"


RETRYABLE = frozenset({FailureKind.CONFLICT, FailureKind.THROTTLED, FailureKind.UNREACHED, FailureKind.UNCLEAR})

_CODES = {
    "NoSuchKey": FailureKind.MISSING,
    "NoSuchBucket": FailureKind.NO_BUCKET,
    "NoSuchUpload": FailureKind.NO_UPLOAD,
    "InvalidAccessKeyId": FailureKind.CREDENTIALS,
    "SignatureDoesNotMatch": FailureKind.CREDENTIALS,
    "ExpiredToken": FailureKind.CREDENTIALS,
    "InvalidToken": FailureKind.CREDENTIALS,
    "TokenRefreshRequired": FailureKind.CREDENTIALS,
    "RequestTimeTooSkewed": FailureKind.CREDENTIALS,
    "AuthorizationHeaderMalformed": FailureKind.CREDENTIALS,
    "AccessDenied": FailureKind.DENIED,
    "PreconditionFailed": FailureKind.EXISTS,
    "ConditionalRequestConflict": FailureKind.CONFLICT,
    "OperationAborted": FailureKind.CONFLICT,
    "InvalidRange": FailureKind.RANGE,
    "SlowDown": FailureKind.THROTTLED,
    "Throttling": FailureKind.THROTTLED,
    "ThrottlingException": FailureKind.THROTTLED,
    "RequestLimitExceeded": FailureKind.THROTTLED,
    "TooManyRequests": FailureKind.THROTTLED,
    "RequestTimeout": FailureKind.UNCLEAR,
    "InternalError": FailureKind.UNCLEAR,
    "ServiceUnavailable": FailureKind.UNCLEAR,
    "InsufficientStorage": FailureKind.FULL,
    "InsufficientCapacity": FailureKind.FULL,
    "QuotaExceeded": FailureKind.FULL,
    "XMinioStorageFull": FailureKind.FULL,
    "XMinioAdminBucketQuotaExceeded": FailureKind.FULL,
    "NotImplemented": FailureKind.UNSUPPORTED,
    "InvalidBucketName": FailureKind.INVALID,
    "KeyTooLongError": FailureKind.INVALID,
}

_STATUS = {
    401: FailureKind.CREDENTIALS,
    403: FailureKind.DENIED,
    404: FailureKind.MISSING,
    409: FailureKind.CONFLICT,
    412: FailureKind.EXISTS,
    416: FailureKind.RANGE,
    429: FailureKind.THROTTLED,
    501: FailureKind.UNSUPPORTED,
    507: FailureKind.FULL,
}
"""For answers without a code that is known, which a HEAD never has."""

_EXCEPTIONS = {
    "EndpointConnectionError": FailureKind.UNREACHED,
    "ConnectTimeoutError": FailureKind.UNREACHED,
    "ProxyConnectionError": FailureKind.UNREACHED,
    "SSLError": FailureKind.UNREACHED,
    "HTTPClientError": FailureKind.UNCLEAR,
    "IncompleteReadError": FailureKind.UNCLEAR,
    "ResponseParserError": FailureKind.UNCLEAR,
    "ChecksumError": FailureKind.UNCLEAR,
    "FlexibleChecksumError": FailureKind.UNCLEAR,
    "NoCredentialsError": FailureKind.CREDENTIALS,
    "PartialCredentialsError": FailureKind.CREDENTIALS,
    "CredentialRetrievalError": FailureKind.CREDENTIALS,
    "TokenRetrievalError": FailureKind.CREDENTIALS,
    "MetadataRetrievalError": FailureKind.CREDENTIALS,
    "SSOError": FailureKind.CREDENTIALS,
    "LoginError": FailureKind.CREDENTIALS,
    "ProfileNotFound": FailureKind.CREDENTIALS,
}
"""By the name of the most special class that is listed; whatever else botocore raises before it sends is a wrong setting."""


class RequestFailure(Exception):
    """One request failed."""

    def __init__(self, kind: FailureKind, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})" if code and code not in message else message)
        self.kind = kind
        self.code = code

    @property
    def may_have_happened(self) -> bool:
        return self.kind is FailureKind.UNCLEAR


def failure_of(error: Exception) -> RequestFailure:
    """What an exception of botocore stands for. Any other exception is raised again: it is a bug."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        return _failure_of_answer(response)
    for kind in type(error).__mro__:
        if kind.__name__ in _EXCEPTIONS and kind.__module__.startswith("botocore."):
            return RequestFailure(_EXCEPTIONS[kind.__name__], "", str(error))
    if type(error).__module__.startswith("botocore."):
        return RequestFailure(FailureKind.INVALID, "", str(error))
    raise error


def _failure_of_answer(response: dict[str, Any]) -> RequestFailure:
    problem = response["Error"]
    code, text = str(problem.get("Code", "")), str(problem.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = _CODES.get(code)
    if kind is None:
        # 200 with an error inside (CompleteMultipartUpload answers before it is done) is as unclear as a 500
        unclear = status >= 500 or status == 200
        kind = _STATUS.get(status, FailureKind.UNCLEAR if unclear else FailureKind.OTHER)
    return RequestFailure(kind, code if not code.isdecimal() else f"HTTP {status}", text or f"HTTP {status}")


def failure_of_entry(code: str, message: str) -> RequestFailure:
    """What went wrong with one object of several in a request."""
    return RequestFailure(_CODES.get(code, FailureKind.OTHER), code, message or code)


def error_of(failure: RequestFailure, doing: str, bucket: str, key: str) -> HoldfastError:
    """The error that says so to people and programs. `doing`: the operation and its path."""
    place = {"path": f"s3://{bucket}/{key}", "bucket": bucket, "key": key}
    match failure.kind:
        case FailureKind.MISSING:
            return ObjectMissingError(f"s3://{bucket}/{key} does not exist", **place)
        case FailureKind.NO_BUCKET:
            return StorageAccessError(f"{doing}: there is no bucket {bucket!r} ({failure})", reason="bucket", **place)
        case FailureKind.CREDENTIALS:
            message = f"{doing}: the credentials for bucket {bucket!r} are missing, wrong or expired: {failure}"
            return StorageAccessError(message, reason="credentials", **place)
        case FailureKind.DENIED:
            message = f"{doing}: access denied: {failure}; without s3:ListBucket S3 says so of objects that do not exist, too"
            return StorageAccessError(message, reason="denied", **place)
        case FailureKind.FULL:
            return OutOfSpaceError(f"{doing}: the store has no space left for us: {failure}", **place)
        case FailureKind.THROTTLED:
            return StorageThrottledError(f"{doing}: throttled: {failure}", **place)
        case FailureKind.UNSUPPORTED | FailureKind.INVALID:
            return InvalidConfigError(f"{doing}: {failure}", **place)
        case _:
            return StorageUnavailableError(f"{doing}: {failure}", **place)
