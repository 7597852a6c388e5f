"""Generation for a call: from the request message to the last message of the answer.

Life of a request:

1. `check` checks that the server is ready and that every field is valid. It applies the chat template and tokenizes the
   text, in the pool of preparation.py unless the text is short.
2. `answer` sends the checked `Request` to the engine with `EngineClient.submit`, which returns the stream of its
   outputs.
3. It waits until the engine has accepted the request, and sends the initial metadata: request id and resume token. An
   error before that has the request id in its trailing metadata, and no resume token.
   Then it converts outputs to messages and sends them. `ResponseBuilder` detokenizes, finds stop strings, and keeps
   ids, logprobs and text together. Outputs that arrive while a message is being written are merged into the next one.
4. A stop string also ends the request in the engine, at the token that completed it.
5. The last message holds the finish reason, the usage and the timing.
6. If the call ends early (client left, deadline, error), the stream is closed, which cancels the request. The output of
   a StreamGenerate is kept for `resume_seconds`, for ResumeStream.

With n above 1 each sample is a request: steps 2 to 5 apply to each (samples.py). The initial metadata waits for all of
them, and the error of one closes the streams of all. Such a call cannot be resumed.

`resume` begins at step 3 with the stream that `EngineClient.resume` finds. `ResponseBuilder` then gets all tokens
again, and skips the first `token_offset` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from npuserve.service.access.caller import Caller, get_caller
from npuserve.service.config import ServerConfig
from npuserve.service.errors import ServeError, Unavailable
from npuserve.service.frontend import response_options, samples
from npuserve.service.frontend.call_summary import CallSummary
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.frontend.samples import Send
from npuserve.service.ipc import messages
from npuserve.service.requests import validation
from npuserve.service.requests.preparation import Kind, Preparation
from npuserve.service.requests.prompt import check_prompt_size
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.rpc.call import Context, arrival
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.streams.records import is_resumable
from npuserve.service.streams.stream import Stream
from npuserve.service.text.model_folder import ModelFolder, Range
from npuserve.v1 import generate_pb2 as pb

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace
    from npuserve.service.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

REQUEST_ID = "x-request-id"
RESUME_TOKEN = "x-resume-token"
INLINE_BYTES = 2048
"""Maximum input that is checked and tokenized on the event loop, in about a millisecond. Larger input uses the pool."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallerRequest:
    """A request's caller, limits and deadline, and the model that serves it.

    name: request id.
    deadline: time.monotonic() seconds; None for none.
    shares_prefixes: cached prefixes are shared with other callers.
    """

    caller: Caller
    name: str
    deadline: float | None
    folder: ModelFolder
    info: messages.ModelInfo
    policy: validation.Policy
    shares_prefixes: bool

    def owned(self, request: messages.Request) -> messages.Request:
        """Return a checked request as the caller's."""
        return msgspec.structs.replace(
            request, client=self.caller.name, owner=self.caller.owner, client_limit=self.policy.max_requests,
            deadline=self.deadline, cache_salt=self.caller.namespace(request.cache_salt, self.shares_prefixes))


class Generation:
    """Generation for the servicers of one front end.

    folder: the model's folder with its tokenizer; None until it is loaded.
    is_draining: new requests get UNAVAILABLE.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient, preparation: Preparation):
        self.folder: ModelFolder | None = None
        self.is_draining = False
        self._config = config
        self._engine = engine
        self._preparation = preparation

    @property
    def preparing(self) -> int:
        """Number of calls whose input is being prepared."""
        return self._preparation.count

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model; None if it has none. Only after `require_folder`."""
        assert self.folder
        return self.folder.tokenizer

    @property
    def max_model_len(self) -> int:
        """Context length in tokens, known also while the engine restarts. Raises Unavailable before the first start."""
        return self._engine.require_model_info().max_model_len

    def require_folder(self) -> ModelFolder:
        """Return the model's folder. Raises Unavailable during a drain and until the tokenizer is loaded."""
        if self.is_draining:
            raise Unavailable("the server is draining; send the request to another server")
        if self.folder is None:
            raise Unavailable("the tokenizer is loading")
        return self.folder

    def begin(
        self, message: validation.Named, context: Context, fields: dict[str, Any], max_request_id_characters: int
    ) -> CallerRequest:
        """Return what the server knows of a request before its fields are checked. Arguments as of `check`.

        Raises Unavailable if the server is not ready.
        """
        deadline = _deadline(context)
        caller = get_caller(context)
        fields["client"] = caller.name
        name = fields["id"] = validation.request_id(message, max_request_id_characters)
        context.set_trailing_metadata(((REQUEST_ID, name),))  # for an error before the initial metadata
        folder = self.require_folder()
        info = self._engine.require()
        limit, priorities = caller.limits.within(self._config)
        policy = validation.Policy(Range(*priorities), self._config.plain_content, limit, max_request_id_characters)
        return CallerRequest(
            caller, name, deadline, folder, info, policy, self._config.share_prefix_cache == "all")

    async def check(
        self, message: pb.GenerateRequest, context: Context, fields: dict[str, Any], token: str = "",
        max_request_id_characters: int = validation.MAX_REQUEST_ID_CHARACTERS,
    ) -> CheckedRequest:
        """Return the checked request with its caller, limits and deadline. Add its id and size to the log line.

        token: resume token, which is dropped if the stream's record may grow too large, and with several samples; "":
            none.
        max_request_id_characters: see `validation.Policy`.
        Raises ServeError if a field is invalid or the server is not ready.
        """
        call = self.begin(message, context, fields, max_request_id_characters)
        if message.ByteSize() > INLINE_BYTES:
            check_prompt_size(message, call.folder.tokenizer, call.info.max_model_len)
        checked = await self.prepare(
            context, "generate", message, validation.check, message, call.folder, call.info, call.name, arrival(),
            call.policy)
        request = call.owned(checked.request)
        if token and request.samples == 1:
            resumable = msgspec.structs.replace(request, options=response_options.pack(checked), resume_token=token)
            if is_resumable(resumable):
                request = resumable
        fields["prompt_tokens"] = len(request.prompt_ids)
        if request.constraint:
            fields["constraint"] = request.constraint.kind
        if self._config.log_prompts:
            fields["prompt"] = message.text or str(message.chat if message.HasField("chat") else message.token_ids.ids)
        return dataclasses.replace(checked, request=request)

    async def prepare(
        self, context: Context, kind: Kind, message: Any, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function and return its result: at once for a small message, else in the pool.

        A chat always uses the pool, since its template runs in another process, as does a reranker's. So does each
        prompt for a tokenizer that encodes in other processes.
        """
        has_prompt = "prompt" in message.DESCRIPTOR.oneofs_by_name
        size = message.ByteSize()
        is_chat = kind == "rank" or (has_prompt and message.WhichOneof("prompt") == "chat")
        is_isolated = (has_prompt or kind == "embed") and self.tokenizer is not None and self.tokenizer.is_isolated
        if size <= INLINE_BYTES and not is_chat and not is_isolated:
            return function(*args, **kwargs)
        return await self._preparation.run(get_caller(context).name, kind, size, function, *args, **kwargs)

    async def answer(
        self, checked: CheckedRequest, context: Context, fields: dict[str, Any], trace: Trace | None, send: Send
    ) -> None:
        """Generate the answer of a checked request, and send its messages, the last one of each sample with its finish.

        send: called for one message at a time, from several tasks if there are several samples.
        """
        if checked.request.samples > 1:
            await self._answer_samples(checked, context, fields, trace, send)
            return
        builder = ResponseBuilder(checked, self.tokenizer if checked.has_text else None)
        with contextlib.closing(self._engine.submit(checked.request)) as stream:
            await self._send_messages(builder, stream, context, fields, trace, send)

    async def resume(
        self, token: str, offset: int, context: Context, fields: dict[str, Any], trace: Trace | None, send: Send
    ) -> None:
        """Send the messages of a stream after its first `offset` tokens. Raises StreamNotFound, InvalidField."""
        self.require_folder()
        caller = get_caller(context)
        with contextlib.closing(
            await self._engine.resume(token, offset, caller.owner, _deadline(context), caller.name)
        ) as stream:
            resumed = stream.request
            fields.update(id=resumed.request_id, prompt_tokens=len(resumed.prompt_ids), resumed_at=offset)
            builder = ResponseBuilder(response_options.unpack(resumed), self.tokenizer, offset)
            await self._send_messages(builder, stream, context, fields, trace, send)

    async def _send_messages(
        self, builder: ResponseBuilder, stream: Stream, context: Context, fields: dict[str, Any], trace: Trace | None,
        send: Send,
    ) -> None:
        """Send the messages of one answer, the last one with the finish."""
        assert self.folder
        summary = CallSummary(self._config, self.folder.name, 1, fields, trace)
        try:
            await stream.wait_until_accepted()
            await _send_metadata(context, stream.request)
            await _send_outputs(builder, stream, summary, send)
        except Unavailable:  # this server cannot continue the stream
            if stream.is_accepted and stream.request.resume_token:
                context.set_trailing_metadata(((RESUME_TOKEN, stream.request.resume_token),))
            raise

    async def _answer_samples(
        self, checked: CheckedRequest, context: Context, fields: dict[str, Any], trace: Trace | None, send: Send
    ) -> None:
        """Generate all samples of a request, and send their messages one at a time."""
        assert self.folder
        parts = samples.split(checked)
        order = samples.SendOrder(send)
        summary = CallSummary(self._config, self.folder.name, len(parts), fields, trace)
        with contextlib.ExitStack() as closing:
            streams = [closing.enter_context(contextlib.closing(self._engine.submit(part.request))) for part in parts]
            for stream in streams:
                await stream.wait_until_accepted()
            await _send_metadata(context, checked.request)
            tokenizer = self.tokenizer if checked.has_text else None
            builders = [ResponseBuilder(part, tokenizer) for part in parts]
            try:
                await samples.run_together(
                    _send_outputs(builder, stream, summary, order.of(stream))
                    for builder, stream in zip(builders, streams, strict=True))
            except ServeError as error:
                error.is_behind_messages = order.is_pending
                raise


async def _send_outputs(builder: ResponseBuilder, stream: Stream, summary: CallSummary, send: Send) -> None:
    """Send the messages of an accepted request, the last one with the finish. Raises the error that ends the stream."""
    has_prompt_messages = stream.request.sampling.prompt_logprobs is not None
    try:
        async for outputs in stream:
            finish = builder.add(outputs)
            if builder.keep is not None and finish is None:
                finish = await stream.stop(builder.keep)
            for prompt_part in builder.prompt_messages() if has_prompt_messages else ():
                await send(prompt_part)
                await asyncio.sleep(0)  # let other streams run between the parts of a long prompt
            if finish:
                last = builder.last_message(finish, time.monotonic())
                summary.finished(last.finish, finish.timing, stream)
                await send(last)
                return
            part = builder.next_message(time.monotonic())
            if part:
                await send(part)
    except asyncio.CancelledError:
        if stream.slow:  # for the client that resumes reading
            raise stream.slow from None
        raise


async def _send_metadata(context: Context, request: messages.Request) -> None:
    """Send request id and resume token as initial metadata, and no trailing metadata."""
    token = ((RESUME_TOKEN, request.resume_token),) if request.resume_token else ()
    await context.send_initial_metadata(((REQUEST_ID, request.request_id), *token))
    context.set_trailing_metadata(())


def _deadline(context: Context) -> float | None:
    """Return the call's deadline in time.monotonic() seconds; None if it has none."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left
