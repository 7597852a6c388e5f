"""Servicer of AdminService."""

from __future__ import annotations

import logging
import time

from google.protobuf import duration_pb2

from npuserve.npu.profile import DEFAULT_SECONDS, DEFAULT_STEPS
from npuserve.service.config import MAX_DRAIN_SECONDS, ServerConfig, to_json
from npuserve.service.errors import InvalidField, RequestNotFound
from npuserve.service.ipc.explanations import Explanation
from npuserve.service.processes import child
from npuserve.service.requests.fields import check_profile_name, check_profile_seconds, check_profile_steps
from npuserve.service.rpc.call import Context, call
from npuserve.service.streams.engine_client import EngineClient
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc

NANOS = 1_000_000_000


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Servicer of AdminService. The interceptor of access/auth.py authorizes its callers.

    started: time.monotonic() seconds of the server's start.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient, started: float):
        self._config = config
        self._engine = engine
        self._started = started

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with call(context, "Abort"):
            if not request.request_id:
                raise InvalidField("request_id", "must not be empty")
            aborted = await self._engine.abort(request.request_id, request.client)
            if not aborted:
                raise RequestNotFound("request_id: no live request has this id")
            if aborted > 1:
                raise InvalidField("client", f"must be set: {aborted} clients have a live request with this id")
        return pb.AbortResponse()

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        async with call(context, "FlushPrefixCache"):
            blocks = await self._engine.flush_prefix_cache()
        return pb.FlushPrefixCacheResponse(flushed_blocks=blocks)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        async with call(context, "GetServerInfo"):
            from importlib import metadata  # slow to import, rarely needed

            uptime = duration_pb2.Duration()
            uptime.FromNanoseconds(int((time.monotonic() - self._started) * 1e9))
            response = pb.GetServerInfoResponse(
                version=metadata.version("npuserve"), uptime=uptime, config_json=to_json(self._config).decode(),
                engine_epoch=self._engine.epoch)
        return response

    async def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: Context
    ) -> pb.ExplainRequestResponse:
        async with call(context, "ExplainRequest"):
            if not request.request_id:
                raise InvalidField("request_id", "must not be empty")
            explanations = await self._engine.explain(request.request_id, request.client)
            if not explanations:
                raise RequestNotFound("request_id: no live request has this id, and none of the latest that ended")
        return pb.ExplainRequestResponse(requests=map(_explanation, explanations))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async with call(context, "Drain", logging.INFO) as fields:
            seconds = self._config.drain_seconds
            if request.HasField("grace"):
                seconds = _seconds("grace", request.grace)
            if not 0 <= seconds <= MAX_DRAIN_SECONDS:
                raise InvalidField("grace", f"must be in [0, {MAX_DRAIN_SECONDS}] seconds, got {seconds:.15g}")
            fields["drain_seconds"] = seconds
            child.report("drain", seconds=seconds)
        return pb.DrainResponse()

    async def StartProfile(self, request: pb.StartProfileRequest, context: Context) -> pb.StartProfileResponse:
        async with call(context, "StartProfile", logging.INFO) as fields:
            steps = request.steps if request.HasField("steps") else DEFAULT_STEPS
            seconds = DEFAULT_SECONDS
            if request.HasField("max_duration"):
                seconds = _seconds("max_duration", request.max_duration)
            name = check_profile_name("name", request.name) if request.HasField("name") else ""
            fields["profile_steps"] = steps
            fields["profile_seconds"] = seconds
            steps = check_profile_steps("steps", steps)
            seconds = check_profile_seconds("max_duration", seconds)
            started = await self._engine.profiles.start(name, steps, seconds)
        return pb.StartProfileResponse(name=started)

    async def StopProfile(self, request: pb.StopProfileRequest, context: Context) -> pb.StopProfileResponse:
        async with call(context, "StopProfile", logging.INFO):
            profile = await self._engine.profiles.stop(request.wait)
        response = pb.StopProfileResponse(
            name=profile.name, path=profile.path, bytes=profile.nbytes, steps=profile.steps, layers=profile.layers,
            has_times=profile.has_times, recorder=profile.device,
            ending=pb.ProfileEnding.Value(f"PROFILE_ENDING_{profile.ended.upper()}"),
            kernels=[pb.ProfiledKernel(kernel=row.kernel, calls=row.calls, seconds=row.seconds,
                                       floor_bytes=row.floor_bytes) for row in profile.kernels])
        response.duration.FromNanoseconds(int(profile.seconds * 1e9))
        response.step_time.FromNanoseconds(int(profile.step_seconds * 1e9))
        return response


def _explanation(explanation: Explanation) -> pb.RequestExplanation:
    message = pb.RequestExplanation(
        request_id=explanation.request_id, client=explanation.client, index=explanation.index,
        live=explanation.is_live, prompt_tokens=explanation.prompt_tokens, cached_tokens=explanation.cached_tokens,
        generated_tokens=explanation.generated_tokens, steps=explanation.num_steps, complete=explanation.is_complete,
        kernels=[pb.KernelComparison(kernel=row.kernel, calls=row.calls, mean_seconds=row.mean_seconds,
                                     usual_seconds=row.usual_seconds) for row in explanation.kernels])
    message.duration.FromNanoseconds(int(explanation.seconds * NANOS))
    for delay in explanation.delays:
        cause = pb.DelayCause.Value(f"DELAY_CAUSE_{delay.cause.upper()}")
        row = message.delays.add(cause=cause, count=delay.steps, detail=delay.detail)
        row.duration.FromNanoseconds(int(delay.seconds * NANOS))
    return message


def _seconds(field: str, duration: duration_pb2.Duration) -> float:
    """Return a duration in seconds. Raises InvalidField if its nanoseconds are negative or a second or more."""
    if not 0 <= duration.nanos < NANOS:
        raise InvalidField(f"{field}.nanos", f"must be in [0, {NANOS - 1}], got {duration.nanos}")
    return duration.seconds + duration.nanos / NANOS
