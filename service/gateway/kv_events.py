"""SubscribeKvEvents: the changes of the prefix cache, for gateways that route by cached prefixes."""

from __future__ import annotations

from smg_grpc_proto.generated import common_pb2

from npuserve.service.errors import Reserved
from npuserve.service.ipc.engine_client import EngineClient
from npuserve.service.rpc.call import VLLM_ENGINE, Context, call, rpc_name


async def subscribe(engine: EngineClient, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
    """Write a KvEventBatch for each change until the client leaves."""
    async with call(context, rpc_name(VLLM_ENGINE, "SubscribeKvEvents")):
        raise Reserved("SubscribeKvEvents")
