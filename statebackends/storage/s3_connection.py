"""The way to one S3 endpoint: a client of boto3, made on first use, and how requests are repeated.

boto3 finds credentials, region and endpoint as it always does (AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION, profiles, roles ...).
Its own retries are off: it would repeat a conditional create and report its own success as somebody else's.

What a failed request to S3 means: may it be repeated, may it have happened, and what is its caller told?

Knows boto's exceptions and S3's error codes, and no operation. It needs no boto installed to be imported."""

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

import tenacity

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
"""S3's bound for all parts of a multipart upload but the last."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Times in ms. Two settings of None leave the choice to boto3."""

    endpoint_url: str | None = None
    region: str | None = None
    connect_timeout_ms: int = 5_000
    read_timeout_ms: int = 15_000
    """Silence on a connection after which a request is given up."""
    retry_timeout_ms: int = 30_000
    """How long one request is repeated; the last try may end after it."""
    backoff_first_ms: int = 50
    backoff_max_ms: int = 5_000
    part_bytes: int = 8 << 20
    """Objects above this size are sent and fetched in parts of it."""
    parts_in_flight_max: int = 4
    """Of one operation, and of all operations together; an operation holds up to twice as many in memory."""
    transfers_in_flight_max: int = 8
    """Files of one group that are sent or fetched at one time."""
    transfer_bytes_max: int = 64 << 20
    """Of files in memory at one time, in all groups together; a single one may hold more (see `parts_in_flight_max`)."""

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
"""What each answer of S3 has. A proxy's page with status 200 has none of it: taken for an answer, it would be a write that was
never done, or a listing of a folder that is not empty."""


class S3Connection:
    """Shared by all storages on one endpoint; thread-safe. Nothing is sent, and boto3 not imported, before the first request."""

    def __init__(
        self,
        settings: S3Settings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
        connect: Callable[[S3Settings], Any] | None = None,
    ) -> None:
        """`clock` and `sleep` in seconds; `uniform` draws between two bounds; `connect` makes what stands for boto3's client."""
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
        """Of all storages on this endpoint."""

    def request(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One request, tried once, whose answer has no body to read. Raises RequestFailure."""
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
        """One GET of an object, tried once: the answer and its whole body. Raises RequestFailure."""
        answer = self.request("get_object", **arguments)
        body, data = answer["Body"], bytearray()
        try:
            while chunk := body.read(_READ_BYTES):  # one read of all of it would hold it twice
                data += chunk
            return answer, data
        except Exception as error:  # a body that ends early has told nothing
            raise failure_of(error) from error
        finally:
            body.close()

    def repeated(self, action: Callable[[], T], *, timeout_ms: int | None = None) -> T:
        """What the action returns, which is run again while its failures may pass. Raises the last RequestFailure."""
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
        """One request that may be repeated at will. Raises RequestFailure."""
        return self.repeated(lambda: self.request(name, **arguments))

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run an action on the threads that parts are sent and fetched on."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.settings.parts_in_flight_max, thread_name_prefix="holdfast-s3")
            pool = self._pool
        return pool.submit(action)

    def once(self, check: str, bucket: str, action: Callable[[], None]) -> None:
        """Run a check of a bucket unless it passed before on this connection."""
        with self._lock:
            passed = (check, bucket) in self._checks
        if not passed:
            action()
            with self._lock:
                self._checks.add((check, bucket))

    def close(self) -> None:
        """Give back connections and threads; another request makes them anew."""
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
    """Raise InvalidConfigError, saying what to install, unless boto3 is there."""
    try:
        import boto3  # noqa: F401 - its absence is the finding
        import botocore.config  # noqa: F401
    except ImportError as error:
        raise InvalidConfigError(
            f"storage on S3 needs boto3 ({error}), which comes with holdfast: pip install boto3, here and wherever workers run",
            package="boto3",
        ) from error


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
        found = botocore.session.Session()  # of its own: credentials are found anew
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
"""Over the list of folders that all clients' descriptions are looked for in."""


@functools.cache
def _descriptions(folders: str | None) -> Any:
    """What botocore has on disk about S3, there (AWS_DATA_PATH) or in its own folder.

    Read once a process: of the 80 ms that it takes to make a client, 65 go into reading."""
    from botocore.loaders import create_loader

    return create_loader(folders)
