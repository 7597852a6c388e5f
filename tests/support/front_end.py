"""Complete front end over a fake engine, in one process, with a client."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from npuserve.service.config import ServerConfig
from npuserve.service.frontend.process import Frontend, FrontendArgs
from npuserve.v1 import admin_service_pb2_grpc, inference_service_pb2_grpc
from npuserve.v1 import generate_pb2 as pb
from tests.support import fake_engine
from tests.support.fake_engine import FakeEngine, until
from tests.support.fields import set_field

KEY = "npuserve-test"


async def _with_key(continuation: Any, details: Any, request: Any) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {KEY}"))
    return await continuation(details._replace(metadata=metadata), request)


class _UnaryKey(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = staticmethod(_with_key)  # type: ignore[assignment]


class _StreamKey(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = staticmethod(_with_key)  # type: ignore[assignment]


@dataclass
class Running:
    """Running front end, its fake engine, and a client."""

    engine: FakeEngine
    frontend: Frontend
    target: str
    channel: grpc.aio.Channel
    inference: inference_service_pb2_grpc.InferenceServiceStub
    admin: admin_service_pb2_grpc.AdminServiceStub


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, start_engine: bool = True, credentials: grpc.ChannelCredentials | None = None,
    administrator: bool = False, **config: object
) -> AsyncIterator[Running]:
    """Serve the model in `folder`.

    start_engine: False: the test starts the engine.
    credentials: the client's TLS credentials; None: no TLS.
    administrator: the client has an API key with the admin right; False: the server has no API keys.
    config: fields of ServerConfig.
    """
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if administrator:
        config["api_keys"] = str(folder / "keys")
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        (folder / "keys").write_text(f'[root]\nsha256 = "{digest}"\nadmin = true\nmin_priority = -100\n')
        interceptors = [_UnaryKey(), _StreamKey()]
    settings = ServerConfig(**{"model": str(folder), "drain_seconds": 0.2, **config})  # type: ignore[arg-type]
    async with fake_engine.engine(start_engine) as engine:
        frontend = Frontend(FrontendArgs(settings, 0, engine.address, 0))
        port = await frontend.start()
        await frontend.load(folder)
        target = f"127.0.0.1:{port}"
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 128 << 20)]
        made = (grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)
                if credentials else grpc.aio.insecure_channel(target, options=options, interceptors=interceptors))
        async with made as channel:
            if start_engine:
                await until(lambda: frontend._engine.state == "ready")
            try:
                inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
                admin = admin_service_pb2_grpc.AdminServiceStub(channel)
                yield Running(engine, frontend, target, channel, inference, admin)
            finally:
                await frontend.stop(config.get("drain_seconds", 0.0))


def ask(prompt: str | list[int] = "a", max_tokens: int | None = 5, **fields: object) -> pb.GenerateRequest:
    """Return a request. fields: fields of the request or of its sub-messages, by name."""
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    if max_tokens is not None:
        made.stopping.max_tokens = max_tokens
    for name, value in fields.items():
        parents = (made, made.sampling, made.stopping, made.output, made.scheduling)
        part = next(parent for parent in parents if name in parent.DESCRIPTOR.fields_by_name)
        set_field(part, name, value)
    return made
