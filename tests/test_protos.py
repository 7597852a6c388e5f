"""Options and reserved fields of the protos, on which generated code of other languages depends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from npuserve.v1 import generate_pb2

PROTOS = Path(__file__).parent.parent / "protos"
FILES = sorted((PROTOS / "npuserve/v1").glob("*.proto"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_file_options_name_the_packages_of_go_and_java(file: Path) -> None:
    """The names are part of users' imports and never change; `buf breaking` compares with the last commit only."""
    options = import_module(f"npuserve.v1.{file.stem}_pb2").DESCRIPTOR.GetOptions()
    assert options.go_package == "npuserve.dev/npuserve/v1;npuservev1"
    assert (options.java_package, options.java_multiple_files) == ("dev.npuserve.v1", True)


def test_removed_fields_are_reserved_by_number_and_name() -> None:
    message = generate_pb2.DESCRIPTOR.message_types_by_name["SchedulingParams"]
    assert "target_itl_ms" not in message.fields_by_name
    text = (PROTOS / "npuserve/v1/generate.proto").read_text()
    body = text[text.index("message SchedulingParams {"):]
    body = body[: body.index("\n}")]
    assert "  reserved 2;\n" in body
    assert '  reserved "target_itl_ms";\n' in body
