"""A change of the system clock while a server runs."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import children, until
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_lifecycle import SERVING, health

CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *shift;

__attribute__((constructor)) static void map(void) {
    int file = open(getenv("CLOCK_SHIFT"), O_RDONLY);
    shift = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += *shift;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""Source of a preloaded library that adds the seconds in a file to the time of day."""


def logged_ahead(server: Server) -> timedelta:
    """Return by how much the log's time of the last request is ahead of this process's time."""
    last = [line for line in server.log.splitlines() if '"message": "request"' in line][-1]
    told = datetime.strptime(json.loads(last)["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    return told - datetime.now(timezone.utc)


@pytest.mark.slow
def test_clock_set_while_serving_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day forward, then two days back, in all processes of the server, between and during streams. Then the engine is
    killed, which was started at a later date than its successor."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c"], check=True)
    shift, day = tmp_path / "shift", 86400
    shift.write_bytes(struct.pack("@l", 0))
    monkeypatch.setenv("CLOCK_SHIFT", str(shift))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "clock.so"))

    def set_clock(seconds: int) -> None:
        with shift.open("r+b") as file:
            file.write(struct.pack("@l", seconds))

    with serving("--hang-seconds", "10", "--resume-seconds", "60", **COUNTING) as server:
        ask = request("Once upon a time", 400, ignore_eos=True)
        text, ids, _ = streamed(server.stub, ask)
        processes = children(server)
        for seconds in (day, -day):
            call = server.stub.StreamGenerate(ask, timeout=100)
            token = dict(call.initial_metadata())["x-resume-token"]
            first = next(call)
            set_clock(seconds)
            rest = list(call)
            assert first.text + "".join(part.text for part in rest) == text
            resume = pb.ResumeStreamRequest(resume_token=token, token_offset=len(first.token_ids))
            assert [i for part in server.stub.ResumeStream(resume, timeout=100) for i in part.token_ids] == [
                i for part in rest for i in part.token_ids]
            assert health(server) == SERVING
            until(lambda seconds=seconds: abs(logged_ahead(server) - timedelta(seconds=seconds)) < timedelta(hours=1))
        assert children(server) == processes
        call = server.stub.StreamGenerate(ask, timeout=100)
        begin = next(call).text
        os.kill(processes["engine"], signal.SIGKILL)
        assert begin + "".join(part.text for part in call) == text
        assert len(streamed(server.stub, ask)[1]) == len(ids)
        assert server.stop() == 0
