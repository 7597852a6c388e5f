"""Outputs of the engine before they are sent: which errors count as refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from npuserve.service.engine.outbox import Outbox
from npuserve.service.errors import QueueFull, ServeError
from npuserve.service.ipc.messages import Load, Outputs


def test_outbox_counts_refusals_and_no_takeovers() -> None:
    counted: list[ServeError] = []
    sent: list[tuple[bytes, Any]] = []
    metrics: Any = SimpleNamespace(rejected=counted.append, load=Load())
    registry: Any = None
    outbox = Outbox(registry, metrics, 7, lambda frontend, message: sent.append((frontend, message)))
    refusal = QueueFull("queue full")
    outbox.refuse((b"a", 1), refusal)
    outbox.take_over((b"b", 2))
    outbox.take_over(None)
    outbox.flush()
    assert counted == [refusal]
    errors = {}
    for frontend, message in sent:
        assert isinstance(message, Outputs)
        errors[frontend] = [(output.key, output.error[0]) for output in message.outputs if output.error]
    assert errors == {b"a": [(1, "QueueFull")], b"b": [(2, "TakenOver")]}
