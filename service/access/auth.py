"""Who calls: by API key, else by the client's certificate, else by the peer's address.

With `api_keys` every call but those of grpc.health.v1 carries `authorization: Bearer KEY` in its metadata; without it
it is UNAUTHENTICATED, whatever is called. Without `api_keys` nobody is refused but by AdminService, which is always off
but for a key with the admin right and for a client certificate that `admin_certificates` names.

A caller that is authenticated is a tenant: its request ids, cached prefixes and resume tokens are its own.

A caller's name is never a metric's label, and a key is nowhere but in the call that carries it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from npuserve.service.errors import PermissionDenied, ServeError, Unauthenticated
from npuserve.service.rpc.call import Context, Delayed, call, peer_name, refusal_pace, refuse_later

if TYPE_CHECKING:
    from npuserve.service.access.api_keys import Keys
    from npuserve.service.access.file_watch import Watched
    from npuserve.service.config import ServerConfig
    from npuserve.service.rpc.refusal_pace import RefusalPace

CERTIFICATE = "cert:"
"""Begins the name of a caller by certificate; no name of a key has a colon."""
OPEN = "/grpc.health.v1.Health/"
ADMIN = "/npuserve.v1.AdminService/"


@dataclass(frozen=True)
class Limits:
    """Limits of a key. None: the server's.

    max_requests: at once; 0: as many as they like.
    min_priority, max_priority: range of a request's priority.
    """

    max_requests: int | None = None
    min_priority: int | None = None
    max_priority: int | None = None

    def within(self, config: ServerConfig) -> tuple[int, tuple[int, int]]:
        """Return the limit of requests at once, and the lowest and the highest priority."""
        most = config.max_requests_per_client if self.max_requests is None else self.max_requests
        low = config.min_priority if self.min_priority is None else self.min_priority
        high = config.max_priority if self.max_priority is None else self.max_priority
        if low > high:  # one end is the key's own and beyond the server's other end
            low, high = (low, low) if self.max_priority is None else (high, high)
        return most, (low, high)


@dataclass(frozen=True)
class Caller:
    """Who calls.

    name: the API key's, the certificate's as `cert:NAME`, the peer's address without its port as `ipv4:10.0.0.7`, or
        `local`.
    admin: its key may call AdminService.
    is_authenticated: the name is proved, by a key or a certificate.
    """

    name: str
    limits: Limits = Limits()
    admin: bool = False
    is_authenticated: bool = True

    @property
    def owner(self) -> str:
        """The only caller who may resume its streams; "" for an anonymous one, whose address may change."""
        return self.name if self.is_authenticated else ""

    def namespace(self, salt: str, shared: bool) -> str:
        """Return the prefix cache's namespace for a request with that salt; no other owner has an equal one.

        shared: callers with the same salt have the same one.
        """
        owner = "" if shared else self.owner
        return f"{len(owner)}:{owner}:{salt}"


# Of the call whose task this is; set by the guard before the call's handler runs.
_authenticated: ContextVar[Caller | None] = ContextVar("authenticated", default=None)


def caller(context: Context) -> Caller:
    """Whose call it is. Call it from the call's own task."""
    known = _authenticated.get()
    if known is not None:
        return known
    names = certificate_names(context)
    return Caller(names[0]) if names else Caller(peer_name(context.peer()), is_authenticated=False)


def certificate_names(context: Context) -> list[str]:
    """Return `cert:NAME` for each name of the client's certificate: its alternative names, else its common name."""
    return [CERTIFICATE + name.decode(errors="replace") for name in context.peer_identities() or ()]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets pass who has a right to the call, and notes who it is.

    keys: None where none is asked for. admin_names: of the client certificates that may call AdminService. pace: of the
        refusals that the calls of this server end with.
    """

    def __init__(
        self, keys: Watched[Keys] | None, admin_names: Collection[str] = (), pace: RefusalPace | None = None
    ):
        self._keys = keys
        self._pace = pace
        self._admins = {CERTIFICATE + name for name in admin_names}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await self._checked(continuation, details)
        if self._pace is None or handler is None:
            return handler
        inner = handler.stream_unary or handler.stream_stream
        if inspect.isasyncgenfunction(inner):  # reflection's, whose messages are a few bytes
            return handler
        refusal_pace.set(self._pace)

        async def paced(messages: object, context: Context) -> Any:
            try:
                return await inner(messages, context)
            except Delayed as error:
                refusal = error
            await refuse_later(context, refusal)

        return handler._replace(**{"stream_unary" if handler.stream_unary else "stream_stream": paced})

    async def _checked(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call, or one that refuses it; None for a method that there is not."""
        handler = await continuation(details)
        method: str = details.method  # type: ignore[attr-defined]
        if handler is None or method.startswith(OPEN):
            return handler
        rpc = method.rpartition("/")[2]
        if self._keys:
            try:
                found = self._authenticate(self._keys.value, details.invocation_metadata)  # type: ignore[attr-defined]
            except ServeError as error:
                return _refusal(rpc, error)
            _authenticated.set(found)
        return self._for_administrators(handler, rpc) if method.startswith(ADMIN) else handler

    def _for_administrators(self, handler: Any, rpc: str) -> Any:
        """Return a handler that checks the right before a message is read. All answers of AdminService are unary."""

        async def checked(messages: object, context: Context) -> Any:
            if not caller(context).admin and self._admins.isdisjoint(certificate_names(context)):
                async with call(context, rpc, logging.INFO) as fields:
                    fields["client"] = caller(context).name
                    raise PermissionDenied(
                        "AdminService needs an API key with the admin right, or a client certificate that "
                        "admin_certificates names")
            return await handler.stream_unary(messages, context)

        return grpc.stream_unary_rpc_method_handler(checked, None, handler.response_serializer)

    def _authenticate(self, keys: Keys, metadata: Any) -> Caller:
        given = [value for key, value in metadata or () if key == "authorization"]
        if not given:
            raise Unauthenticated("an API key is needed, as metadata: authorization: Bearer KEY")
        scheme, _, key = given[0].partition(" ")
        found = keys.find(key.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
        if found is None:
            raise Unauthenticated("authorization: not a key of this server; it is to be: Bearer KEY")
        return found


def _refusal(rpc: str, error: ServeError) -> Any:
    """Return a handler that ends the call with the error, and reads no message: gRPC's handlers of unary requests read
    and decompress it before they are called."""

    async def refuse(requests: Any, context: Context) -> None:
        async with call(context, rpc, logging.INFO):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
