"""The kernel for Ascend compiled for CUDA by the published Triton, down to machine code, without a device."""

from __future__ import annotations

from types import ModuleType

from tests.kernels.triton.hopper import Launch, compiled

HEADS = {"qkv": "*bf16", "q_gamma": "*bf16", "k_gamma": "*bf16", "cos_sin": "*fp32", "positions": "*i64",
         "slot_mapping": "*i64", "k_cache": "*bf16", "v_cache": "*bf16", "q_out": "*bf16", "tokens": "i32",
         "eps": "fp32", "qkv_stride": "i64", "q_stride": "i64"}


def test_compiles_for_hopper(interpreted: ModuleType) -> None:
    name = "qk_norm_rope_kv_write"
    whole = {"Q_HEADS": 40, "KV_HEADS": 8, "HALF": 64, "HALF_BLOCK": 64, "REST": 0, "REST_BLOCK": 1, "HEADS": 32}
    part = {"Q_HEADS": 24, "KV_HEADS": 4, "HALF": 32, "HALF_BLOCK": 32, "REST": 192, "REST_BLOCK": 256, "HEADS": 8}
    for made in compiled([Launch(name, f"{name}_kernel", HEADS, constants, {}) for constants in (whole, part)]):
        assert f".entry {name}_kernel(" in made.ptx
