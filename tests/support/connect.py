"""Channels that send an API key with every call, as the clients of a server with `api_keys` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from npuserve.client import Tls
from npuserve.client.channel import auth_metadata, open_channel


class _AddMetadata(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Interceptor that adds metadata to each call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]):
        self._metadata = metadata

    def _call(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=(*(details.metadata or ()), *self._metadata)), request)

    intercept_unary_unary = intercept_unary_stream = _call  # type: ignore[assignment]


def connect(target: str, api_key: str | None = None, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel to host:port; it connects on the first call."""
    channel = open_channel(target, tls)
    return grpc.intercept_channel(channel, _AddMetadata(auth_metadata(api_key))) if api_key else channel
