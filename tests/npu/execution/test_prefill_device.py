"""Settings and memory plan of prompts computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from npuserve.cli import check
from npuserve.npu.backends import BackendError, select_prefill
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import load
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.service.config import ServerConfig
from tests.npu.backends import small
from tests.npu.execution.test_host_prefill import Device
from tests.support.models import random_model, saved_w8a8


def test_host_prefill_on_same_device_is_refused():
    with pytest.raises(BackendError, match="prefill_device: the whole model runs on cpu; leave prefill_device at same"):
        select_prefill("cpu", CpuBackend())
    assert select_prefill("same", CpuBackend()) is None


def test_host_prefill_unsupported_dtype_or_block_size_is_refused(tmp_path, monkeypatch):
    config = ModelConfig.from_folder(small.saved(tmp_path, head_dim=16))
    device, host = Device(), CpuBackend()
    device.capabilities = replace(device.capabilities, dtypes=("float16",))
    with pytest.raises(BackendError, match=r"prefill_device: cpu does not compute in float16; .* float32, bfloat16"):
        predict(config, device, dtype="float16", prefill=host)
    if host.capabilities.block_multiple > 1:
        with pytest.raises(ModelError, match="block_size: 8 is not possible here; possible are powers of two from 16"):
            predict(config, Device(), block_size=8, prefill=host)


def test_host_prefill_unsupported_quantization_is_refused(tmp_path):
    """The device has float8, the host's kernels do not."""
    config = ModelConfig.from_folder(saved_w8a8(random_model("qwen3"), tmp_path, W8A8(float8=True)))
    device = Device()
    device.capabilities = replace(device.capabilities, float8=True)
    assert predict(config, device).fits
    with pytest.raises(BackendError, match=(
            r"^prefill_device: cpu .* \(quantization_config: float8 .* not possible on cpu; .*\); possible is "
            r"prefill_device: same$")):
        predict(config, device, prefill=CpuBackend())


def test_host_prefill_beside_kv_offload_memory_is_refused(tmp_path):
    config = ModelConfig.from_folder(small.saved(tmp_path, head_dim=16))
    with pytest.raises(BackendError, match="kv_offload_memory: is not possible where prompts are computed on another"):
        predict(config, Device(), prefill=CpuBackend(), kv_offload_memory=1 << 30)


def test_host_prefill_memory_is_planned(tmp_path, monkeypatch):
    config = ModelConfig.from_folder(small.saved(tmp_path, head_dim=16))
    device, host = Device(), CpuBackend()
    monkeypatch.setattr(device.memory, "available", lambda: 1 << 30)
    monkeypatch.setattr(host.memory, "available", lambda: 1 << 30)
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    whole, plan = predict(config, device, **settings), predict(config, device, prefill=host, **settings)
    assert whole.host is None
    assert plan.fits
    assert plan.activations < whole.activations  # of the decode rows only
    block = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, slots, numbers, bytes
    assert plan.host.kv_cache == plan.num_blocks * block == plan.kv_cache - block  # no padding block
    assert plan.host.staging == 2 * 64 * (2 * 2 * 2 * 16 + 64) * 4
    assert plan.host.needed == (
        plan.host.weights + plan.host.kv_cache + plan.host.activations + plan.host.staging) <= 1 << 30
    # The mirror is part of the host's share, which limits the number of blocks on the device.
    free = plan.host.needed - plan.host.kv_cache + 8 * block
    monkeypatch.setattr(host.memory, "available", lambda: free + 4 * 5 * block - 8 * block)
    assert predict(config, device, prefill=host, **settings).num_blocks == 5
    monkeypatch.setattr(host.memory, "available", lambda: 1 << 10)
    short = predict(config, device, prefill=host, **settings)
    assert not short.fits
    with pytest.raises(ModelError, match=r"computing prompts on cpu needs .* \(weights .* staging .*\), and 0.0 MiB"):
        short.require_fit()


def test_host_prefill_check_prints_both_plans(tmp_path, monkeypatch):
    def select(name: str, emulate: Sequence[str] | None, settings: DeviceSettings) -> CpuBackend:
        return CpuBackend() if name == "cpu" else Device()

    monkeypatch.setattr(load, "select", select)
    folder = small.saved(tmp_path, head_dim=16)
    config = ServerConfig(model=str(folder), device="npu", prefill_device="cpu", dtype="float32")
    found = check.model(config)
    host = found["host"]
    assert found["fits"]
    assert host["fits"]
    assert host["needed"] == sum(host[part] for part in ("weights", "kv_cache", "activations", "staging")) > 0
    native = check.native(found["cpu_kernels"])
    report = {"machine": check.machine(), "native": native, "backends": {}, "optional": {}, "emulated": False}
    said = check.text(report | {"model": found})
    assert "prompts are computed on cpu, whose memory holds" in said
    assert said.count(" fits: needs ") == 2
    assert check.model(msgspec.structs.replace(config, prefill_device="same"))["host"] is None
    refused = check.model(msgspec.structs.replace(config, device="cpu"))
    assert refused["error"].startswith("prefill_device: the whole model runs on cpu")
