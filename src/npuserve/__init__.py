"""npuserve: a gRPC service of Qwen-class language models with streaming tokens.

    from npuserve import LLM, SamplingParams        answers without a server that somebody starts (client/llm.py)
    from npuserve.client import Client              client of a server

The subpackages are links to the folders of the same names at the top of the repository, `v1` to `protos/npuserve/v1`.
This module, `client`, `common` and `v1` are the distribution npuserve-client; the others are npuserve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npuserve.cli.engine_args import EngineArgs
    from npuserve.client.llm import LLM
    from npuserve.client.sampling_params import SamplingParams

__all__ = ["LLM", "EngineArgs", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_MODULES = {
    "EngineArgs": "npuserve.cli.engine_args",
    "LLM": "npuserve.client.llm",
    "SamplingParams": "npuserve.client.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a class when it is used: the server's processes import this package too."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "npuserve.cli":
            raise
        raise ImportError(
            f"{name} needs the server: `pip install ./client .` in a clone of npuserve "
            "(npuserve-client is the client alone)") from None
