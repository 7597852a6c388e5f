"""Authentication by API key, and authorization of AdminService.

With `api_keys`, every call needs `authorization: Bearer KEY` in its metadata, except calls to grpc.health.v1. Any other
call without a valid key gets UNAUTHENTICATED. An unknown method is UNIMPLEMENTED in any case (rpc/aio_server.py).
Without `api_keys`, every call is accepted.

AdminService, and the methods of VllmEngine that administer the server, need an API key with the admin right, or a
client certificate that `admin_certificates` names. They are off where neither is configured. SubscribeKvEvents shows
the prompts of all callers, so that a caller with a key or a certificate needs the same for it.

An authenticated caller is a tenant: its request ids, cached prefixes and resume tokens are its own.

A caller's name never becomes a metric label. A key appears nowhere but in the call that carries it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from npuserve.service.access.caller import CERTIFICATE, Caller, certificate_names, current, get_caller
from npuserve.service.errors import PermissionDenied, ServeError, Unauthenticated
from npuserve.service.rpc.call import (
    VLLM_ENGINE,
    Context,
    DelayedRefusal,
    call,
    refusal_throttle,
    refuse_after_delay,
    rpc_name,
)
from npuserve.service.rpc.refusal_throttle import RefusalThrottle

HEALTH = "/grpc.health.v1.Health/"
"""Prefix of the methods that need no API key."""
HOSTILE_METADATA = 4
FIELD_BYTES = 32
"""Bytes that HTTP/2 adds to the size of each header."""
ADMIN = (
    "/npuserve.v1.AdminService/", f"/{VLLM_ENGINE}/FlushCache", f"/{VLLM_ENGINE}/StartProfile",
    f"/{VLLM_ENGINE}/StopProfile")
"""Prefixes of the methods that need the admin right."""
KV_EVENTS = f"/{VLLM_ENGINE}/SubscribeKvEvents"


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that authenticates and authorizes each call, and throttles refusals.

    find_key: returns the caller of an API key, None for an unknown key. None: the server has no API keys.
    admin_names: names of client certificates with the admin right.
    throttle: throttle of this server's refusals.
    max_metadata_bytes: size of a call's metadata as HTTP/2 counts it, up to which the call is accepted.
    on_hostile_metadata: called with the context of a call with more than HOSTILE_METADATA times as much.
    """

    def __init__(
        self, find_key: Callable[[str], Caller | None] | None, admin_names: Collection[str], throttle: RefusalThrottle,
        max_metadata_bytes: int, on_hostile_metadata: Callable[[Context], None],
    ):
        self._find_key = find_key
        self._throttle = throttle
        self._max_metadata_bytes = max_metadata_bytes
        self._on_hostile_metadata = on_hostile_metadata
        self._admins = {CERTIFICATE + name for name in admin_names}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        size = _metadata_bytes(details.invocation_metadata)  # type: ignore[attr-defined]
        if size > self._max_metadata_bytes:
            return self._large_metadata_handler(is_hostile=size > HOSTILE_METADATA * self._max_metadata_bytes)
        handler = await self._authenticated_handler(continuation, details)
        if not inspect.isasyncgenfunction(handler.stream_stream):  # not reflection, whose messages have a few bytes
            refusal_throttle.set(self._throttle)
        return handler

    async def _authenticated_handler(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call, or a handler that refuses it. Calls to unknown methods do not arrive here."""
        handler = await continuation(details)
        method: str = details.method  # type: ignore[attr-defined]
        if method.startswith(HEALTH):
            return handler
        service, _, name = method[1:].rpartition("/")
        if self._find_key:
            try:
                caller = _authenticate(self._find_key, details.invocation_metadata)  # type: ignore[attr-defined]
            except ServeError as error:
                return _refusing_handler(rpc_name(service, name), error)
            current.set(caller)
        if method == KV_EVENTS:
            return self._admin_handler(handler, rpc_name(service, name), name, with_anonymous=True)
        if not method.startswith(ADMIN):
            return handler
        what = f"{name} of VllmEngine" if service == VLLM_ENGINE else "AdminService"
        return self._admin_handler(handler, rpc_name(service, name), what, with_anonymous=False)

    def _large_metadata_handler(self, is_hostile: bool) -> Any:
        """Return a handler that refuses a call with too much metadata, as gRPC does once the client has acknowledged
        the limit.
        """

        async def refuse(messages: object, context: Context) -> None:
            if is_hostile:
                self._on_hostile_metadata(context)
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"metadata: at most {self._max_metadata_bytes} bytes")

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _admin_handler(self, handler: Any, rpc: str, what: str, with_anonymous: bool) -> Any:
        """Return a handler that checks the admin right before it reads the message.

        what: what needs the right, for the error message.
        with_anonymous: callers without a key and a certificate do not need it.
        """

        async def check(context: Context) -> None:
            caller = get_caller(context)
            is_admin = caller.admin or not self._admins.isdisjoint(certificate_names(context))
            if not is_admin and (caller.is_authenticated or not with_anonymous):
                async with call(context, rpc, logging.INFO) as fields:
                    fields["client"] = caller.name
                    raise PermissionDenied(
                        f"{what} needs an API key with the admin right, or a client certificate that "
                        "admin_certificates names")

        return _checked_handler(handler, check)


class GatewayInterceptor(AuthInterceptor):
    """Interceptor of a port that one local process alone may use, whatever key its calls carry.

    is_gateway: returns whether that process has the connection, given gRPC's name of its peer.
    caller: the process as a caller. It has no admin right.
    Others: see AuthInterceptor.
    """

    def __init__(
        self, is_gateway: Callable[[str], bool], caller: Caller, throttle: RefusalThrottle, max_metadata_bytes: int,
        on_hostile_metadata: Callable[[Context], None],
    ):
        super().__init__(None, (), throttle, max_metadata_bytes, on_hostile_metadata)
        self._is_gateway = is_gateway
        self._caller = caller

    async def _authenticated_handler(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await super()._authenticated_handler(continuation, details)
        service, _, name = details.method[1:].rpartition("/")  # type: ignore[attr-defined]
        rpc = rpc_name(service, name)

        async def check(context: Context) -> None:
            if not self._is_gateway(context.peer()):
                async with call(context, rpc, logging.INFO):
                    raise PermissionDenied("this port is for the server's own OpenAI API; call the port of gRPC")
            current.set(self._caller)

        return _checked_handler(handler, check)


def _metadata_bytes(metadata: Any) -> int:
    """Return the size of metadata as HTTP/2 counts it (RFC 9113, section 6.5.2)."""
    return sum(len(key) + len(value) + FIELD_BYTES for key, value in metadata or ())


def _authenticate(find_key: Callable[[str], Caller | None], metadata: Any) -> Caller:
    """Return the caller whose API key the metadata carries. Raises Unauthenticated."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if not values:
        raise Unauthenticated("an API key is needed in the metadata: authorization: Bearer KEY")
    scheme, _, key = values[0].partition(" ")
    caller = find_key(key.strip()) if len(values) == 1 and scheme.lower() == "bearer" else None
    if caller is None:
        raise Unauthenticated("authorization: not a key of this server; the format is: Bearer KEY")
    return caller


def _refusing_handler(rpc: str, error: ServeError) -> Any:
    """Return a handler that ends the call with the error and reads no message.

    To gRPC its requests are a stream: gRPC reads and decompresses a unary request before it calls the handler.
    """

    async def refuse(requests: Any, context: Context) -> None:
        async with call(context, rpc, logging.INFO):
            raise error

    return grpc.stream_stream_rpc_method_handler(_delayed(refuse))


def _checked_handler(handler: Any, check: Callable[[Context], Awaitable[None]]) -> Any:
    """Return a handler that runs `check`, which may refuse the call, before it reads the message."""
    inner = handler.stream_unary or handler.stream_stream

    async def checked(messages: object, context: Context) -> Any:
        await check(context)
        return await inner(messages, context)

    kind = grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.stream_stream_rpc_method_handler
    return kind(_delayed(checked), None, handler.response_serializer)


def _delayed(handle: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    """Return a handler that sends the throttled refusals of `handle`."""

    async def delayed(messages: Any, context: Context) -> Any:
        try:
            return await handle(messages, context)
        except DelayedRefusal as error:
            refusal = error
        await refuse_after_delay(context, refusal)

    return delayed
