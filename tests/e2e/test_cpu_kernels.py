"""The choice of CPU kernels is kept over a restart of the engine."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from npuserve.kernels import native
from npuserve.kernels.native.choice import KINDS, gemm_of
from npuserve.v1 import generate_pb2 as pb
from tests.e2e import brittle
from tests.e2e.processes import engine_of
from tests.e2e.server import Server, request, serving

pytestmark = pytest.mark.slow
BRITTLE = ("-m", "tests.e2e.brittle", "serve")
ON_CPU = ("--device", "cpu", "--log-format", "text")
ISAS = native.library().isas if native.available() else []
GEMMS = list(dict.fromkeys(gemm_of(isa) for isa in ISAS))
"""GEMM implementations for bfloat16 on this machine."""


def write_rates(file: Path, fastest: str) -> None:
    file.write_text(json.dumps({isa: dict.fromkeys(KINDS, 2.0 if isa == fastest else 1.0) for isa in ISAS[:2]}))


def chosen(server: Server, lives: int) -> list[tuple[str, str]]:
    """Wait until `lives` engines were ready; return (instruction set, kept) of each engine so far."""
    until = time.monotonic() + 60
    while len(re.findall(r"ready in [\d.]+ s", server.log)) < lives:
        assert time.monotonic() < until, server.log
        time.sleep(0.02)
    return re.findall(r"CPU kernels run on (\w+),.* kept=(\w+)", server.log)


@pytest.mark.full
@pytest.mark.skipif(len(ISAS) < 2, reason="the native kernels have one instruction set here")
def test_restarted_engine_keeps_the_instruction_set_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the rates have changed, so that answers stay bit-identical. Another server follows them.

    By default tests/service/supervisor/test_supervisor.py has what the next engine gets.
    """
    first, second = ISAS[:2]
    rates = tmp_path / "rates"
    write_rates(rates, second)
    monkeypatch.setenv(brittle.RATES, str(rates))

    def answer(server: Server) -> tuple[pb.GenerateResponse, bytes]:
        found = server.stub.Generate(request("Once upon a time", 48, logprobs=2, ignore_eos=True), timeout=60)
        return found, b"".join(report.SerializeToString(deterministic=True) for report in found.logprobs)

    with serving(*ON_CPU, program=BRITTLE) as server:
        assert chosen(server, 1) == [(second, "False")]
        alone, reports = answer(server)
        assert reports
        write_rates(rates, first)
        os.kill(engine_of(server), signal.SIGKILL)
        assert chosen(server, 2) == [(second, "False"), (second, "True")]
        again, same_reports = answer(server)
        assert (again.token_ids, same_reports) == (alone.token_ids, reports)
        assert server.metric("npuserve_cpu_kernels_info", isa=second, weights="compact") == 1
        assert server.metric("npuserve_cpu_peak_flops", isa=second, numbers="bf16") == 2e9
    with serving(*ON_CPU, program=BRITTLE) as server:
        assert chosen(server, 1) == [(first, "False")]


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.full
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("weights", ["plain", "auto"])
def test_tokens_are_equal_alone_among_32_rows_and_after_a_kill(gemm: str, weights: str) -> None:
    """The format of the weights is kept over the restart, too.

    By default tests/kernels/native checks that rows are independent of the batch.
    """
    wanted = request("Once upon a time", 64, ignore_eos=True)
    with serving(*ON_CPU, "--dtype", "bfloat16", "--cpu-gemm", gemm, "--cpu-weights", weights) as server:
        alone = server.stub.Generate(wanted, timeout=60).token_ids
        assert f"bfloat16 products by {gemm}," in server.log
        others = [server.stub.Generate.future(request(f"{i} little dogs", 64, ignore_eos=True), timeout=60)
                  for i in range(31)]
        assert server.stub.Generate(wanted, timeout=60).token_ids == alone
        assert {len(other.result().token_ids) for other in others} == {64}
        stream = server.stub.StreamGenerate(wanted, timeout=60)
        ids = list(next(stream).token_ids)
        os.kill(engine_of(server), signal.SIGKILL)
        ids += [token for part in stream for token in part.token_ids]
        assert ids == alone
        assert [kept for _, kept in chosen(server, 2)] == ["False", "True"]
        if weights == "plain":
            assert server.log.count("plain weights") == 2
            assert server.metric("npuserve_cpu_kernels_info", weights="plain") == 1
