"""Errors and their gRPC status."""

from __future__ import annotations

import re
import string
from pathlib import Path
from urllib.parse import quote

import pytest
from google.rpc import code_pb2, error_details_pb2

from npuserve.service import errors
from npuserve.service.errors import InvalidField, NoChatTemplate, NoTokenizer, Violations


def violations(error: InvalidField) -> list[tuple[str, str]]:
    found = error_details_pb2.BadRequest()
    assert any(detail.Unpack(found) for detail in errors.to_status(error).details)
    return [(one.field, one.description) for one in found.field_violations]


def test_invalid_field_description_omits_field() -> None:
    error = InvalidField("n", "must be 1, got 0")
    assert (error.message, violations(error)) == ("n: must be 1, got 0", [("n", "must be 1, got 0")])


def test_violations_are_one_error_up_to_limit() -> None:
    bad = Violations()
    bad.check()
    bad.add("a", "must be 1")
    with bad.collect():
        raise InvalidField("b", "must be 2", ("c", "must be 3"))
    with pytest.raises(InvalidField) as raised:
        bad.check()
    assert raised.value.message == "a: must be 1; b: must be 2; c: must be 3"
    assert violations(raised.value) == [("a", "must be 1"), ("b", "must be 2"), ("c", "must be 3")]
    assert raised.value.logged == "InvalidField: a, b, c"
    for number in range(errors.MAX_VIOLATIONS):
        bad.add(str(number), "must be 4")
    with pytest.raises(InvalidField) as raised:
        bad.check()
    assert raised.value.message.endswith(f"; and {errors.MAX_VIOLATIONS + 3 - len(raised.value.violations)} more")


def test_invalid_field_lists_twenty_usual_violations() -> None:
    field, *others = [(f"sampling.field_{n}", "must be in [0, 1], got 1.5") for n in range(20)]
    assert len(violations(InvalidField(*field, *others))) == 20


@pytest.mark.parametrize("letter", ["x", "%", "中", "\ud800", "\0"])
def test_status_of_long_fields_fits_the_headers(letter: str) -> None:
    """The message is percent-encoded in grpc-message, and in base64 in grpc-status-details-bin."""
    for length in (10_000, 20):
        field, *others = [(letter * length, letter * length)] * errors.MAX_VIOLATIONS
        error = InvalidField(*field, *others, omitted=7)
        status = errors.to_status(error).SerializeToString()
        message = quote(error.message, safe=string.punctuation.replace("%", "") + " ")
        assert len(message) + len(status) * 4 / 3 < 7600
        assert error.message.endswith(f"; and {errors.MAX_VIOLATIONS - len(error.violations) + 7} more")


def test_invalid_field_logged_omits_client_names() -> None:
    error = InvalidField("chat.template_args.secret", "must be", ("chat.template_args.other", "must be"))
    assert error.logged == "InvalidField: chat.template_args, chat.template_args"


@pytest.mark.parametrize(("text", "logged"), [
    ("must be in [1, 63], as max_model_len is 64 and the prompt has 1 token, got 5000", "must be in [1, 63], got 5000"),
    ("must be in (0, 1], got 1.5", "must be in (0, 1], got 1.5"),
    ("must be in [0, 100], got nan", "must be in [0, 100], got nan"),
    ("must be in (0, 600] seconds, got -1e-09", "must be in (0, 600] seconds, got -1e-09"),
    ("token id must be in [0, 7], got 8", "must be in [0, 7], got 8"),
    ("must be at most 16 strings, got 17", "must be at most 16 strings, got 17"),
    ("must be 1 to 1024 characters, got 0", "must be 1 to 1024 characters, got 0"),
    ("must have at most 1024 entries, got 1025", "must be at most 1024 entries, got 1025"),
    ("must be one of user; got 'secret'", ""), ("must be in [0, 1], got 'secret, got 1'", ""),
    ("must be in [0, 1], got secret", ""), ("the model's chat template refuses it: secret, got 1", ""),
    ("must be in [0, 1], as secret\n, got 1", "must be in [0, 1], got 1"),
])
def test_invalid_field_logged_has_range_and_value_as_numbers_alone(text: str, logged: str) -> None:
    assert InvalidField("n", text).logged == "InvalidField: n" + (logged and f": {logged}")


def test_no_chat_template_is_separate_from_no_tokenizer() -> None:
    assert NoChatTemplate.code == NoTokenizer.code
    assert not issubclass(NoChatTemplate, NoTokenizer)


def kinds(base: type[errors.ServeError]) -> set[type[errors.ServeError]]:
    found = base.__subclasses__()
    return set(found).union(*(kinds(kind) for kind in found))


def test_clients_page_lists_every_reason_with_its_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    listed = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", text, re.MULTILINE)
    raised = kinds(errors.ServeError) - {errors.Retryable}
    assert len(listed) == len(raised)
    assert dict(listed) == {kind.reason(): code_pb2.Code.Name(kind.code) for kind in raised}


CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ServeError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_from_wire_every_class_keeps_its_status(kind: type[errors.ServeError]) -> None:
    error = kind("a", "must be 1, got 0") if issubclass(kind, InvalidField) else kind("a: must be 1, got 0")
    if isinstance(error, errors.Retryable):
        error.retry_seconds = 2.5
    assert errors.to_status(errors.from_wire(errors.to_wire(error))) == errors.to_status(error)


def test_from_wire_unknown_class_is_internal() -> None:
    error = errors.from_wire(("NoSuchError", "why", 0.0))
    assert (type(error), error.message) == (errors.InternalError, "why")
