"""Python client of npuserve: answers that survive lost connections, dead front ends, restarts and full queues.

    from npuserve.client import Client

    with Client("127.0.0.1:50051", timeout=60) as client:
        for delta in client.stream("Once upon a time", max_tokens=64, temperature=0):
            print(delta.text, end="")

`AsyncClient` is the asyncio version. `parsed` returns the object in an answer that a JSON schema constrains. The
package needs grpcio, protobuf, googleapis-common-protos and the generated code, and cryptography for a client
certificate. It needs neither torch nor a tokenizer.
`attempts` holds the rules for retrying and resuming; docs/clients.md is the guide.
"""

from npuserve.client.aio import AsyncClient, AsyncStream
from npuserve.client.channel import Tls
from npuserve.client.rpc_errors import (
    Cancelled,
    ClientError,
    Conflict,
    DeadlineExceeded,
    Denied,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    StreamLost,
    Unavailable,
    Unsupported,
)
from npuserve.client.structured import IncompleteAnswer, parsed
from npuserve.client.sync import Client, Stream

__all__ = [
    "AsyncClient", "AsyncStream", "Cancelled", "Client", "ClientError", "Conflict", "DeadlineExceeded", "Denied",
    "IncompleteAnswer", "InvalidRequest", "NotFound", "Overloaded", "ServerError", "Stream", "StreamLost", "Tls",
    "Unavailable", "Unsupported", "parsed",
]
