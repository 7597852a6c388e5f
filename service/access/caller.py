"""Identity of a caller: its API key, else its client certificate, else the address of its peer."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from npuserve.service.config import ServerConfig
from npuserve.service.rpc.call import Context, peer_name

CERTIFICATE = "cert:"
"""Prefix of the name of a caller with a certificate. Names of API keys have no colon."""


@dataclass(frozen=True)
class Limits:
    """Limits of an API key. None: the server's limit.

    max_requests: concurrent requests; 0: no limit.
    min_priority, max_priority: range of a request's priority.
    """

    max_requests: int | None = None
    min_priority: int | None = None
    max_priority: int | None = None

    def within(self, config: ServerConfig) -> tuple[int, tuple[int, int]]:
        """Return the limit of concurrent requests, and the lowest and the highest priority."""
        max_requests = config.max_requests_per_client if self.max_requests is None else self.max_requests
        low = config.min_priority if self.min_priority is None else self.min_priority
        high = config.max_priority if self.max_priority is None else self.max_priority
        if low > high:  # one end is the key's, and lies beyond the server's other end
            low, high = (low, low) if self.max_priority is None else (high, high)
        return max_requests, (low, high)


@dataclass(frozen=True)
class Caller:
    """Identity of the client of a call.

    name: name of the API key; `cert:NAME` of the certificate; the peer's address without its port, as
        `ipv4:10.0.0.7`; or `local`.
    limits: limits of the API key.
    admin: the API key may call AdminService.
    is_authenticated: an API key or a certificate proves the name.
    """

    name: str
    limits: Limits = Limits()
    admin: bool = False
    is_authenticated: bool = True

    @property
    def owner(self) -> str:
        """Name of the only caller that may resume this caller's streams; "" if anonymous, since addresses change."""
        return self.name if self.is_authenticated else ""

    def namespace(self, salt: str, shared: bool) -> str:
        """Return the prefix cache's namespace of a request with this salt. Namespaces of different owners differ.

        "" is the namespace of all callers without an owner and a salt: its blocks alone appear in KV events.

        shared: callers with the same salt share a namespace.
        """
        owner = "" if shared else self.owner
        return f"{len(owner)}:{owner}:{salt}" if owner or salt else ""


current: ContextVar[Caller | None] = ContextVar("current", default=None)
"""Caller of the current task's call. The interceptor sets it for a call with an API key, before the handler runs."""


def get_caller(context: Context) -> Caller:
    """Return the caller of a call. Call it from the call's own task."""
    caller = current.get()
    if caller is None:
        names = certificate_names(context)
        caller = Caller(names[0]) if names else Caller(peer_name(context.peer()), is_authenticated=False)
        current.set(caller)
    return caller


def certificate_names(context: Context) -> list[str]:
    """Return `cert:NAME` for each name of the client's certificate, see client_certificate.py; [] without one."""
    pem = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    if pem is None:
        return []
    from npuserve.service.access import client_certificate  # slow to import, and needed with tls_client_ca only

    return [CERTIFICATE + name for name in client_certificate.names(pem)]
