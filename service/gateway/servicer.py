"""Servicer of VllmEngine. The life of a request is that of frontend/generation.py.

A gateway decodes the token ids, cuts off stop strings and parses tools itself. So Generate sends every token, also the
tokens of a stop string and an end-of-text token. Initial metadata follow the engine's acceptance: a gateway retries
a call that ends without them, and ends a call that has them by Abort alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import msgspec
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.npu.profile import DEFAULT_SECONDS
from npuserve.service import clock
from npuserve.service.access.caller import get_caller
from npuserve.service.config import ServerConfig
from npuserve.service.errors import InvalidField, NoTokenizer, Unavailable
from npuserve.service.gateway import info, kv_events
from npuserve.service.gateway.answer import AnswerTranslator
from npuserve.service.gateway.fields import client_paths
from npuserve.service.gateway.request import (
    MAX_REQUEST_ID_CHARACTERS,
    translate,
    translate_embed,
    translate_profile,
)
from npuserve.service.gateway.tokenizer_bundle import TokenizerBundle
from npuserve.service.ipc.messages import Request
from npuserve.service.requests import validation
from npuserve.service.requests.parser import ParsingServer
from npuserve.service.requests.preparation import Kind
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.rpc.call import VLLM_ENGINE, Context, arrival, call, rpc_name
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.text.model_folder import ModelFolder
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace, Tracing

P = ParamSpec("P")
T = TypeVar("T")

SERVICE = "vllm"
"""Service of the requests, see messages.Request."""
MAX_ABORT_IDS = 1024
ABORT_SECONDS = 10.0
"""Maximum time for which Abort waits for a restarted engine. It is the deadline of smg's own Abort."""
BYTES_PER_LOGPROB = 7
"""Estimated size of a log-probability in an answer, with an id of 3 bytes."""
BYTES_PER_TOKEN = 9
"""Estimated size of the fields around the log-probabilities of a token."""
MAX_FLUSH_SECONDS = 600.0
POLL_SECONDS = 0.05


class Generation(Protocol):
    """The part of frontend/generation.py that this folder needs, so that `frontend` may import this folder."""

    def require_folder(self) -> ModelFolder: ...

    async def prepare(
        self, context: Context, kind: Kind, message: Any, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    async def check(
        self, message: pb.GenerateRequest, context: Context, fields: dict[str, Any], token: str = "",
        max_request_id_characters: int = ...,
    ) -> CheckedRequest: ...

    async def answer(
        self, checked: CheckedRequest, context: Context, fields: dict[str, Any], trace: Trace | None,
        send: Callable[[pb.StreamGenerateResponse], Awaitable[None]],
    ) -> None: ...


class PooledCalls(Protocol):
    """The part of frontend/pooling.py that this folder needs."""

    async def embed(
        self, message: pooling_pb2.EmbedRequest, context: Context, fields: dict[str, Any], trace: Trace | None,
        service: str = "", max_request_id_characters: int = ...,
    ) -> pooling_pb2.EmbedResponse: ...


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Servicer of VllmEngine.

    started: time.monotonic() seconds of the front end's start.
    tracing: None: off.
    """

    NAME = VLLM_ENGINE

    def __init__(
        self, config: ServerConfig, engine: EngineClient, generation: Generation, pooled: PooledCalls, started: float,
        tracing: Tracing | None,
    ):
        self._config = config
        self._engine = engine
        self._generation = generation
        self._pooled = pooled
        self._started = started
        self._tracing = tracing
        self._last_request = 0.0  # Unix time
        self._bundle = TokenizerBundle()

    def add_to(self, server: ParsingServer) -> None:
        """Add the service to a server."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        trace = self._tracing.begin(context, "Generate", arrival(), VLLM_ENGINE) if self._tracing else None
        async with call(context, _rpc("Generate"), logging.INFO, trace) as fields:
            with client_paths():
                self._last_request = clock.unix_time()
                checked = await self._check(request, context, fields)
                translator = AnswerTranslator(checked.request, request.stream)

                async def send(part: pb.StreamGenerateResponse) -> None:
                    for message in translator.translate(part):
                        await context.write(message)

                await self._generation.answer(checked, context, fields, trace, send)

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        trace = self._tracing.begin(
            context, "Embed", arrival(), VLLM_ENGINE, "embeddings") if self._tracing else None
        async with call(context, _rpc("Embed"), logging.INFO, trace) as fields:
            with client_paths():
                self._last_request = clock.unix_time()
                tokenizer = self._generation.require_folder().tokenizer
                message = translate_embed(request, tokenizer, self._engine.require().vocabulary_size)
                embedded = await self._pooled.embed(
                    message, context, fields, trace, SERVICE, MAX_REQUEST_ID_CHARACTERS)
                response = vllm.EmbedResponse(
                    embedding=embedded.values, prompt_tokens=embedded.usage.prompt_tokens,
                    embedding_dim=len(embedded.values))
        return response

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        async with call(context, _rpc("HealthCheck")):
            self._generation.require_folder()  # smg registers a worker that answers, and then needs its model
            self._engine.require_model_info()
            try:
                self._engine.require()
                response = vllm.HealthCheckResponse(healthy=True, message="ready")
            except Unavailable as error:
                response = vllm.HealthCheckResponse(healthy=False, message=error.message)
        return response

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        async with call(context, _rpc("Abort")) as fields:
            client = fields["client"] = get_caller(context).name
            if len(request.request_ids) > MAX_ABORT_IDS:
                raise InvalidField(
                    "request_ids", f"must be at most {MAX_ABORT_IDS} ids, got {len(request.request_ids)}")
            end = time.monotonic() + ABORT_SECONDS
            for name in dict.fromkeys(request.request_ids):
                await self._abort(name, client, end)
        return vllm.AbortResponse()

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        async with call(context, _rpc("GetModelInfo")):
            response = info.model_info(self._generation.require_folder(), self._engine.require_model_info())
        return response

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        async with call(context, _rpc("GetServerInfo")):
            response = info.server_info(self._config, self._engine, self._started, self._last_request)
        return response

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        async with call(context, _rpc("GetLoads")):
            response = info.loads(self._engine, self._engine.require(), request.dp_rank)
        return response

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        async with call(context, _rpc("GetTokenizer")):
            folder = self._generation.require_folder()
            if folder.tokenizer is None:
                raise NoTokenizer("the served model has no tokenizer")
            bundle = await self._bundle.get(folder.path)
            for chunk in bundle.chunks():
                await context.write(chunk)

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await kv_events.subscribe(self._engine, request, context)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Free the cached prefixes. It fails if requests are in progress after `timeout_s`, since their blocks stay."""
        async with call(context, _rpc("FlushCache")):
            if not 0 <= request.timeout_s <= MAX_FLUSH_SECONDS:
                raise InvalidField(
                    "timeout_s", f"must be in [0, {MAX_FLUSH_SECONDS:g}] seconds, got {request.timeout_s:.9g}")
            end = time.monotonic() + request.timeout_s
            while True:
                if not self._live_requests or time.monotonic() >= end:
                    break
                await asyncio.sleep(POLL_SECONDS)
            blocks = await self._engine.flush_prefix_cache()
            live = self._live_requests
            rest = f"; the blocks of {live} requests in progress stay" if live else ""
            response = common_pb2.FlushCacheResponse(success=not live, message=f"{blocks} blocks freed{rest}")
        return response

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        async with call(context, _rpc("StartProfile"), logging.INFO):
            name, steps = translate_profile(request)
            started = await self._engine.profiles.start(name, steps, DEFAULT_SECONDS)
        return common_pb2.ProfileResponse(success=True, message=f"profile {started} of {steps} steps started")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        async with call(context, _rpc("StopProfile"), logging.INFO):
            profile = await self._engine.profiles.stop(wait=False)
        return common_pb2.ProfileResponse(success=True, message=f"{profile.path or 'no trace'}: {profile.steps} steps")

    @property
    def _live_requests(self) -> int:
        load = self._engine.load
        return load.running + load.waiting + load.paused

    async def _check(
        self, request: vllm.GenerateRequest, context: Context, fields: dict[str, Any]
    ) -> CheckedRequest:
        """Return the checked request. Its answer needs text only for stop strings."""
        fields["client"] = get_caller(context).name
        given = pb.GenerateRequest(request_id=request.request_id)
        fields["id"] = validation.request_id(given, MAX_REQUEST_ID_CHARACTERS)  # also of a request that is refused
        self._generation.require_folder()
        message = await self._generation.prepare(
            context, "generate", request, translate, request, self._engine.require())
        checked = await self._generation.check(
            message, context, fields, max_request_id_characters=MAX_REQUEST_ID_CHARACTERS)
        _check_size(checked.request, request.stream)
        return dataclasses.replace(
            checked, has_text=bool(checked.stop), request=msgspec.structs.replace(checked.request, service=SERVICE))

    async def _abort(self, request_id: str, client: str, end: float) -> None:
        """Abort a request of the client, if there is one. Wait for an engine that restarts, which continues it.

        end: time.monotonic() seconds after which to raise Unavailable.
        """
        while self._engine.state != "starting":  # until the first engine is ready, no request is live
            try:
                await self._engine.abort(request_id, client, SERVICE)
                return
            except Unavailable:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(POLL_SECONDS)


def _check_size(request: Request, stream: bool) -> None:
    """Raise InvalidField if log-probabilities alone exceed the message size limit of most clients.

    Log-probabilities of the prompt are in one message, also of a stream. Each sample has messages of its own.
    """
    if stream:
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, logprobs=None))
    validation.check_unary_size(msgspec.structs.replace(request, samples=1), BYTES_PER_LOGPROB, BYTES_PER_TOKEN)


def _rpc(method: str) -> str:
    return rpc_name(VLLM_ENGINE, method)
