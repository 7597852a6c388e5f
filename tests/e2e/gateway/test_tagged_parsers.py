"""Tool calls with tagged arguments, as Qwen3.5 and later models write them, parsed by smg and by the server.

The template is one of this form, the tokenizer Qwen3's, beside NPUSERVE_TEST_MODELS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npuserve.client.request_builder import build_request
from npuserve.common.answer import Answer
from tests.e2e.gateway.smg import Gateway, gateway
from tests.e2e.gateway.test_tools import QUESTION, THOUGHT, chat
from tests.e2e.server import Server, serving
from tests.support.tagged_template import TAGGED_TEMPLATE

pytestmark = pytest.mark.model

FLAGS = ("--tool-call-parser", "qwen_xml", "--reasoning-parser", "qwen3")
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "sunny": {"type": "boolean"},
              "map": {"type": "object"}}
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}}}]
Call = tuple[str, Any]


def written(*parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=get_weather>\n{lines}</function>\n</tool_call>"


class Case(NamedTuple):
    """Answer after its reasoning, what the server makes of it, and smg's other answer, if it has one."""

    answer: str
    text: str
    calls: list[dict[str, Any]]
    others: tuple[str, list[dict[str, Any]]] | None = None


ROME = {"city": "Rome"}
CASES = {
    "text": Case("Hello.", "Hello.", []),
    "types": Case(
        written(("city", "Paris\n  é"), ("days", "3"), ("sunny", "true"), ("map", '{"a": 1}')), "",
        [{"city": "Paris\n  é", "days": 3, "sunny": True, "map": {"a": 1}}]),
    "two calls": Case(
        f"Let me see.\n\n{written(('city', '5'))}\n{written(('city', 'null'), ('days', 'x'))}", "Let me see.",
        [{"city": "5"}, {"city": "null", "days": "x"}]),
    "text after a call": Case(f"{written(('city', 'Rome'))}\nb", "b", [ROME], ("", [ROME])),  # smg drops it
    "end tag in a value": Case(  # smg ends the value there
        written(("city", "Rome</parameter> b")), "", [{"city": "Rome</parameter> b"}], ("", [ROME])),
}


@pytest.fixture(scope="module", params=[("qwen3.5-0.8b", ()), ("my-model", FLAGS)], ids=["name", "flags"])
def both(
    request: pytest.FixtureRequest, scripted_folder: Path
) -> Iterator[tuple[str, Server, Gateway]]:
    """Name of the model, server and gateway. smg takes the parsers from the name, else from its flags."""
    name, flags = request.param
    path = scripted_folder / "tokenizer_config.json"
    kept = path.with_suffix(".kept")
    shutil.copy(path, kept)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TAGGED_TEMPLATE}))
    program = ("-m", "tests.e2e.gateway.scripted", "serve")
    try:
        with (
            serving(str(scripted_folder), "--served-name", name, program=program) as server,
            gateway([server.target], *flags) as running,
        ):
            yield name, server, running
    finally:
        kept.replace(path)


@pytest.mark.parametrize("case", CASES)
def test_smg_and_the_server_read_tagged_calls(
    both: tuple[str, Server, Gateway], script: Callable[[str], list[int]], case: str
) -> None:
    name, server, gate = both
    answer, text, calls, others = CASES[case]
    script(f"{THOUGHT}\n</think>\n\n{answer}")
    request = build_request([QUESTION], {"tools": TOOLS, "parse_output": True})  # type: ignore[typeddict-item]
    joined = Answer(1)
    for message in server.stub.StreamGenerate(request, timeout=60):
        joined.add(message)
    for found in (server.stub.Generate(request, timeout=60), joined.response()):
        assert (found.reasoning, found.text) == (THOUGHT, text)
        assert [json.loads(call.arguments) for call in found.tool_calls] == calls
        assert all(call.name == "get_weather" for call in found.tool_calls)
    theirs = chat(gate, model=name, messages=[QUESTION], tools=TOOLS).choices[0].message
    assert theirs.reasoning_content.strip() == THOUGHT
    assert ((theirs.content or "").strip(), [json.loads(call.function.arguments) for call in theirs.tool_calls or ()]
            ) == (others or (text, calls))
