"""The inference service, from the gRPC message to the last word of its answer.

The life of a request here:

1. `_ask` takes the message: the server must be ready, every field is checked, the chat template applied, the text
   tokenized (by preparation.py, but for short texts).
2. `EngineClient.submit` hands the checked `Request` to the engine and returns its stream of outputs.
3. `_answer` waits until the engine has accepted the request, and sends the initial metadata: the request's id and the
   resume token. An error before that has the id in its trailing metadata, and no token.
   Then it turns outputs into messages and sends them: `Answer` detokenizes, finds stop strings, and keeps ids,
   logprobs and text together. What comes while a message is being written is one message afterwards.
4. A stop string ends the request in the engine too, at the token that completed it.
5. The last message says how it ended, what it used and where the time went.
6. Whatever ends the call early (client gone, deadline, error) closes the stream, which cancels the request. What was
   made of a StreamGenerate is kept for a while, for ResumeStream.
7. `call` makes the one reply of every error, counts it, and writes the log line.

Generate is StreamGenerate put together, so that they agree. ResumeStream enters at 3 with what `EngineClient.resume`
finds: `Answer` is given all tokens again, and leaves out what the client has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from npuserve.service import metrics
from npuserve.service.access.auth import caller
from npuserve.service.config import ServerConfig
from npuserve.service.errors import Unavailable
from npuserve.service.frontend import resume
from npuserve.service.frontend.response import REASONS, Answer
from npuserve.service.ipc import messages
from npuserve.service.ipc.engine_client import EngineClient
from npuserve.service.ipc.engine_stream import Stream
from npuserve.service.ipc.resumable_streams import is_resumable, new_token
from npuserve.service.requests import validation
from npuserve.service.requests.preparation import Kind, Preparation
from npuserve.service.requests.prompt_size import check_prompt_size
from npuserve.service.requests.validation import Ask
from npuserve.service.rpc.call import Context, call
from npuserve.service.text.model_folder import ModelFolder, Range
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace, Tracing
    from npuserve.service.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

REQUEST_ID = "x-request-id"
RESUME_TOKEN = "x-resume-token"
INLINE_BYTES = 2048
"""Input that is checked and tokenized on the event loop, in about a millisecond; larger input goes to the pool."""
REASON_NAMES = {number: name for name, number in REASONS.items()}


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """folder: None until the tokenizer is loaded. draining: new requests are refused."""

    def __init__(
        self, config: ServerConfig, engine: EngineClient, preparation: Preparation, tracing: Tracing | None = None
    ):
        self.folder: ModelFolder | None = None
        self.draining = False
        self._config = config
        self._engine = engine
        self._tracing = tracing
        self._preparation = preparation

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        trace = self._tracing.begin(context, "Generate") if self._tracing else None
        async with call(context, "Generate", logging.INFO, trace) as fields:
            whole, texts = pb.GenerateResponse(), []

            async def take(part: pb.StreamGenerateResponse) -> None:
                texts.append(part.text)
                whole.token_ids.extend(part.token_ids)
                whole.logprobs.extend(part.logprobs)
                whole.prompt_logprobs.extend(part.prompt_logprobs)
                if part.HasField("finish"):
                    whole.finish.CopyFrom(part.finish)

            ask = await self._ask(request, context, fields)
            validation.check_unary_size(ask.request)
            answer, stream = Answer(ask, self._tokenizer), self._engine.submit(ask.request)
            await self._answer(answer, stream, context, fields, trace, take)
            whole.text = "".join(texts)
        return whole

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Context) -> None:
        trace = self._tracing.begin(context, "StreamGenerate") if self._tracing else None
        async with call(context, "StreamGenerate", logging.INFO, trace) as fields:
            ask = await self._ask(request, context, fields, new_token() if self._config.resume_seconds else "")
            answer, stream = Answer(ask, self._tokenizer), self._engine.submit(ask.request)
            await self._answer(answer, stream, context, fields, trace, context.write)

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: Context) -> None:
        trace = self._tracing.begin(context, "ResumeStream") if self._tracing else None
        async with call(context, "ResumeStream", logging.INFO, trace) as fields:
            whose = caller(context)
            fields["client"] = whose.name
            self._require_folder()
            held, deadline = request.token_offset, _deadline(context)
            stream = await self._engine.resume(request.resume_token, held, whose.owner, deadline)
            with contextlib.closing(stream):
                asked = stream.request
                fields.update(id=asked.request_id, prompt_tokens=len(asked.prompt_ids), resumed_at=held)
                answer = Answer(resume.unpack(asked), self._tokenizer, held)
                await self._answer(answer, stream, context, fields, trace, context.write)

    async def Tokenize(self, request: tokenize_pb2.TokenizeRequest, context: Context) -> tokenize_pb2.TokenizeResponse:
        async with call(context, "Tokenize"):
            folder = self._require_folder()
            validation.check_model(request.model if request.HasField("model") else None, folder)
            check_prompt_size(request, folder.tokenizer, self._max_model_len)
            policy = validation.Policy(chat_special_tokens=self._config.chat_special_tokens)
            response = await self._prepare(
                context, "tokenize", request, validation.tokenize, request, folder.tokenizer, self._max_model_len,
                policy)
        return response

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: Context
    ) -> tokenize_pb2.DetokenizeResponse:
        async with call(context, "Detokenize"):
            folder = self._require_folder()
            validation.check_model(request.model if request.HasField("model") else None, folder)
            vocabulary = self._engine.require().vocabulary_size
            text = await self._prepare(
                context, "detokenize", request, validation.detokenize, request, folder.tokenizer, vocabulary,
                self._max_model_len)
        return tokenize_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        async with call(context, "GetModelInfo"):
            folder, info = self._require_folder(), self._engine.require()
            tokenizer = folder.tokenizer
            response = model_pb2.GetModelInfoResponse(
                name=folder.name, family=info.family, vocabulary_size=info.vocabulary_size,
                max_model_len=info.max_model_len, dtype=info.dtype, quantization=info.quantization,
                kv_cache_dtype=info.kv_cache_dtype, backend=info.backend, has_tokenizer=tokenizer is not None,
                has_chat_template=tokenizer is not None and tokenizer.chat is not None,
                max_num_seqs=info.max_num_seqs, max_queue=info.max_queue, kv_cache_tokens=info.kv_cache_tokens,
                eos_token_ids=sorted(folder.eos_token_ids), parameters=info.parameters)
        return response

    async def GetLoad(self, request: model_pb2.GetLoadRequest, context: Context) -> model_pb2.GetLoadResponse:
        async with call(context, "GetLoad"):
            info, load = self._engine.require(), self._engine.load
            response = model_pb2.GetLoadResponse(
                running=load.running, waiting=load.waiting, free_kv_ratio=load.free_kv_ratio,
                tokens_per_second=load.tokens_per_second, max_num_seqs=info.max_num_seqs, max_queue=info.max_queue,
                preparing=self._preparation.count)
        return response

    async def _answer(
        self, answer: Answer, stream: Stream, context: Context, fields: dict[str, Any], trace: Trace | None,
        send: Callable[[pb.StreamGenerateResponse], Awaitable[None]],
    ) -> None:
        """Send the messages of one answer; the last one has its finish. Close the stream."""
        assert self.folder
        with contextlib.closing(stream), _patient(stream), _resumable(context, stream):
            await stream.accepted()
            await _send_metadata(context, stream.request)
            async for outputs in stream:
                finish = answer.add(outputs)
                if answer.keep is not None and finish is None:
                    finish = await stream.stop(answer.keep)
                for prompt_part in answer.prompt_messages():
                    await send(prompt_part)
                    await asyncio.sleep(0)  # other streams go on between the parts of a long prompt
                if finish:
                    last = answer.last(finish, time.monotonic())
                    self._record(last.finish, finish.timing, stream, fields)
                    if trace:
                        trace.finished(finish.timing, self.folder.name, stream.first_token)
                    await send(last)
                    return
                part = answer.message(time.monotonic())
                if part:
                    await send(part)

    @property
    def _tokenizer(self) -> Tokenizer | None:
        assert self.folder
        return self.folder.tokenizer

    async def _ask(
        self, message: pb.GenerateRequest, context: Context, fields: dict[str, Any], token: str = ""
    ) -> Ask:
        """token: to resume it with, unless its record may grow too large; "" for none."""
        arrival, deadline = time.monotonic(), _deadline(context)
        whose = caller(context)
        fields["client"] = whose.name
        name = fields["id"] = validation.request_id(message)
        context.set_trailing_metadata(((REQUEST_ID, name),))  # in case of an error before the initial metadata
        folder, info = self._require_folder(), self._engine.require()
        if message.ByteSize() > INLINE_BYTES:
            check_prompt_size(message, folder.tokenizer, info.max_model_len)
        limit, priorities = whose.limits.within(self._config)
        policy = validation.Policy(Range(*priorities), self._config.chat_special_tokens)
        ask = await self._prepare(
            context, "generate", message, validation.check, message, folder, info, name, arrival, policy)
        ask = dataclasses.replace(ask, request=msgspec.structs.replace(
            ask.request, client=whose.name, owner=whose.owner, client_limit=limit, deadline=deadline,
            cache_salt=whose.namespace(ask.request.cache_salt, self._config.share_prefix_cache),
            ask=resume.pack(ask)))
        if token and is_resumable(ask.request):
            ask = dataclasses.replace(ask, request=msgspec.structs.replace(ask.request, resume_token=token))
        fields["prompt_tokens"] = len(ask.request.prompt_ids)
        if self._config.log_prompts:
            fields["prompt"] = message.text or str(message.chat if message.HasField("chat") else message.token_ids.ids)
        return ask

    def _record(self, finish: pb.Finish, timing: messages.Timing, stream: Stream, fields: dict[str, Any]) -> None:
        """An answer's end: its metrics, and its part of the log line."""
        arrival, generated = stream.request.arrival, finish.usage.generated_tokens
        reason = REASON_NAMES[finish.reason]
        metrics.request_finish_total.labels(reason).inc()
        metrics.request_prompt_tokens.observe(finish.usage.prompt_tokens)
        metrics.request_generation_tokens.observe(generated)
        metrics.prefill_time_seconds.observe(sum(timing.prefill_chunks))
        metrics.decode_time_seconds.observe(timing.decode)
        fields.update(reason=reason, cached_tokens=finish.usage.cached_tokens, generated_tokens=generated)
        if stream.first_token is not None and stream.last_token is not None:
            ttft, e2e = stream.first_token - arrival, stream.last_token - arrival
            tpot = (e2e - ttft) / (generated - 1) if generated > 1 else 0.0
            metrics.e2e_request_latency_seconds.observe(e2e)
            if generated > 1:
                metrics.time_per_output_token_seconds.observe(tpot)
            if ttft <= self._config.target_ttft_seconds and tpot <= self._config.target_itl_seconds:
                metrics.requests_on_target_total.inc()
            fields.update(ttft=round(ttft, 6), e2e=round(e2e, 6))

    async def _prepare(
        self, context: Context, kind: Kind, message: Any, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function: at once if the message is small, else in the pool. A chat always goes to the pool, since
        its template runs in another process."""
        size, is_chat = message.ByteSize(), kind != "detokenize" and message.WhichOneof("prompt") == "chat"
        if size <= INLINE_BYTES and not is_chat:
            return function(*args, **kwargs)
        return await self._preparation.run(caller(context).name, kind, size, function, *args, **kwargs)

    @property
    def _max_model_len(self) -> int:
        """Tokens of the context, also while the engine is restarted. Unavailable before it was ready once."""
        info = self._engine.model_info or self._engine.require()
        return info.max_model_len

    def _require_folder(self) -> ModelFolder:
        if self.draining:
            raise Unavailable("the server is draining; another will take the request")
        if self.folder is None:
            raise Unavailable("the tokenizer is loading")
        return self.folder


async def _send_metadata(context: Context, request: messages.Request) -> None:
    token = ((RESUME_TOKEN, request.resume_token),) if request.resume_token else ()
    await context.send_initial_metadata(((REQUEST_ID, request.request_id), *token))
    context.set_trailing_metadata(())


def _deadline(context: Context) -> float | None:
    """In time.monotonic() seconds."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


@contextlib.contextmanager
def _patient(stream: Stream) -> Iterator[None]:
    """A reader that took nothing for too long is told so, if it ever reads on."""
    try:
        yield
    except asyncio.CancelledError:
        if stream.slow:
            raise stream.slow from None
        raise


@contextlib.contextmanager
def _resumable(context: Context, stream: Stream) -> Iterator[None]:
    """Add the resume token to the trailing metadata of an accepted stream that this server cannot continue."""
    try:
        yield
    except Unavailable:
        if stream.is_accepted and stream.request.resume_token:
            context.set_trailing_metadata(((RESUME_TOKEN, stream.request.resume_token),))
        raise
