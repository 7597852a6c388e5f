"""Errors of requests, as one tree of exceptions, and their mapping to gRPC status (`to_status`).

Any code on the host side may raise them. Only the servicers convert them to gRPC status. An exception of any other type
is a bug: the client gets INTERNAL with an id that is also in the log.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "npuserve.dev"
"""ErrorInfo.domain of all our errors."""
MAX_VIOLATIONS = 64
"""Maximum number of bad fields that are kept per request."""
MAX_PATH_BYTES = 64
"""Maximum length of a bad field's path."""
MAX_DESCRIPTION_BYTES = 800
"""Maximum length of one description."""
MAX_VIOLATIONS_BYTES = 7000
"""Maximum size of all bad fields of one error as encoded in headers. Clients accept 8 KiB of headers."""
MAX_QUOTED_CHARACTERS = 64
_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)"
_ALLOWED = re.compile(
    rf"(?:token id )?must (?:be|have) ((?:in [\[(]{_NUMBER}, {_NUMBER}[\])]|at most {_NUMBER}|{_NUMBER} to {_NUMBER})"
    r"(?: (?:seconds|tokens|ids|entries|strings|characters|bytes))?)", re.ASCII)
_GOT = re.compile(rf", got ({_NUMBER})$", re.ASCII)
"""Range at the beginning, and value at the end, of the description of a bad field."""


class ServeError(Exception):
    """Error that ends a request. `message` is sent to the client and contains no prompt.

    is_behind_messages: the status follows messages that the client has not read, so that its delivery may take long.
    """

    code: int = code_pb2.INTERNAL
    is_behind_messages = False

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    @classmethod
    def received(cls, message: str, retry_seconds: float) -> ServeError:
        """Return the error of a message from another process. retry_seconds: 0 if the error is not retryable."""
        return cls(message)

    @property
    def logged(self) -> str:
        """Return the text for logs and traces. It contains nothing that a client wrote."""
        return self.message

    @classmethod
    def reason(cls) -> str:
        """Return ErrorInfo.reason: the class name in upper snake case, such as INVALID_FIELD for InvalidField."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).upper()

    def details(self) -> list[Message]:
        """Return the google.rpc messages to send with the status."""
        return [error_details_pb2.ErrorInfo(reason=self.reason(), domain=DOMAIN)]


class InvalidField(ServeError):
    """One or more fields are out of range. The message names each field and its allowed values.

    field: path of the first bad field.
    violations: (path, description) of each bad field, as many as fit MAX_VIOLATIONS_BYTES. Long texts are truncated.
    omitted: number of bad fields that `violations` lacks.
    """

    code = code_pb2.INVALID_ARGUMENT

    def __init__(self, field: str, description: str, *others: tuple[str, str], omitted: int = 0):
        """Keep as many violations as fit MAX_VIOLATIONS_BYTES.

        others: further violations.
        omitted: number of violations that the caller left out.
        """
        kept: list[tuple[str, str]] = []
        left = MAX_VIOLATIONS_BYTES
        for path, text in ((field, description), *others):
            violation = _cut(path, MAX_PATH_BYTES), _cut(text, MAX_DESCRIPTION_BYTES)
            left -= _header_bytes(*violation)
            if left < 0:
                break
            kept.append(violation)
        self.omitted = omitted = omitted + 1 + len(others) - len(kept)
        self.violations = tuple(kept)
        self.field = kept[0][0]
        listed = "; ".join(f"{path}: {text}" for path, text in self.violations)
        super().__init__(listed + (f"; and {omitted} more" if omitted else ""))

    @classmethod
    def received(cls, message: str, retry_seconds: float) -> InvalidField:
        field, _, text = message.partition(": ")
        return cls(field, text)

    def converted(self, convert: Callable[[str, str], tuple[str, str]]) -> InvalidField:
        """Return the error with other texts. convert: returns (path, description) of a bad field, given both."""
        first, *others = (convert(*violation) for violation in self.violations)
        return InvalidField(*first, *others, omitted=self.omitted)

    @property
    def logged(self) -> str:
        """Return the path of each bad field, with the allowed range and the value where both are numbers."""
        fields = []
        for path, text in self.violations:
            known_path, separator, _ = path.partition(".template_args")  # the client chose what follows
            fields.append(known_path + separator + _numeric_part(text))
        return f"InvalidField: {', '.join(fields)}"

    def details(self) -> list[Message]:
        fields = [error_details_pb2.BadRequest.FieldViolation(field=path, description=text)
                 for path, text in self.violations]
        return [*super().details(), error_details_pb2.BadRequest(field_violations=fields)]


class TokenizerLimit(Exception):
    """A text exceeds the limits of a tokenizer that encodes in other processes.

    The code that knows the text's field raises InvalidField in its place.
    """


class Violations:
    """Collector of bad fields, so that one error can list all of them."""

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
        """Add the fields of an InvalidField raised in the body."""
        try:
            yield
        except InvalidField as error:
            for field, description in error.violations:
                self.add(field, description)

    def check(self) -> None:
        """Raise InvalidField if any field was added."""
        if self._found:
            first, *others = self._found
            raise InvalidField(*first, *others, omitted=self._omitted)


class MalformedRequest(ServeError):
    """The request is not a valid protobuf message of the method's type."""

    code = code_pb2.INVALID_ARGUMENT


class CompressedMessage(ServeError):
    """The request message is compressed."""

    code = code_pb2.UNIMPLEMENTED


class MessageTooLarge(ServeError):
    """The request message has more bytes, fields or items than any request of this model needs."""

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
    """A live request already has this request_id."""

    code = code_pb2.ALREADY_EXISTS


class NoTokenizer(ServeError):
    """The request needs a tokenizer, and the model's folder has none."""

    code = code_pb2.FAILED_PRECONDITION


class NoChatTemplate(ServeError):
    """The request needs a chat template, and the model's folder has none."""

    code = code_pb2.FAILED_PRECONDITION


class WrongTask(ServeError):
    """The served model is for another task: it generates text, embeds or ranks."""

    code = code_pb2.FAILED_PRECONDITION


class UnknownAnswerFormat(ServeError):
    """The request needs the format of the model's reasoning and tool calls, and the server does not know it."""

    code = code_pb2.FAILED_PRECONDITION


class Reserved(ServeError):
    """The field or call is reserved and not implemented in this version.

    reason: why, and what to do instead.
    """

    code = code_pb2.UNIMPLEMENTED

    def __init__(self, field: str, reason: str = "reserved, not implemented in this version"):
        super().__init__(f"{field}: {reason}")

    @classmethod
    def received(cls, message: str, retry_seconds: float) -> Reserved:
        return cls(message.rpartition(": ")[0])


class TurnedOff(ServeError):
    """A setting of the server turns this call off."""

    code = code_pb2.UNIMPLEMENTED


class ProfileRefused(ServeError):
    """Profiles are off, one is running, none was started, or its trace cannot be made."""

    code = code_pb2.FAILED_PRECONDITION


class EventsExpired(ServeError):
    """The batch of KV events from which the subscriber wants to continue is not kept."""

    code = code_pb2.OUT_OF_RANGE


class EventsLost(ServeError):
    """Batches of KV events are lost for this subscriber."""

    code = code_pb2.DATA_LOSS


class Unauthenticated(ServeError):
    code = code_pb2.UNAUTHENTICATED


class PermissionDenied(ServeError):
    code = code_pb2.PERMISSION_DENIED


class DeadlineExceeded(ServeError):
    """The deadline passed, or cannot be met, before the first token."""

    code = code_pb2.DEADLINE_EXCEEDED


class Retryable(ServeError):
    """Error after which the client may retry in `retry_seconds`."""

    retry_seconds = 1.0

    def __init__(self, message: str, retry_seconds: float | None = None):
        super().__init__(message)
        if retry_seconds is not None:
            self.retry_seconds = retry_seconds

    @classmethod
    def received(cls, message: str, retry_seconds: float) -> Retryable:
        return cls(message, retry_seconds)

    def details(self) -> list[Message]:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(self.retry_seconds * 1e9))
        return [*super().details(), error_details_pb2.RetryInfo(retry_delay=delay)]


class QueueFull(Retryable):
    """A queue or limit is full.

    why: queue_full, displaced (by another client's request), client_limit or timeout.
    """

    code = code_pb2.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_seconds: float | None = None, why: str = "queue_full"):
        super().__init__(message, retry_seconds)
        self.why = why


class SlowReader(ServeError):
    """The client did not read its stream. The stream can be resumed, unless it has several samples.

    Not CANCELLED, which says that the caller cancelled the call.
    """

    code = code_pb2.ABORTED
    is_behind_messages = True


class Unavailable(Retryable):
    """The engine is starting, restarting or draining, or the system lacks a process or a thread for the request."""

    code = code_pb2.UNAVAILABLE


class InternalError(ServeError):
    code = code_pb2.INTERNAL


class EngineKiller(ServeError):
    """The request crashes the engine. Running it alone has confirmed this (engine/crash_tracker.py)."""

    code = code_pb2.INTERNAL


class Aborted(ServeError):
    """Abort ended a request that has no output yet."""

    code = code_pb2.ABORTED


class TakenOver(ServeError):
    """Another call has resumed the stream."""

    code = code_pb2.ABORTED


WireError = tuple[str, str, float]
"""Error as sent between processes: class name, message, and seconds until a retry (0 if not retryable)."""


def to_wire(error: ServeError) -> WireError:
    """Convert an error to the form sent between processes."""
    return type(error).__name__, error.message, error.retry_seconds if isinstance(error, Retryable) else 0.0


def from_wire(wire: WireError) -> ServeError:
    """Convert the form sent between processes to an error; InternalError for a class that this process lacks."""
    name, message, retry_seconds = wire
    classes = {kind.__name__: kind for kind in _subclasses(ServeError)}
    return classes.get(name, InternalError).received(message, retry_seconds)


def _subclasses(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    """Yield the class and all classes derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def _header_bytes(path: str, description: str) -> int:
    """Return the size of a bad field in headers: percent-encoded in grpc-message, and twice in the base64 of the
    details.
    """
    text = f"{path}: {description}; ".encode()
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in text)
    return encoded + (2 * len(text) + 8) * 4 // 3


def _numeric_part(description: str) -> str:
    """Return the allowed range and the refused value in a description; "" unless both are numbers. It holds no text of
    a client."""
    allowed = _ALLOWED.match(description)
    got = _GOT.search(description)
    return f": must be {allowed[1]}, got {got[1]}" if allowed and got else ""


def quoted(text: str) -> str:
    """Return a client's text as a quoted ASCII literal, cut to MAX_QUOTED_CHARACTERS."""
    return ascii(text if len(text) <= MAX_QUOTED_CHARACTERS else text[: MAX_QUOTED_CHARACTERS - 3] + "...")


def _cut(text: str, max_bytes: int) -> str:
    """Truncate the text to `max_bytes` bytes of UTF-8."""
    data = text.encode(errors="replace")
    return (data if len(data) <= max_bytes else data[: max_bytes - 3] + b"...").decode(errors="ignore")


def to_status(error: ServeError) -> status_pb2.Status:
    """Return the gRPC status with its details, as grpc_status.rpc_status.to_status expects it."""
    status = status_pb2.Status(code=error.code, message=error.message)
    for detail in error.details():
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
