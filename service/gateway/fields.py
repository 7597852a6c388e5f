"""Names of VllmEngine's fields in errors that the checks of InferenceService raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npuserve.service.errors import InvalidField, ServeError

NAMES = {
    "prompt": "input",
    "token_ids.ids": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "sampling": "sampling_params",
    "stopping": "sampling_params",
    "output": "sampling_params",
    "n": "sampling_params.n",
    "json_schema": "sampling_params.json_schema",
    "regex": "sampling_params.regex",
    "grammar": "sampling_params.grammar",
    "json_object": "sampling_params.json_object",
    "structural_tag": "sampling_params.structural_tag",
    "choices": "sampling_params.choice",
}
"""Path in npuserve.v1.GenerateRequest -> path in vllm.grpc.engine.GenerateRequest. A path is before its prefixes. Paths
that are absent here have the same name in both."""


def client_path(path: str) -> str:
    """Return the path in VllmEngine's request of a path in InferenceService's: `sampling_params.stop[3]`."""
    for ours, theirs in NAMES.items():
        if path == ours or path.startswith((f"{ours}.", f"{ours}[")):
            return theirs + path[len(ours) :]
    return path


def _convert(path: str, text: str) -> tuple[str, str]:
    """Return path and description of a bad field in VllmEngine's words."""
    text = text.replace("send token_ids", "send tokenized").removesuffix("; StreamGenerate has no such limit")
    return client_path(path), text


@contextlib.contextmanager
def client_paths() -> Iterator[None]:
    """Raise the errors of the body with VllmEngine's names of the fields."""
    try:
        yield
    except InvalidField as error:
        raise error.converted(_convert) from None
    except ServeError as error:
        path, colon, text = error.message.partition(": ")
        if colon:
            error.message = ": ".join(_convert(path, text))
        raise
