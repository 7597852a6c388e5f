"""One tree of exceptions, mapped to gRPC status once: `to_status`.

Raise these anywhere on the host side; only the servicers turn them into gRPC status. An exception of any other kind
is a bug, INTERNAL to the client, with an id that is in the log.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "npuserve.dev"
"""ErrorInfo.domain: whose reasons these are."""
MAX_VIOLATIONS = 64
"""Bad fields that are kept of one request."""
MAX_PATH_BYTES = 64
"""Length limit of a bad field's path."""
MAX_DESCRIPTION_BYTES = 800
"""Length limit of one description."""
MAX_VIOLATIONS_BYTES = 7000
"""Length limit of all bad fields of one error, as they are encoded in headers: clients take 8 KiB of headers."""


class ServeError(Exception):
    """A request's documented end other than an answer. `message` is for the client: whole, and free of prompts."""

    code: int = code_pb2.INTERNAL

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    @property
    def logged(self) -> str:
        """What the log and the trace say of it: nothing that a client wrote."""
        return self.message

    @classmethod
    def reason(cls) -> str:
        """Return ErrorInfo.reason, the class's name in upper snake case: INVALID_FIELD for InvalidField."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).upper()

    def details(self) -> list[Message]:
        """Return the google.rpc messages that travel with the status."""
        return [error_details_pb2.ErrorInfo(reason=self.reason(), domain=DOMAIN)]


class InvalidField(ServeError):
    """One or more fields are out of range. The message names each field and says what is allowed.

    field: path of the first one. violations: (path, description) of each, as many as fit MAX_VIOLATIONS_BYTES.
    Long paths and descriptions are cut.
    """

    code = code_pb2.INVALID_ARGUMENT

    def __init__(self, field: str, description: str, *others: tuple[str, str], omitted: int = 0):
        """others: further violations. omitted: number of violations that are left out."""
        kept: list[tuple[str, str]] = []
        left = MAX_VIOLATIONS_BYTES
        for path, text in ((field, description), *others):
            violation = _cut(path, MAX_PATH_BYTES), _cut(text, MAX_DESCRIPTION_BYTES)
            left -= _header_bytes(*violation)
            if left < 0:
                break
            kept.append(violation)
        omitted += 1 + len(others) - len(kept)
        self.violations = tuple(kept)
        self.field = kept[0][0]
        listed = "; ".join(f"{path}: {text}" for path, text in self.violations)
        super().__init__(listed + (f"; and {omitted} more" if omitted else ""))

    @property
    def logged(self) -> str:
        paths = (path.partition(".template_args") for path, _ in self.violations)  # the client's own names follow
        return f"InvalidField: {', '.join(path + own for path, own, _ in paths)}"

    def details(self) -> list[Message]:
        found = [error_details_pb2.BadRequest.FieldViolation(field=path, description=text)
                 for path, text in self.violations]
        return [*super().details(), error_details_pb2.BadRequest(field_violations=found)]


class Violations:
    """Collector of bad fields, so that one error names them all."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []
        self._omitted = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        if len(self._found) < MAX_VIOLATIONS:
            self._found.append((field, description))
        else:
            self._omitted += 1

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Add the fields of an InvalidField that the body raises."""
        try:
            yield
        except InvalidField as error:
            for field, description in error.violations:
                self.add(field, description)

    def check(self) -> None:
        """Raise InvalidField if a field was added."""
        if self._found:
            first, *others = self._found
            raise InvalidField(*first, *others, omitted=self._omitted)


class MalformedRequest(ServeError):
    """The request is not the protobuf message that the method takes."""

    code = code_pb2.INVALID_ARGUMENT


class CompressedMessage(ServeError):
    """The request's message is compressed."""

    code = code_pb2.UNIMPLEMENTED


class MessageTooLarge(ServeError):
    """The request's message has more bytes, or more fields and items, than any request of this model needs."""

    code = code_pb2.RESOURCE_EXHAUSTED


class ModelNotFound(ServeError):
    code = code_pb2.NOT_FOUND

    @property
    def logged(self) -> str:
        return "ModelNotFound"


class RequestNotFound(ServeError):
    code = code_pb2.NOT_FOUND


class StreamNotFound(ServeError):
    """No stream has this resume token, or it belongs to another caller."""

    code = code_pb2.NOT_FOUND


class DuplicateRequest(ServeError):
    """The request_id is that of a live request."""

    code = code_pb2.ALREADY_EXISTS


class NoTokenizer(ServeError):
    """The model's folder has no tokenizer, and the request needs it."""

    code = code_pb2.FAILED_PRECONDITION


class NoChatTemplate(ServeError):
    """The model's folder has no chat template, and the request needs it."""

    code = code_pb2.FAILED_PRECONDITION


class Reserved(ServeError):
    """A field or call that this version does not fill."""

    code = code_pb2.UNIMPLEMENTED

    def __init__(self, field: str):
        super().__init__(f"{field}: reserved, not implemented in this version")


class Unauthenticated(ServeError):
    code = code_pb2.UNAUTHENTICATED


class PermissionDenied(ServeError):
    code = code_pb2.PERMISSION_DENIED


class DeadlineExceeded(ServeError):
    """The deadline passed, or cannot be met, before a first token."""

    code = code_pb2.DEADLINE_EXCEEDED


class Retryable(ServeError):
    """Worth trying again after `retry_seconds`."""

    retry_seconds = 1.0

    def __init__(self, message: str, retry_seconds: float | None = None):
        super().__init__(message)
        if retry_seconds is not None:
            self.retry_seconds = retry_seconds

    def details(self) -> list[Message]:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_seconds * 1e9))
        return [*super().details(), error_details_pb2.RetryInfo(retry_delay=delay)]


class QueueFull(Retryable):
    """why: queue_full, displaced by another client's request, client_limit, or timeout."""

    code = code_pb2.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_seconds: float | None = None, why: str = "queue_full"):
        super().__init__(message, retry_seconds)
        self.why = why


class SlowReader(ServeError):
    """The client did not take what was made for it. The stream can be resumed."""

    code = code_pb2.CANCELLED


class Unavailable(Retryable):
    """The engine is starting, restarting or draining."""

    code = code_pb2.UNAVAILABLE


class InternalError(ServeError):
    code = code_pb2.INTERNAL


class EngineKiller(ServeError):
    """The engine died of this request, which was shown by running it alone (blame.py)."""

    code = code_pb2.INTERNAL


class TakenOver(ServeError):
    """Another call reads the stream now."""

    code = code_pb2.ABORTED


WireError = tuple[str, str, float]
"""An error between processes: its class's name, its message, and seconds until it is worth trying again, or 0."""


def to_wire(error: ServeError) -> WireError:
    return type(error).__name__, error.message, error.retry_seconds if isinstance(error, Retryable) else 0.0


def from_wire(wire: WireError) -> ServeError:
    """What `to_wire` was given; InternalError for a class that does not travel."""
    name, message, retry_seconds = wire
    if name == "InvalidField":
        field, _, text = message.partition(": ")
        return InvalidField(field, text)
    for retryable in (QueueFull, Unavailable):
        if name == retryable.__name__:
            return retryable(message, retry_seconds)
    plain: dict[str, type[ServeError]] = {
        kind.__name__: kind for kind in (DuplicateRequest, DeadlineExceeded, EngineKiller, StreamNotFound, TakenOver)}
    return plain.get(name, InternalError)(message)


def _header_bytes(path: str, description: str) -> int:
    """Return the bytes of a bad field in headers: in grpc-message with percent-encoding, and twice with base64."""
    text = f"{path}: {description}; ".encode()
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in text)
    return encoded + (2 * len(text) + 8) * 4 // 3


def _cut(text: str, most: int) -> str:
    """Return the text, cut to `most` bytes of UTF-8."""
    data = text.encode(errors="replace")
    return (data if len(data) <= most else data[: most - 3] + b"...").decode(errors="ignore")


def to_status(error: ServeError) -> status_pb2.Status:
    """The gRPC status with its details, for grpc_status.rpc_status.to_status."""
    status = status_pb2.Status(code=error.code, message=error.message)
    for detail in error.details():
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
