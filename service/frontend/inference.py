"""Servicer of InferenceService. `generation.py` describes the life of a request.

Generate joins the messages of StreamGenerate as the Python client does, so that all give the same answer. `call`
converts an error to the call's status, counts it, and writes the log line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from npuserve.common.answer import Answer
from npuserve.service.access.caller import get_caller
from npuserve.service.config import ServerConfig
from npuserve.service.frontend.generation import Generation
from npuserve.service.frontend.pooling import PooledCalls
from npuserve.service.requests import validation
from npuserve.service.requests.prompt import check_prompt_size
from npuserve.service.rpc.call import Context, arrival, call
from npuserve.service.rpc.unread_replies import UnreadReplies
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.streams.records import new_token
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, pooling_pb2, tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace, Tracing

DATA_TYPES = {
    "float32": model_pb2.DATA_TYPE_FLOAT32, "bfloat16": model_pb2.DATA_TYPE_BFLOAT16,
    "float16": model_pb2.DATA_TYPE_FLOAT16, "int8": model_pb2.DATA_TYPE_INT8,
    "float8_e4m3fn": model_pb2.DATA_TYPE_FLOAT8_E4M3FN,
}
QUANTIZATION_SCHEMES = {
    "none": model_pb2.QUANTIZATION_SCHEME_NONE, "w8a8": model_pb2.QUANTIZATION_SCHEME_W8A8,
    "w8a8-fp8": model_pb2.QUANTIZATION_SCHEME_W8A8_FP8, "w4a16": model_pb2.QUANTIZATION_SCHEME_W4A16,
    "w4a8": model_pb2.QUANTIZATION_SCHEME_W4A8,
}
DEVICE_BACKENDS = {
    "cpu": model_pb2.DEVICE_BACKEND_CPU, "npu": model_pb2.DEVICE_BACKEND_NPU, "cuda": model_pb2.DEVICE_BACKEND_CUDA,
}
TASKS = {"generate": model_pb2.TASK_GENERATE, "embed": model_pb2.TASK_EMBED, "rank": model_pb2.TASK_RANK}
"""Text of ModelInfo -> value of GetModelInfo's enum. A text that is absent here is UNSPECIFIED."""
MAX_UNREAD_ANSWER_BYTES = 64 << 20
"""Unread answers of Generate. A client that has some gets no new ones above it, nor above half of it of its own."""


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer of InferenceService.

    start_date: Unix time of the server's start, in seconds.
    tracing: None: off.
    """

    def __init__(
        self, config: ServerConfig, engine: EngineClient, generation: Generation, pooled: PooledCalls,
        start_date: float, tracing: Tracing | None,
    ):
        self._config = config
        self._engine = engine
        self._generation = generation
        self._pooled = pooled
        self._start_date = start_date
        self._tracing = tracing
        self._unread = UnreadReplies()
        self._unread_answers = UnreadReplies(MAX_UNREAD_ANSWER_BYTES)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        trace = self._begin_trace(request, context, "Generate")
        async with call(context, "Generate", logging.INFO, trace) as fields:
            checked = await self._generation.check(request, context, fields)
            caller = get_caller(context).name
            self._unread_answers.check(caller, "generate")
            validation.check_unary_size(checked.request)
            answer = Answer(checked.request.samples)

            async def add(part: pb.StreamGenerateResponse) -> None:
                answer.add(part)

            await self._generation.answer(checked, context, fields, trace, add)
            response = answer.response()
            self._unread_answers.count(context, caller, response.ByteSize())
        return response

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Context) -> None:
        trace = self._begin_trace(request, context, "StreamGenerate")
        async with call(context, "StreamGenerate", logging.INFO, trace) as fields:
            token = new_token() if self._config.resume_seconds else ""
            checked = await self._generation.check(request, context, fields, token)
            await self._generation.answer(checked, context, fields, trace, context.write)

    def _begin_trace(self, request: pb.GenerateRequest, context: Context, rpc: str) -> Trace | None:
        """Start the trace of a call; None if tracing is off."""
        operation = "chat" if request.HasField("chat") else "text_completion"
        return self._tracing.begin(context, rpc, arrival(), operation=operation) if self._tracing else None

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: Context) -> None:
        trace = self._tracing.begin(context, "ResumeStream", arrival(), operation="") if self._tracing else None
        async with call(context, "ResumeStream", logging.INFO, trace) as fields:
            fields["client"] = get_caller(context).name
            await self._generation.resume(
                request.resume_token, request.token_offset, context, fields, trace, context.write)

    async def Embed(self, request: pooling_pb2.EmbedRequest, context: Context) -> pooling_pb2.EmbedResponse:
        trace = self._tracing.begin(context, "Embed", arrival(), operation="embeddings") if self._tracing else None
        async with call(context, "Embed", logging.INFO, trace) as fields:
            response = await self._pooled.embed(request, context, fields, trace)
            self._unread.add(context, get_caller(context).name, "embed", response.ByteSize())
        return response

    async def Rank(self, request: pooling_pb2.RankRequest, context: Context) -> pooling_pb2.RankResponse:
        trace = self._tracing.begin(context, "Rank", arrival(), operation="rerank") if self._tracing else None
        async with call(context, "Rank", logging.INFO, trace) as fields:
            response = await self._pooled.rank(request, context, fields, trace)
            self._unread.add(context, get_caller(context).name, "rank", response.ByteSize())
        return response

    async def Tokenize(self, request: tokenize_pb2.TokenizeRequest, context: Context) -> tokenize_pb2.TokenizeResponse:
        async with call(context, "Tokenize"):
            folder = self._generation.require_folder()
            validation.check_model(request, folder)
            check_prompt_size(request, folder.tokenizer, self._generation.max_model_len)
            response = await self._generation.prepare(
                context, "tokenize", request, validation.tokenize, request, folder.tokenizer,
                self._generation.max_model_len, self._config.plain_content)
            self._unread.add(context, get_caller(context).name, "tokenize", response.ByteSize())
        return response

    async def Detokenize(
        self, request: tokenize_pb2.DetokenizeRequest, context: Context
    ) -> tokenize_pb2.DetokenizeResponse:
        async with call(context, "Detokenize"):
            folder = self._generation.require_folder()
            validation.check_model(request, folder)
            info = self._engine.require_model_info()
            text = await self._generation.prepare(
                context, "detokenize", request, validation.detokenize, request, folder.tokenizer, info.vocabulary_size,
                info.max_model_len)
            response = tokenize_pb2.DetokenizeResponse(text=text)
            self._unread.add(context, get_caller(context).name, "detokenize", response.ByteSize())
        return response

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        async with call(context, "GetModelInfo"):
            folder = self._generation.require_folder()
            info = self._engine.require_model_info()
            tokenizer = folder.tokenizer
            response = model_pb2.GetModelInfoResponse(
                name=folder.name, family=info.family, vocabulary_size=info.vocabulary_size,
                max_model_len=info.max_model_len, dtype=info.dtype, quantization=info.quantization,
                kv_cache_dtype=info.kv_cache_dtype, backend=info.backend, has_tokenizer=tokenizer is not None,
                has_chat_template=tokenizer is not None and tokenizer.chat is not None,
                max_num_seqs=info.max_num_seqs, max_queue=info.max_queue, kv_cache_tokens=info.kv_cache_tokens,
                eos_token_ids=sorted(folder.eos_token_ids), parameters=info.parameters,
                deterministic=info.deterministic, data_type=DATA_TYPES.get(info.dtype, model_pb2.DATA_TYPE_UNSPECIFIED),
                kv_cache_data_type=DATA_TYPES.get(info.kv_cache_dtype, model_pb2.DATA_TYPE_UNSPECIFIED),
                quantization_scheme=QUANTIZATION_SCHEMES.get(
                    info.quantization, model_pb2.QUANTIZATION_SCHEME_UNSPECIFIED),
                device_backend=DEVICE_BACKENDS.get(info.backend, model_pb2.DEVICE_BACKEND_UNSPECIFIED),
                task=TASKS[info.task], embedding_dimension=info.embedding_dimension)
            response.start_time.FromMilliseconds(round(1000 * self._start_date))
        return response

    async def GetLoad(self, request: model_pb2.GetLoadRequest, context: Context) -> model_pb2.GetLoadResponse:
        async with call(context, "GetLoad"):
            info = self._engine.require()
            load = self._engine.load
            response = model_pb2.GetLoadResponse(
                running=load.running, waiting=load.waiting, free_kv_ratio=load.free_kv_ratio,
                tokens_per_second=load.tokens_per_second, max_num_seqs=info.max_num_seqs, max_queue=info.max_queue,
                preparing=self._generation.preparing)
        return response
