"""A store in an object service: S3, and by the same code Google Cloud Storage and Azure.

Owns: uploads in parts, conditional puts, retries, errors in words without credentials.
Does not own: the requests (obstore, whose one door this is).

Invariants:
- An object appears when its last part is acknowledged; an upload that fails is aborted. What a
  killed process left is not visible, and costs money until the bucket's own rule removes it.
- `put_if_absent` is the service's own condition (If-None-Match: *); a lost answer is told from
  another's object by a token in the object's metadata.
- Every request ends: retries, the time of one and the time of all are bounded.
- No foreign text reaches an error: a service repeats keys and tokens in its own.

Tried against S3's protocol only; gs:// and az:// are the same calls and have never been tried.
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from stepfast.checkpoint.store import check_name
from stepfast.errors import ConfigError, OperatingError, StateError
from stepfast.runtime.ports import Buffer

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

PART_BYTES_MIN = 16 << 20
PARTS_MAX = 9_000  # S3 takes 10,000
UPLOADS_AT_ONCE = 4  # parts in memory for each writer
_TOKEN = "stepfast-writer"  # noqa: S105 - a name in an object's metadata, no secret
_READ_THREADS = 8  # a request waits for its answer, not for a core
_RETRIES: RetryConfig = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
}
_CLIENT: ClientConfig = {
    "connect_timeout": "5s",
    "timeout": "120s",
    "user_agent": "stepfast",
    "allow_http": True,  # where the endpoint that the environment names begins with http: alone
}
_ERRORS = (BaseError, FileNotFoundError, OSError, ValueError)

_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist; make it, or name another one",
    "AccessDenied": "the credentials do not allow it; give them read, write and delete there",
    "403": "the credentials do not allow it; give them read, write and delete there",
    "401": "the credentials are not accepted",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "SlowDown": "the service asks for fewer requests, and did so through all retries",
    "503": "the service is overloaded or away, through all retries",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "301": "the bucket is in another region; set AWS_REGION",
}
_NO_CREDENTIALS = (
    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the"
    " machine or pod a role"
)
# What is asked for a role's credentials, where the environment has none.
_CREDENTIAL_SOURCES = ("/latest/api/token", "/latest/meta-data", "computeMetadata", "/metadata/")


class ObjectStore:
    """Objects below a prefix of a bucket. Credentials, region and endpoint are the environment's:
    AWS_*, GOOGLE_*, AZURE_*, and what a pod's role brings.
    """

    def __init__(self, url: str) -> None:
        """`url`: s3://bucket/prefix. ConfigError where it cannot be one."""
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                "a URL of checkpoints holds no credentials: give scheme://bucket/prefix"
            )
        if not parts.netloc:
            raise ConfigError(f"{parts.scheme}:// needs a bucket: {parts.scheme}://bucket/prefix")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.read_threads = _READ_THREADS
        try:
            self._store: Any = from_url(self.url, client_options=_CLIENT, retry_config=_RETRIES)
        except _ERRORS as error:
            raise _failure(self.url, error) from None

    def writer(self, name: str, size_bytes: int = 0) -> ObjectUpload:
        """Write the object `name`, in the place of what has the name."""
        return ObjectUpload(self._store, check_name(name), self._url(name), size_bytes)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Make the object at once; False: there was one of that name already."""
        check_name(name)
        token = secrets.token_hex(16)
        try:
            obstore.put(self._store, name, data, mode="create", attributes={_TOKEN: token})
        except AlreadyExistsError:
            return self._token_of(name) == token
        except _ERRORS as error:
            raise _failure(self._url(name), error) from None
        return True

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Its bytes from `start`, all there are or `size_bytes`; StateError if fewer, or absent."""
        if size_bytes is None or size_bytes == 0:
            there = self.size_bytes(name)
            if there is None:
                raise StateError(f"{self._url(name)}: there is no such object")
            size_bytes = there - start if size_bytes is None else 0
            if size_bytes < 0 or start > there:
                raise _short(self._url(name), start, size_bytes)
            if size_bytes == 0:
                return b""
        return bytes(self._range(name, start, size_bytes))

    def read_into(self, name: str, start: int, *buffers: memoryview) -> None:
        """Fill the buffers from `start`; StateError where the object has fewer bytes, or is not."""
        if size_bytes := sum(map(len, buffers)):
            came = memoryview(self._range(name, start, size_bytes))
            for buffer in buffers:
                buffer[:], came = came[: len(buffer)], came[len(buffer) :]
        elif self.size_bytes(name) is None:
            raise StateError(f"{self._url(name)}: there is no such object")

    def read_once(self, name: str, start: int, *buffers: memoryview) -> None:
        """As `read_into`: nothing is kept here."""
        self.read_into(name, start, *buffers)

    def size_bytes(self, name: str) -> int | None:
        """The object's size; None: there is none."""
        try:
            return int(obstore.head(self._store, check_name(name))["size"])
        except FileNotFoundError:
            return None
        except _ERRORS as error:
            raise _failure(self._url(name), error) from None

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below `prefix`, sorted."""
        return sorted(self.sizes_bytes(prefix))

    def sizes_bytes(self, prefix: str) -> dict[str, int]:
        """The sizes of all objects below `prefix`, by name."""
        try:
            pages = obstore.list(self._store, prefix.rstrip("/") or None)
            return {str(found["path"]): int(found["size"]) for page in pages for found in page}
        except _ERRORS as error:
            raise _failure(self._url(prefix), error) from None

    def directories(self) -> list[str]:
        """The first parts of all names that have more than one, sorted."""
        try:
            return sorted(map(str, obstore.list_with_delimiter(self._store)["common_prefixes"]))
        except _ERRORS as error:
            raise _failure(self.url, error) from None

    def delete(self, name: str) -> None:
        """Remove the object; fine where there is none."""
        self._delete([check_name(name)])

    def delete_below(self, prefix: str) -> None:
        """Remove all below `prefix`."""
        check_name(prefix.rstrip("/"))
        self._delete(self.names(prefix))

    def delete_remains(self, prefix: str) -> None:
        """Nothing here is visible of writers that are gone: parts of uploads are the bucket's to
        remove (a lifecycle rule for incomplete multipart uploads).
        """

    def _delete(self, names: list[str]) -> None:
        try:
            if names:
                obstore.delete(self._store, names)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _failure(self.url, error) from None
        except _ERRORS as error:
            raise _failure(self.url, error) from None

    def _range(self, name: str, start: int, size_bytes: int) -> Any:
        try:
            data = obstore.get_range(self._store, check_name(name), start=start, length=size_bytes)
        except FileNotFoundError:
            raise StateError(f"{self._url(name)}: there is no such object") from None
        except _ERRORS as error:
            if _STATUS.findall(str(error))[-1:] == ["416"]:
                raise _short(self._url(name), start, size_bytes) from None
            raise _failure(self._url(name), error) from None
        if len(data) != size_bytes:
            raise _short(self._url(name), start, size_bytes)
        return data

    def _token_of(self, name: str) -> str | None:
        try:
            return dict(obstore.get(self._store, name).attributes).get(_TOKEN)
        except _ERRORS as error:
            raise _failure(self._url(name), error) from None

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")


class ObjectUpload:
    """One object in the making: a thread uploads its parts while the next are written."""

    def __init__(self, store: Any, name: str, url: str, size_bytes: int) -> None:
        """Nothing is asked of the service before it is entered."""
        self._store = store
        self._name = name
        self._url = url
        self._part_bytes = max(PART_BYTES_MIN, -(-size_bytes // PARTS_MAX))
        self._written_bytes = 0
        # What was written and not yet taken; None is the end. One part at a time: the rest waits in
        # the uploads themselves.
        self._pieces: queue.Queue[bytes | None] = queue.Queue(maxsize=2)
        self._is_given_up = False
        self._is_whole = False
        self._error: OperatingError | None = None
        self._thread = threading.Thread(target=self._upload, name="stepfast-upload", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def write(self, data: Buffer) -> None:
        """The next bytes; they are copied."""
        self._put(bytes(data))
        self._written_bytes += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_given_up = kind is not None
        try:
            self._put(None)
        except OperatingError:
            pass  # the thread has ended; its error is raised below
        self._thread.join()
        if not self._is_whole and kind is None:
            raise self._error or OperatingError(f"{self._url}: not all bytes arrived")

    def _put(self, piece: bytes | None) -> None:
        while self._thread.is_alive():
            try:
                self._pieces.put(piece, timeout=0.1)
                return
            except queue.Full:
                continue
        raise self._error or OperatingError(f"{self._url}: the upload ended early")

    def _taken(self) -> Iterator[bytes]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        if self._is_given_up:
            raise _GivenUp

    def _upload(self) -> None:
        try:
            obstore.put(
                self._store,
                self._name,
                self._taken(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=UPLOADS_AT_ONCE,
            )
            arrived_bytes = int(obstore.head(self._store, self._name)["size"])
            self._is_whole = arrived_bytes == self._written_bytes
            if not self._is_whole:
                obstore.delete(self._store, self._name)
        except _GivenUp:
            pass  # the upload was aborted, as was wanted
        except _ERRORS as error:
            self._error = _failure(self._url, error)


class _GivenUp(Exception):
    """The writer was left with an error: nothing is to appear."""


def _short(url: str, start: int, size_bytes: int) -> StateError:
    return StateError(f"{url}: bytes {start} to {start + size_bytes} were wanted, it has fewer")


def _failure(url: str, error: BaseException) -> OperatingError:
    """The error in our own words: a service's may repeat keys, tokens and signatures."""
    text = str(error)
    said = [*_CODE.findall(text), *_STATUS.findall(text)]
    if any(source in text for source in _CREDENTIAL_SOURCES):
        return OperatingError(f"{url}: {_NO_CREDENTIALS}")
    for word in said:
        if word in _ADVICE:
            return OperatingError(f"{url}: {_ADVICE[word]} ({said[0]})")
    if said:
        return OperatingError(f"{url}: the service refused with {' '.join(dict.fromkeys(said))}")
    if "HTTP error" in text or "error sending request" in text:
        return OperatingError(
            f"{url}: the service cannot be reached; check the network, AWS_ENDPOINT_URL and the"
            " region"
        )
    return OperatingError(f"{url}: the service failed ({type(error).__name__})")
