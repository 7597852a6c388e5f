"""Server with a known answer: each word of the prompt is repeated in capitals, as one token and one message.

The embedding of a text is its length and 0.5, and the score of a document its share of "a".

The words of a sample with an index above 0 end with the index. The samples end in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from npuserve.cli.connection import READINESS
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2, pooling_pb2


class Echo(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer of the fake server.

    requests: requests received by StreamGenerate.
    pooled: requests received by Embed and Rank.
    fail: (code, details) of the error after the first word; None to complete answers.
    satisfies: answers satisfy their constraints.
    endless: continue each answer with "." until it is cancelled.
    ended: number of calls that ended.
    """

    def __init__(self) -> None:
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.pooled: list[pooling_pb2.EmbedRequest | pooling_pb2.RankRequest] = []
        self.fail: tuple[grpc.StatusCode, str] | None = None
        self.satisfies = True
        self.endless = False
        self.ended = 0
        self.has_chat_template = True

    def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> model_pb2.GetModelInfoResponse:
        return model_pb2.GetModelInfoResponse(name="echo", has_chat_template=self.has_chat_template)

    def Embed(
        self, request: pooling_pb2.EmbedRequest, context: grpc.ServicerContext
    ) -> pooling_pb2.EmbedResponse:
        self.pooled.append(request)
        if self.fail:
            context.abort(*self.fail)
        return pooling_pb2.EmbedResponse(values=[len(request.text), 0.5])

    def Rank(self, request: pooling_pb2.RankRequest, context: grpc.ServicerContext) -> pooling_pb2.RankResponse:
        self.pooled.append(request)
        return pooling_pb2.RankResponse(scores=[text.count("a") / len(text) for text in request.documents])

    def StreamGenerate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.StreamGenerateResponse]:
        self.requests.append(request)
        context.add_callback(self._ended)
        words = (request.chat.messages[-1].content if request.HasField("chat") else request.text).upper().split()
        samples = range(request.n or 1)
        for offset, word in enumerate(words):
            for index in reversed(samples):
                text = f"{word}{index or ''} "
                yield generate_pb2.StreamGenerateResponse(text=text, offset=offset, num_tokens=1, index=index)
            if self.fail:
                context.abort(*self.fail)
        while self.endless:
            yield generate_pb2.StreamGenerateResponse(text=".", offset=len(words))
        finish = generate_pb2.Finish(reason=generate_pb2.FINISH_REASON_EOS)
        finish.usage.generated_tokens = len(words)
        finish.grammar_completed = request.WhichOneof("constraint") is not None and self.satisfies
        for index in reversed(samples):
            yield generate_pb2.StreamGenerateResponse(finish=finish, offset=len(words), index=index)

    def _ended(self) -> None:
        self.ended += 1


class Server:
    """Fake server on a free port. target: its address, host:port."""

    def __init__(self) -> None:
        self.echo = Echo()
        self._health = health.HealthServicer()
        server = grpc.server(futures.ThreadPoolExecutor(4))
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self.echo, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self.set_ready(True)
        server.start()
        self.stop = server.stop

    def set_ready(self, ready: bool) -> None:
        """Set the status of the readiness health service."""
        status = health_pb2.HealthCheckResponse
        self._health.set(READINESS, status.SERVING if ready else status.NOT_SERVING)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop(None).wait()
