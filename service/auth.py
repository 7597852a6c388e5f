"""Who calls: by API key, else by the client's certificate, else by the peer's address.

With `api_keys` every call but those of grpc.health.v1 carries `authorization: Bearer KEY` in its metadata; without it
it is UNAUTHENTICATED, whatever is called. AdminService then needs a key with the admin right. Without `api_keys` nobody
is refused, and who can reach the port may do everything.

A caller's name is never a metric's label, and a key is nowhere but in the call that carries it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from npuserve.service.call import Context, call
from npuserve.service.errors import PermissionDenied, ServeError, Unauthenticated

if TYPE_CHECKING:
    from npuserve.service.keys import Keys
    from npuserve.service.watched import Watched

OPEN = "/grpc.health.v1.Health/"
ADMIN = "/npuserve.v1.AdminService/"


@dataclass(frozen=True)
class Limits:
    """max_requests: at once; None: the server's `max_requests_per_client`, 0: as many as they like."""

    max_requests: int | None = None


@dataclass(frozen=True)
class Caller:
    """name: the API key's, the certificate's as `cert:NAME`, the peer's address without its port as `ipv4:10.0.0.7`,
    or `local`. admin: may call AdminService. is_authenticated: the name is proved, by a key or a certificate."""

    name: str
    limits: Limits = Limits()
    admin: bool = True
    is_authenticated: bool = True

    @property
    def owner(self) -> str:
        """The only caller who may resume its streams; "" for an anonymous one, whose address may change."""
        return self.name if self.is_authenticated else ""


# Of the call whose task this is; set by the guard before the call's handler runs.
_authenticated: ContextVar[Caller | None] = ContextVar("authenticated", default=None)


def caller(context: Context) -> Caller:
    """Whose call it is. Call it from the call's own task."""
    known = _authenticated.get()
    if known is not None:
        return known
    identities = context.peer_identities()
    if identities:  # the alternative names of a certificate that a trusted authority signed, else its common name
        return Caller(f"cert:{next(iter(identities)).decode(errors='replace')}")
    return Caller(peer_name(context.peer()), is_authenticated=False)


def peer_name(peer: str) -> str:
    """gRPC's name of a peer without the port: `ipv4:10.0.0.7`, `ipv6:[fe80::1]`, else `local`."""
    match = re.fullmatch(r"(ipv4:[0-9.]+|ipv6:(?:\[|%5B).*(?:\]|%5D)):\d+", peer)
    return match[1].replace("%5B", "[").replace("%5D", "]") if match else "local"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets pass who has a right to the call, and notes who it is."""

    def __init__(self, keys: Watched[Keys]):
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        method: str = details.method  # type: ignore[attr-defined]
        if handler is None or method.startswith(OPEN):
            return handler
        try:
            found = self._authenticate(details.invocation_metadata)  # type: ignore[attr-defined]
            if method.startswith(ADMIN) and not found.admin:
                raise PermissionDenied(f"the key {found.name!r} has no admin right")
        except ServeError as error:
            return _refusal(method.rpartition("/")[2], error)
        _authenticated.set(found)
        return handler

    def _authenticate(self, metadata: Any) -> Caller:
        given = [value for key, value in metadata or () if key == "authorization"]
        if not given:
            raise Unauthenticated("an API key is needed, as metadata: authorization: Bearer KEY")
        scheme, _, key = given[0].partition(" ")
        found = self._keys.value.find(key.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
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
