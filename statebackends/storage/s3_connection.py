"""Connection to one S3 endpoint: a boto3 client made on first use, retries, and the meaning of failed requests.

boto3 finds credentials, region and endpoint as usual (AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION, profiles, roles ...). Its own
retries are off: it would repeat a conditional create, and report its own success as another writer's.

For a failed request it decides whether it may be repeated, whether it may have happened, and which error the caller gets. It knows
boto's exceptions and S3's error codes, and no operation. It can be imported without boto3, and loads it and tenacity on first
use, which most processes never come to; `load` does so early."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from holdfast.statebackends.errors import (
    HoldfastError,
    InvalidConfigError,
    ObjectMissingError,
    OutOfSpaceError,
    StorageAccessError,
    StorageThrottledError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage.transfers import TransferPool


class FailureKind(StrEnum):
    """Kinds of failed requests, by what the caller does."""

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
    """Another request for the same name was under way, and this one did nothing: 409."""
    RANGE = "range"
    """The object has no bytes at the offset: 416."""
    THROTTLED = "throttled"
    """The store refused the request without reading it."""
    UNREACHED = "unreached"
    """The request did not reach the store."""
    UNCLEAR = "unclear"
    """There is no answer, or one that does not say whether the request was done."""
    FULL = "full"
    """A quota is used up, or the store has no space: 507. The store has answered; some of its disks may have the object."""
    UNSUPPORTED = "unsupported"
    """The store does not know this request: 501."""
    INVALID = "invalid"
    """A name or setting that no store accepts."""
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
"""HTTP status -> kind, for answers without a known code; a HEAD's answer has no code."""

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
"""Name of botocore's exception class -> kind; the most derived listed class counts. Other exceptions mean a wrong setting."""


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
    """The RequestFailure for an exception of botocore. Raises any other exception again: it is a bug."""
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
        # 200 with an error in its body (CompleteMultipartUpload answers before it is done) is as unclear as 500
        unclear = status >= 500 or status == 200
        kind = _STATUS.get(status, FailureKind.UNCLEAR if unclear else FailureKind.OTHER)
    return RequestFailure(kind, code if not code.isdecimal() else f"HTTP {status}", text or f"HTTP {status}")


def failure_of_entry(code: str, message: str) -> RequestFailure:
    """The RequestFailure for one object of several in a request."""
    return RequestFailure(_CODES.get(code, FailureKind.OTHER), code, message or code)


def error_of(failure: RequestFailure, doing: str, bucket: str, key: str) -> HoldfastError:
    """The error for a failed request. `doing`: the operation and its path, for the message."""
    place: dict[str, Any] = {"path": f"s3://{bucket}/{key}", "bucket": bucket, "key": key}
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


T = TypeVar("T")

_READ_BYTES = 1 << 20
PART_BYTES_MIN = 5 << 20
"""S3's lower bound for all parts of a multipart upload but the last, bytes."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Settings of a connection. Times in ms, sizes in bytes; None leaves the choice to boto3."""

    endpoint_url: str | None = None
    region: str | None = None
    connect_timeout_ms: int = 5_000
    read_timeout_ms: int = 15_000
    """Silence on a connection after which a request fails."""
    retry_timeout_ms: int = 30_000
    """Time during which a request is repeated; the last try may end later."""
    backoff_first_ms: int = 50
    backoff_max_ms: int = 5_000
    part_bytes: int = 8 << 20
    """Objects above this size are sent and fetched in parts of it."""
    parts_in_flight_max: int = 4
    """Parts under way, of one operation and of all together; an operation holds up to twice as many in memory."""
    transfers_in_flight_max: int = 8
    """Files of one group that are sent or fetched at one time."""
    transfer_bytes_max: int = 64 << 20
    """Bytes in memory of the files of all groups; a single file may take more (see `parts_in_flight_max`)."""

    def check(self) -> None:
        """Raise InvalidConfigError naming the first setting out of bounds."""
        positive = ("connect_timeout_ms", "read_timeout_ms", "backoff_first_ms", "backoff_max_ms", "parts_in_flight_max")
        for name in (*positive, "transfers_in_flight_max", "transfer_bytes_max"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {getattr(self, name)}", setting=name)
        if self.retry_timeout_ms < 0:
            raise InvalidConfigError(
                f"retry_timeout_ms must not be negative, got {self.retry_timeout_ms}", setting="retry_timeout_ms"
            )
        if self.part_bytes < PART_BYTES_MIN:
            raise InvalidConfigError(f"part_bytes must be at least {PART_BYTES_MIN}, got {self.part_bytes}", setting="part_bytes")


_ALWAYS_TOLD = {
    "complete_multipart_upload": "ETag",
    "create_multipart_upload": "UploadId",
    "get_object": "ETag",
    "head_object": "ETag",
    "list_objects_v2": "IsTruncated",
    "put_object": "ETag",
    "upload_part": "ETag",
    "upload_part_copy": "CopyPartResult",
}
"""Request -> field that each answer of S3 has. A proxy's page with status 200 lacks it, and would pass for a write that was done,
or for the listing of an empty folder."""


class S3Connection:
    """Connection that all storages on one endpoint share. Thread-safe. boto3 is imported at the first request."""

    def __init__(
        self,
        settings: S3Settings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        connect: Callable[[S3Settings], Any] | None = None,
    ) -> None:
        """`clock` and `sleep`: in seconds. `uniform` draws between two bounds. `connect` makes the client."""
        self.settings = settings if settings is not None else S3Settings()
        self.settings.check()
        self._clock, self._sleep, self._uniform = clock, sleep, uniform
        self._connect = connect or _make_client
        self._lock = threading.Lock()
        self._client: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._checks: set[tuple[str, str]] = set()
        settings = self.settings
        single_bytes_max = 2 * settings.parts_in_flight_max * settings.part_bytes
        self.transfers = TransferPool(settings.transfers_in_flight_max, settings.transfer_bytes_max, single_bytes_max)
        """Pool of all storages on this endpoint."""

    def request(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Send one request, once, whose answer has no body to read. Raises RequestFailure."""
        client = self._connected()
        try:
            answer: dict[str, Any] = getattr(client, name)(**arguments)
        except Exception as error:
            raise failure_of(error) from error
        told = _ALWAYS_TOLD.get(name)
        if told is not None and told not in answer:
            if "Body" in answer:
                answer["Body"].close()
            raise RequestFailure(
                FailureKind.UNCLEAR, "", f"the answer to {name} is none of a store that speaks S3: it has no {told}"
            )
        return answer

    def fetch(self, **arguments: Any) -> tuple[dict[str, Any], bytearray]:
        """GET an object, once: (answer, whole body). Raises RequestFailure."""
        answer = self.request("get_object", **arguments)
        body, data = answer["Body"], bytearray()
        try:
            while chunk := body.read(_READ_BYTES):  # a single read would hold the body twice
                data += chunk
            return answer, data
        except Exception as error:  # a body that ends early is no answer
            raise failure_of(error) from error
        finally:
            body.close()

    def repeated(self, action: Callable[[], T], *, timeout_ms: int | None = None) -> T:
        """Run an action, again while it fails with a RETRYABLE kind and time is left; returns its result.

        `timeout_ms`: instead of `retry_timeout_ms`. Raises the last RequestFailure."""
        import tenacity

        allowed_ms = self.settings.retry_timeout_ms if timeout_ms is None else timeout_ms
        deadline = self._clock() + allowed_ms / 1000
        longest = tenacity.wait_exponential(
            multiplier=self.settings.backoff_first_ms / 1000, max=self.settings.backoff_max_ms / 1000
        )
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, RequestFailure) and error.kind in RETRYABLE),
            wait=lambda state: self._uniform(0.0, longest(state)),
            stop=lambda state: self._clock() + state.upcoming_sleep >= deadline,
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(action)

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """`request`, repeated as in `repeated`; for idempotent requests. Raises RequestFailure."""
        return self.repeated(lambda: self.request(name, **arguments))

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run an action on the threads that send and fetch parts. Raises StorageUnavailableError if the system has no more threads;
        the action may run all the same."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.settings.parts_in_flight_max, thread_name_prefix="holdfast-s3")
            pool = self._pool
        try:
            return pool.submit(action)
        except RuntimeError as error:  # the pool starts its threads one by one
            raise StorageUnavailableError(f"parts can't be sent or fetched now: {error}") from error

    def once(self, check: str, bucket: str, action: Callable[[], None]) -> None:
        """Run a check of a bucket, unless it has passed on this connection before."""
        with self._lock:
            passed = (check, bucket) in self._checks
        if not passed:
            action()
            with self._lock:
                self._checks.add((check, bucket))

    def close(self) -> None:
        """Release connections and threads; a later request makes new ones."""
        with self._lock:
            client, self._client = self._client, None
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect(self.settings)
            return self._client


def check_installed() -> None:
    """Raise InvalidConfigError naming the package to install, if boto3 is missing."""
    try:
        import boto3  # noqa: F401 - its absence is the finding
        import botocore.config  # noqa: F401
    except ImportError as error:
        raise InvalidConfigError(
            f"storage on S3 needs boto3 ({error}), which comes with holdfast: pip install boto3, here and wherever workers run",
            package="boto3",
        ) from error


def load() -> None:
    """Import what the first request needs. Opens, starts and sends nothing. Raises InvalidConfigError without boto3."""
    check_installed()
    import boto3.s3.inject  # a client imports it when it is made
    import boto3.session  # noqa: F401
    import botocore.session  # noqa: F401
    import tenacity  # noqa: F401


def _make_client(settings: S3Settings) -> Any:
    check_installed()
    import boto3
    import botocore.session
    from botocore.config import Config

    config = Config(
        connect_timeout=settings.connect_timeout_ms / 1000,
        read_timeout=settings.read_timeout_ms / 1000,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=32,
        user_agent_extra="holdfast",
    )
    try:
        found = botocore.session.Session()  # a session of its own looks for credentials again
        descriptions = _descriptions(found.get_config_variable("data_path"))
        found.register_component("data_loader", descriptions)
        with _making_session:
            session = boto3.session.Session(botocore_session=found)
            descriptions.search_paths[:] = dict.fromkeys(descriptions.search_paths)  # each session adds boto3's folder
        return session.client("s3", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config)
    except Exception as error:
        failure = failure_of(error) if not isinstance(error, ValueError) else RequestFailure(FailureKind.INVALID, "", str(error))
        raise failure from error


_making_session = threading.Lock()
"""Guards the list of folders in which clients' descriptions are searched."""


@functools.cache
def _descriptions(folders: str | None) -> Any:
    """Loader of botocore's descriptions of S3, in `folders` (AWS_DATA_PATH) and in its own folder.

    One for the process: of the 80 ms to make a client, reading descriptions takes 65."""
    from botocore.loaders import create_loader

    return create_loader(folders)
