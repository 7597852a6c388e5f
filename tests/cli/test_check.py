"""`npuserve check` on a model of a few thousand weights, whose sizes the tests compute by hand."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.cli.main import main
from npuserve.kernels import native
from npuserve.kernels.native import choice
from npuserve.npu import storyteller
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import load
from npuserve.npu.model import loader
from npuserve.npu.notices import Notice
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.w8a8 import W8A8
from tests.support.benches import bench
from tests.support.command import npuserve
from tests.support.hybrids import random_hybrid
from tests.support.models import edit_config, random_model, saved
from tests.support.mtp import add_mtp

ISAS = native.library().isas if native.available() else []
Capture = pytest.CaptureFixture[str]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def restored_kernels() -> Iterator[None]:
    """Restore the choice of CPU kernels at the end."""
    if not native.available():
        yield
        return
    lib = native.library()
    before = lib.isa, lib.compact
    yield
    lib.isa, lib.compact = before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def checked(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_explain_prints_meaning_and_advice(capsys: Capture) -> None:
    assert main(["check", "--explain", "207005"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("207005 ACL_ERROR_RT_RESOURCE_ALLOC_FAIL: ")
    assert "25.5.1 or later" in said
    assert main(["check", "--explain", "1"]) == 1
    assert "1 is not known here" in capsys.readouterr().out


def test_preflight_is_shown_and_an_error_fails_the_check(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [Notice("warning", "driver", "driver 24.1 is old"), Notice("ok", "CANN", "9.1.0")]
    monkeypatch.setattr(CpuBackend, "preflight", lambda **_: said)
    code, report = checked(capsys, "--device", "cpu")
    assert code == 0
    assert report["preflight"][0] == {
        "device": "cpu", "level": "warning", "name": "driver", "said": "driver 24.1 is old"}
    said.append(Notice("error", "TASK_QUEUE_ENABLE", "2 is wrong"))
    assert main(["check", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "\ncpu         warning  driver 24.1 is old\ncpu         ok       CANN: 9.1.0\n" in out
    assert "\ncpu         error    TASK_QUEUE_ENABLE: 2 is wrong\n" in out


def test_machine_is_that_of_the_system(folder: Path, capsys: Capture) -> None:
    _, report = checked(capsys, str(folder))
    machine = report["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["system"] == f"{platform.system()} {platform.machine()}"
    assert 1 <= machine["cores"] <= len(os.sched_getaffinity(0))
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert machine["memory_bytes"] == int(total.split()[1]) * 1024
    # torch queries the processor.
    if platform.machine() == "x86_64":
        assert ("avx2" in machine["cpu_features"]) == torch.cpu._is_avx2_supported()
        assert ("avx512f" in machine["cpu_features"]) == torch.cpu._is_avx512_supported()
    assert set(report["optional"]) == {"torch_npu", "triton", "transformers", "matplotlib"}


AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_native_lists_the_instruction_sets_of_the_processor(folder: Path, capsys: Capture) -> None:
    _, report = checked(capsys, str(folder))
    isas = ["portable"]
    if platform.machine() == "x86_64":
        flags = set(Path("/proc/cpuinfo").read_text().split())
        amx = {*AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
        isas = [*["avx512_amx"] * (flags >= amx),
                *["avx512_bf16"] * (flags >= {*AVX512, "avx512_bf16"}), *["avx512_vnni"] * (flags >= AVX512),
                *["avx2_vnni"] * (flags >= {"avx2", "fma", "avx_vnni"}), *["avx2"] * (flags >= {"avx2", "fma"}),
                "portable"]
    elif platform.machine() == "aarch64":
        flags = set(Path("/proc/cpuinfo").read_text().split())
        isas = [*["neon_bf16"] * (flags >= {"asimddp", "i8mm", "bf16"}),
                *["neon_dotprod"] * ("asimddp" in flags), "neon"]
    found = report["native"]["isas"]
    assert found == [isa for isa in isas if isa in found]  # some compilers lack some of them
    assert report["native"]["isa"] in found


@pytest.mark.skipif(
    len({*ISAS} - {"portable"}) < 2, reason="the native kernels have one instruction set to choose here")
def test_check_cpu_kernels_shows_choice_and_rates(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = ISAS
    rates = {first: {"bf16": 10.0, "fp32": 11.0, "int8": 12.0}, second: {"bf16": 20.0, "fp32": 22.0, "int8": 24.0}}
    monkeypatch.setattr(choice, "measure_rates", lambda: rates)
    found = checked(capsys, str(folder), "--device", "cpu", "--cpu-weights", "plain")[1]["native"]
    assert found == {
        "isa": second, "isas": ISAS, "missing": native.library().missing_isas, "gemm": choice.gemm_of(second),
        "weights": "plain", "gflops": rates,
        "plain_ms": None, "compact_ms": None, "measured_bytes": 0}
    main(["check", str(folder), "--device", "cpu"])
    out = capsys.readouterr().out
    assert f"\nnative      CPU kernels run on {second} (of {', '.join(ISAS)}), bfloat16 products by " in out
    assert f"\n            one thread on {first}: bf16 10 GFLOP/s, fp32 11 GFLOP/s, int8 12 GOP/s\n" in out


@pytest.mark.skipif(
    not ISAS or not {*ISAS}.isdisjoint(choice.BF16_ISAS), reason="this processor has the bfloat16 instruction")
def test_check_gemm_without_its_instruction_is_refused(folder: Path, capsys: Capture) -> None:
    code, report = checked(capsys, str(folder), "--device", "cpu", "--cpu-gemm", "bf16")
    assert code == 1
    possible = "auto, amx; with NATIVE_ISAS=all" if choice.AMX_ISA in ISAS else "auto, fma"
    assert report["model"]["error"].startswith(
        "cpu_gemm: 'bf16' is not possible: the kernels and this processor have the instruction sets "
        f"{', '.join(ISAS)}; possible are {possible}")


def test_check_compact_weights_are_smaller(folder: Path, capsys: Capture) -> None:
    if not native.available():
        pytest.skip("the native kernels are not built")
    plain, compact = (
        checked(capsys, str(folder), "--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "64",
                "--cpu-weights", form)[1]["model"]["bytes"]["weights"] for form in ("plain", "compact"))
    assert compact < plain


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_check_counts_weights_that_cannot_be_compact(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices, each in both forms. The KV cache is as large as before."""
    arguments = "--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "64", "--cpu-weights"
    plain, compact = (checked(capsys, *arguments, form)[1]["model"]["bytes"] for form in ("plain", "compact"))
    monkeypatch.setattr(loader, "packs_compact", lambda rows: False)
    both = checked(capsys, *arguments, "compact")[1]["model"]["bytes"]
    assert compact["weights"] + 0.9 * plain["weights"] < both["weights"] < compact["weights"] + plain["weights"]
    assert both["kv_cache"] == compact["kv_cache"]


def test_native_without_built_kernels_is_reported(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "unavailable_text", lambda: "they are not built")
    assert checked(capsys, str(folder))[1]["native"] == {"isa": None, "isas": []}
    main(["check", str(folder)])
    assert "\nnative      they are not built\n" in capsys.readouterr().out


def test_backends_cpu_is_available_with_all_kernels(folder: Path, capsys: Capture) -> None:
    _, report = checked(capsys, str(folder))
    cpu = report["backends"]["cpu"]
    assert cpu["supported"]
    assert cpu["available"]
    assert 0 < cpu["memory_available_bytes"] <= report["machine"]["memory_bytes"]
    assert {"paged_attention", "linear", "sample"} <= set(cpu["kernels"])
    assert set(cpu["kernels"].values()) <= {"cpu", "golden"}


@pytest.mark.slow
def test_check_json_absent_device_is_not_available() -> None:
    done = npuserve("check", "--json", environ={"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    backends = json.loads(done.stdout)["backends"]
    assert backends["npu"] == {"supported": True, "available": False}
    assert backends["cuda"] == {"supported": True, "available": False}
    assert not any("present" in backend for backend in backends.values())


def test_mixture_of_experts_has_the_parameters_of_a_token(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 16000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, report = checked(capsys, str(tmp_path), "--device", "cpu", "--max-model-len", "128")
    plan = report["model"]
    assert plan["parameters"] - plan["active_parameters"] == 2 * (8 - 2) * 3 * 32 * 16000
    main(["check", str(tmp_path), "--device", "cpu", "--max-model-len", "128"])
    assert re.search(r"Qwen3MoeForCausalLM, 24\.\d M parameters \(6\.\d M for a token\), float32 on cpu",
                     capsys.readouterr().out)


def test_model_that_fits_has_the_expected_plan(folder: Path, capsys: Capture) -> None:
    arguments = (str(folder), "--max-num-seqs", "4", "--max-model-len", "128", "--block-size", "16", "--device", "cpu")
    code, report = checked(capsys, *arguments)
    plan = report["model"]
    assert code == 1  # without weights
    assert plan["fits"]
    assert (plan["max_model_len"], plan["context_length"], plan["dtype"]) == (128, 256, "float32")
    # Embedding; per layer q, k, v, o, the norms of q and k, gate, up and down, two norms; the last norm.
    layer = 32 * (4 + 2 * 2) * 16 + 4 * 16 * 32 + 2 * 16 + 3 * 32 * 64 + 2 * 32
    assert plan["parameters"] == 128 * 32 + 2 * layer + 32
    tokens = 4 * 128
    assert plan["kv_cache_tokens"] == tokens
    assert plan["bytes"]["kv_cache"] == tokens * 2 * 2 * 2 * 16 * 4
    assert plan["bytes"]["weights"] >= plan["parameters"] * 4
    assert plan["peak_bytes"] == sum(plan["bytes"].values())
    main(["check", *arguments])
    assert " fits: needs " in capsys.readouterr().out


def test_model_quantized_has_smaller_weights(folder: Path, capsys: Capture) -> None:
    def plan(*arguments: str) -> dict[str, Any]:
        return checked(capsys, str(folder), "--max-model-len", "128", "--device", "cpu", *arguments)[1]["model"]

    whole = plan()
    assert whole["quantization"] == "none"
    quantization = Quantization(((("Linear",), W8A8()),), ("lm_head",))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization.to_json()}))
    quantized, head = plan(), plan("--lm-head-dtype", "int8")
    assert quantized["quantization"] == "w8a8"
    projections = 2 * (32 * (4 + 2 * 2) * 16 + 4 * 16 * 32 + 3 * 32 * 64)
    outputs = 2 * ((4 + 2 * 2) * 16 + 32 + 2 * 64 + 32)  # each output has a scale and a sum
    assert whole["bytes"]["weights"] - quantized["bytes"]["weights"] == 3 * projections - 8 * outputs
    assert quantized["bytes"]["weights"] - head["bytes"]["weights"] == 128 * (3 * 32 - 8)
    main(["check", str(folder), "--device", "cpu"])
    assert " M parameters, w8a8, float32 on cpu" in capsys.readouterr().out


def test_model_missing_weights_are_reported(folder: Path, capsys: Capture) -> None:
    assert "has neither model.safetensors" in checked(capsys, str(folder))[1]["model"]["missing_weights"]
    assert main(["check", str(folder)]) == 1
    text = capsys.readouterr().out
    assert " fits: " in text
    assert "cannot be served: " in text
    assert checked(capsys)[1]["model"]["missing_weights"] is None


def test_model_with_pickled_weights_fails_with_the_reason(folder: Path, capsys: Capture) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert main(["check", str(folder)]) == 1
    assert "pytorch_model.bin is pickled" in capsys.readouterr().out


def test_model_with_tensors_that_serve_refuses_fails(tmp_path: Path, capsys: Capture) -> None:
    saved(random_model("llama"), tmp_path)
    assert main(["check", str(tmp_path), "--device", "cpu"]) == 0
    edit_config(tmp_path, num_hidden_layers=2)
    capsys.readouterr()
    code, report = checked(capsys, str(tmp_path), "--device", "cpu")
    assert code == 1
    assert report["model"]["error"].endswith("; config.json has 2 layers, the files have 3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_a_rank_is_its_part_and_what_each_rank_has(dtype: str, capsys: Capture) -> None:
    plans = {ranks: checked(capsys, "--dtype", dtype, "--max-num-seqs", "4", "--tensor-parallel-size", str(ranks))[1]
             for ranks in (1, 2)}
    ranked = bench("engine.ranks")
    alone = plans[1]["model"]["bytes"]["weights"]
    whole = ranked.replicated_bytes(storyteller.FOLDER, plans[1])
    assert 0 < whole < alone / 20
    for ranks, plan in plans.items():
        expected = ranked.expected_bytes(alone, whole, ranks)
        assert plan["model"]["bytes"]["weights"] == pytest.approx(expected, rel=ranked.LIMIT)
        assert plan["model"]["bytes"]["kv_cache"] == pytest.approx(
            plans[1]["model"]["bytes"]["kv_cache"] / ranks, rel=ranked.LIMIT)


def test_model_that_does_not_fit_fails(folder: Path, capsys: Capture) -> None:
    code, report = checked(capsys, str(folder), "--kv-cache-memory", "900T")
    assert (code, report["model"]["fits"]) == (1, False)
    assert report["model"]["peak_bytes"] > report["model"]["available_bytes"]
    assert main(["check", str(folder), "--kv-cache-memory", "900T"]) == 1
    assert " does NOT fit: needs " in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (("--max-model-len", "257"), "max_model_len: 257 is beyond the model's context of 256 tokens"),
    (("--device", "npu"), "npu"),
])
def test_model_that_cannot_be_served_fails(
    folder: Path, capsys: Capture, arguments: tuple[str, str], message: str
) -> None:
    code, report = checked(capsys, str(folder), *arguments)
    assert code == 1
    assert message in report["model"]["error"]
    assert main(["check", str(folder), *arguments]) == 1
    assert "cannot be served: " in capsys.readouterr().out


def test_model_with_prompts_on_the_host_and_ranks_is_refused_as_by_serve(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "select_prefill", lambda name, device: CpuBackend())
    code, report = checked(capsys, str(folder), "--device", "cpu", "--tensor-parallel-size", "2")
    assert code == 1
    assert "is not possible with a tensor_parallel_size above 1" in report["model"]["error"]


def test_model_is_planned_for_the_given_decode_buckets(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = CpuBackend.__init__

    def with_padding(backend: CpuBackend, settings: DeviceSettings) -> None:
        padding = len(settings.decode_buckets)
        start(backend, settings=settings, capabilities=replace(CpuBackend.capabilities, padding_blocks=padding))

    monkeypatch.setattr(CpuBackend, "__init__", with_padding)
    (_, few), (_, more) = (checked(capsys, str(folder), *buckets) for buckets in ((), ("--decode-buckets", "1,2,4,99")))
    block = few["model"]["bytes"]["kv_cache"] // (few["model"]["kv_cache_tokens"] // 128)
    assert more["model"]["bytes"]["kv_cache"] == few["model"]["bytes"]["kv_cache"] + 3 * block


def test_model_missing_folder_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"npuserve: model: there is no folder {tmp_path}/none\n"


def test_what_drafts_is_part_of_the_plan(tmp_path: Path, capsys: Capture) -> None:
    """A head and a smaller model take memory for weights and cache; devices and models that cannot draft are named."""
    hybrid = random_hybrid(3, num_hidden_layers=2, full_attention_interval=2)
    folder = saved(hybrid, tmp_path / "hybrid")
    add_mtp(hybrid, folder)
    settings = ("--device", "cpu", "--kv-cache-memory", "16MiB")
    _, without = checked(capsys, str(folder), *settings)
    code, with_head = checked(capsys, str(folder), *settings, "--speculate", "mtp")
    assert code == 0
    assert with_head["model"]["bytes"]["weights"] > without["model"]["bytes"]["weights"]
    assert with_head["model"]["kv_cache_tokens"] < without["model"]["kv_cache_tokens"]
    model = str(saved(random_model("qwen3"), tmp_path / "model"))
    _, alone = checked(capsys, model, *settings)
    code, drafted = checked(capsys, model, *settings, "--speculate", model)
    assert code == 0
    assert drafted["model"]["bytes"]["weights"] == 2 * alone["model"]["bytes"]["weights"]
    assert abs(2 * drafted["model"]["kv_cache_tokens"] - alone["model"]["kv_cache_tokens"]) <= 256
    code, refused = checked(capsys, model, *settings, "--speculate", "mtp")
    assert code == 1
    assert "has no head for multi-token prediction" in refused["model"]["error"]
    _, refused = checked(capsys, model, *settings, "--speculate", str(folder))
    assert "cannot draft" in refused["model"]["error"] or "tokens in its vocabulary" in refused["model"]["error"]
