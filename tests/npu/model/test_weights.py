"""int8 weights: destinations of a checkpoint's tensors, weights quantized from floats, and refused checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels import quantized_weight
from npuserve.kernels.layer import LayerWeights, Linear
from npuserve.kernels.native.packed import PackedWeight, dense
from npuserve.kernels.quantized import Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.weight import FloatWeight
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.backends.weight_layout import Empty, WeightLayout
from npuserve.npu.model import loader
from npuserve.npu.model.config import HeadDtype, ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import compared_inputs, read_bytes, stored_bytes
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.w8a8 import W8A8
from tests.support.models import SIZES, edit_config, random_model, saved, saved_w8a8

SCHEMES = [
    W8A8(),
    W8A8(per_channel=False),
    W8A8(symmetric=False),
    W8A8(per_channel=False, symmetric=False),
    W8A8(symmetric_inputs=False),
    W8A8(dynamic=False),
    W8A8(dynamic=False, symmetric_inputs=False),
]
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}


QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True}


def load(folder: Path, cpu: CpuBackend | None = None, head: HeadDtype = "auto", dtype: torch.dtype = torch.float32,
         progress=lambda done, total: None) -> ModelWeights:
    return load_weights(folder, ModelConfig.from_folder(folder, head), dtype, cpu or CpuBackend(), progress)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of layer 1; "__" in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = f"model.layers.1.{name.replace('__', '.')}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def int8_of(linear: Linear) -> QuantizedWeight:
    assert isinstance(linear.weight, QuantizedWeight)
    assert linear.inputs is linear.weight.inputs
    return linear.weight


def storage(weights: ModelWeights) -> list[torch.Tensor]:
    """Return all stored tensors once."""
    linears = [linear for x in weights.attention_layers() for linear in x.linears]
    found = [weights.embedding, weights.norm, *(() if weights.lm_head.weight is weights.embedding
                                                else (weights.lm_head.weight,))]
    for x in weights.attention_layers():
        found += [t for t in (x.input_norm, x.q_norm, x.k_norm, x.post_norm) if t is not None]
    for linear in linears:
        found += [linear.weight, *(() if linear.bias is None else (linear.bias,))]
    flat: list[torch.Tensor] = []
    for weight in found:
        parts = [weight.values] if isinstance(weight, FloatWeight) else [weight]
        if isinstance(weight, QuantizedWeight):
            parts = [weight.values, weight.scale, weight.zero, weight.sums, weight.inputs.scale, weight.inputs.zero]
        flat += [part.words if isinstance(part, PackedWeight) else part for part in parts if part is not None]
    return flat


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("kind", "shards"), [("qwen2", False), ("qwen3-untied", True), ("llama-bias", False)])
def test_int8_weights_every_number_is_written(tmp_path, monkeypatch, kind, shards, scheme, cpu):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 200)  # a few rows
    saved_w8a8(random_model(kind), tmp_path, scheme, **({"max_shard_size": "10KB"} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
    seen: list[tuple[int, int]] = []
    weights = load(tmp_path, cpu, progress=lambda done, total: seen.append((done, total)))
    there = tensors_of(tmp_path)
    for index, layer in enumerate(weights.attention_layers()):
        for field, names in PARTS.items():
            linear: Linear = getattr(layer, field)
            weight, names = int8_of(linear), tuple(f"model.layers.{index}.{name}" for name in names)
            values = torch.cat([there[f"{name}.weight"] for name in names])
            assert weight.shape == tuple(values.shape)
            assert torch.equal(dense(weight.values), values)
            assert torch.equal(weight.sums[: len(values)], values.sum(dim=1, dtype=torch.int32))
            assert torch.equal(weight.scale, each_row(there, names, "weight_scale"))
            if scheme.symmetric:
                assert weight.zero is None
            else:
                assert weight.zero is not None
                assert weight.zero.dtype == torch.int32
                assert torch.equal(weight.zero, each_row(there, names, "weight_zero_point").int())
                assert weight.zero.any()
            assert weight.dtype == torch.float32
            inputs = weight.inputs
            assert (inputs.scale is None, inputs.symmetric) == (scheme.dynamic, scheme.symmetric_inputs)
            if inputs.scale is not None:
                assert torch.equal(inputs.scale, torch.tensor([0.1]))
                assert (inputs.zero is None) == scheme.symmetric_inputs
                assert inputs.zero is None or torch.equal(inputs.zero, torch.tensor([11], dtype=torch.int32))
            biases = [there[f"{name}.bias"] for name in names if f"{name}.bias" in there]
            assert linear.bias is None if not biases else torch.equal(linear.bias, torch.cat(biases))
    assert not isinstance(weights.lm_head.weight, QuantizedWeight)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def each_row(there: dict[str, torch.Tensor], names: tuple[str, ...], part: str) -> torch.Tensor:
    """Return a scale or zero point per row of the concatenated parts."""
    return torch.cat([
        there[f"{name}.{part}"].reshape(-1).expand(len(there[f"{name}.weight"])) for name in names])


def test_int8_scales_accept_vectors_and_scalars(tmp_path):
    saved_w8a8(random_model("llama"), tmp_path, W8A8(dynamic=False))
    before = load(tmp_path).attention_layers()[1]
    there = tensors_of(tmp_path)
    name = "mlp.down_proj."
    rewrite(tmp_path, mlp__down_proj__weight_scale=there[f"model.layers.1.{name}weight_scale"].reshape(-1),
            mlp__down_proj__input_scale=there[f"model.layers.1.{name}input_scale"].reshape(()))
    after = load(tmp_path).attention_layers()[1]
    assert torch.equal(int8_of(before.down).scale, int8_of(after.down).scale)
    assert int8_of(after.down).inputs.scale == 0.1


def test_int8_zero_points_of_0_are_ignored_if_symmetric(tmp_path):
    saved_w8a8(random_model("llama"), tmp_path, W8A8(dynamic=False))
    rewrite(tmp_path, mlp__down_proj__weight_zero_point=torch.zeros(32, 1, dtype=torch.int8),
            mlp__down_proj__input_zero_point=torch.zeros(1, dtype=torch.int8))
    assert int8_of(load(tmp_path).attention_layers()[1].down).zero is None
    rewrite(tmp_path, mlp__down_proj__input_zero_point=torch.ones(1, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.input_zero_point: is not 0, though .* symmetric"):
        load(tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_static_inputs_take_range_of_fused_parts(tmp_path, caplog, symmetric):
    saved_w8a8(random_model("llama"), tmp_path, W8A8(dynamic=False, symmetric_inputs=symmetric))
    scales, zeros = {"q": 0.02, "k": 0.05, "v": 0.03}, {"q": 100, "k": -90, "v": 5}
    changes = {f"self_attn__{part}_proj__input_scale": torch.tensor([scale]) for part, scale in scales.items()}
    if not symmetric:
        changes |= {f"self_attn__{part}_proj__input_zero_point": torch.tensor([zero], dtype=torch.int8)
                    for part, zero in zeros.items()}
    rewrite(tmp_path, **changes)
    with caplog.at_level("INFO"):
        inputs = int8_of(load(tmp_path).attention_layers()[1].qkv).inputs
    assert "differ between the parts of 1 fused layers" in caplog.text
    assert inputs.scale is not None
    if symmetric:
        assert torch.equal(inputs.scale, torch.tensor([0.05]))
        return
    assert inputs.zero is not None
    least = min((-128 - zeros[part]) * scales[part] for part in "qkv")
    most = max((127 - zeros[part]) * scales[part] for part in "qkv")
    within = [(edge - inputs.zero.item()) * inputs.scale.item() for edge in (-128, 127)]
    assert within == pytest.approx([least, most], abs=inputs.scale.item() / 2)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_head_is_quantized_by_row(tmp_path, monkeypatch, kind, quantized, dtype, cpu):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 500)
    monkeypatch.setattr(quantized_weight, "ROUNDED_AT_ONCE", 100)  # three rows
    model = random_model(kind)
    made = saved_w8a8(model, tmp_path) if quantized else saved(model, tmp_path)
    weights = load(made, cpu, "int8", dtype)
    rows = model.get_output_embeddings().weight.detach()
    scale = rows.abs().amax(dim=1) / 127
    head = int8_of(weights.lm_head)
    assert head.inputs == Scheme()
    assert head.dtype == dtype
    assert weights.padded_vocabulary == 128
    assert torch.equal(head.scale[:100], scale)
    assert torch.equal(dense(head.values)[:100], (rows / scale.unsqueeze(1)).round().to(torch.int8))
    for numbers in (dense(head.values), head.scale, head.sums):  # padding rows equal row 0
        assert torch.equal(numbers[100:128], numbers[:1].expand(28, *numbers.shape[1:]))
    assert (weights.embedding is head) == (kind == "qwen3")
    assert isinstance(weights.attention_layers()[0].o.weight, QuantizedWeight) == quantized


def test_int8_head_of_checkpoint_is_kept(tmp_path, cpu):
    saved_w8a8(random_model("qwen3-untied"), tmp_path, W8A8(symmetric=False), ignore=())
    there = tensors_of(tmp_path)
    for head in ("auto", "int8"):
        weight = int8_of(load(tmp_path, cpu, head).lm_head)
        assert torch.equal(dense(weight.values)[:100], there["lm_head.weight"])
        assert torch.equal(weight.scale[:100], there["lm_head.weight_scale"].reshape(-1))
        assert weight.zero is not None
        assert torch.equal(weight.zero[100:], weight.zero[:1].expand(28))


def test_int8_ignored_layers_stay_floats(tmp_path):
    model = random_model("llama")
    saved_w8a8(model, tmp_path, ignore=("lm_head", "re:.*layers.1.mlp", "model.layers.2.self_attn.o_proj"))
    layers = load(tmp_path).attention_layers()
    assert isinstance(layers[1].gate_up.weight, FloatWeight)
    assert layers[1].gate_up.inputs is None
    state = model.state_dict()
    assert torch.equal(dense(layers[1].down.weight.values), state["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(dense(layers[2].o.weight.values), state["model.layers.2.self_attn.o_proj.weight"])
    assert isinstance(layers[1].o.weight, QuantizedWeight)


def test_int8_cache_scales_are_ignored_with_warning(tmp_path, caplog):
    saved_w8a8(random_model("llama"), tmp_path)
    rewrite(tmp_path, self_attn__k_scale=torch.ones(1), self_attn__v_scale=torch.ones(1),
            self_attn__k_proj__output_scale=torch.ones(1))
    load(tmp_path)
    assert "3 scales of a quantized KV cache" in caplog.text


@pytest.mark.parametrize(("changes", "message"), [
    ({"mlp__down_proj__weight_scale": None}, r"1 missing: model.layers.1.mlp.down_proj.weight_scale$"),
    ({"mlp__down_proj__weight_scale": torch.ones(48, 1)},  # per input instead of per output
     r"1 of the wrong shape: \S+down_proj.weight_scale \[48, 1\] instead of \[32\] or \[32, 1\]"),
    ({"mlp__down_proj__weight_scale": torch.ones(1)}, r"weight_scale \[1\] instead of \[32\] or \[32, 1\]"),
    ({"self_attn__q_proj__weight_scale": torch.ones(1, 32)}, r"weight_scale \[1, 32\] instead of \[32\]"),
    ({"mlp__up_proj__weight_scale": torch.ones(48, 4)}, r"weight_scale \[48, 4\] instead of \[48\] or \[48, 1\]"),
    ({"mlp__down_proj__weight": torch.zeros(48, 32, dtype=torch.int8)}, r"down_proj.weight \[48, 32\] instead of"),
    ({"mlp__down_proj__weight": torch.ones(32, 48)}, r"1 not int8: model.layers.1.mlp.down_proj.weight F32"),
    ({"mlp__down_proj__weight": torch.ones(32, 48).to(torch.float8_e4m3fn)}, r"not int8: \S+weight F8_E4M3"),
    ({"mlp__down_proj__weight_scale": torch.ones(32, 1, dtype=torch.int32)}, r"not of a float type: \S+_scale I32"),
    ({"mlp__down_proj__input_scale": torch.ones(1)}, r"1 unknown: model.layers.1.mlp.down_proj.input_scale"),
    ({"mlp__down_proj__weight_g_idx": torch.ones(48)}, r"1 unknown: model.layers.1.mlp.down_proj.weight_g_idx"),
    ({"mlp__down_proj__weight": None, "mlp__down_proj__weight_packed": torch.zeros(32, 6, dtype=torch.int32)},
     r"1 missing: \S+down_proj.weight; 1 unknown: \S+weight_packed"),
    ({"mlp__down_proj__weight_scale": torch.full((32, 1), torch.nan)}, r"_scale: has numbers that are not finite"),
    ({"mlp__down_proj__weight_scale": torch.zeros(32, 1)}, r"down_proj.weight_scale: scales must be numbers above 0"),
    ({"mlp__down_proj__weight_zero_point": torch.ones(32, 1, dtype=torch.int8)}, r"weight_zero_point: is not 0"),
])
def test_int8_wrong_tensors_are_refused_by_name(tmp_path, changes, message):
    saved_w8a8(random_model("llama"), tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_int8_zero_points_out_of_range_are_refused(tmp_path):
    saved_w8a8(random_model("llama"), tmp_path, W8A8(symmetric=False))
    rewrite(tmp_path, mlp__down_proj__weight_zero_point=torch.full((32, 1), 128, dtype=torch.int32))
    with pytest.raises(ModelError, match=r"down_proj.weight_zero_point: zero points must be in \[-128, 127\]"):
        load(tmp_path)


@pytest.mark.parametrize(("ignore", "message"), [
    (("lm_head", "re:.*k_proj"), r"layers.0.self_attn.q_proj and \S+k_proj are quantized in different ways"),
    (("lm_head", "model.layers.2.mlp.up_proj"), r"layers.2.mlp.gate_proj and .*; supported: .* gate_proj, up_proj"),
])
def test_int8_fused_parts_with_different_schemes_are_refused(tmp_path, ignore, message):
    saved_w8a8(random_model("llama"), tmp_path, ignore=ignore)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_int8_tied_quantized_head_is_refused(tmp_path):
    saved_w8a8(random_model("qwen3"), tmp_path, ignore=())
    with pytest.raises(ModelError, match="tie_word_embeddings: the LM head is quantized, and the embedding"):
        ModelConfig.from_folder(tmp_path)
    saved_w8a8(random_model("qwen3-untied"), tmp_path / "untied", ignore=())
    edit_config(tmp_path / "untied", tie_word_embeddings=False)
    headless = ModelConfig.from_folder(tmp_path / "untied", "int8").headless
    assert headless.quantization is not None
    assert headless.quantization.of("lm_head") is None
    weights = load_weights(tmp_path / "untied", headless, torch.float32, CpuBackend(), lambda *_: None)
    assert weights.lm_head.weight is weights.embedding
    assert not isinstance(weights.embedding, QuantizedWeight)


class Transposed(WeightLayout):
    """Layout of int8 weights, transposed."""

    def __init__(self, empty: Empty) -> None:
        super().__init__(empty)
        self.arranged: list[tuple[QuantizedWeight, bool]] = []

    def prepare(self, weight: QuantizedWeight, *, table: bool, experts: int = 0) -> None:
        assert isinstance(weight.values, torch.Tensor)
        assert torch.equal(weight.values.sum(dim=1, dtype=torch.int32), weight.sums)  # completely written
        self.arranged.append((weight, table))
        weight.values.data = weight.values.t().contiguous()


def test_int8_weights_are_arranged_once_complete(tmp_path):
    backend = CpuBackend(native=False)
    backend.weights = layout = Transposed(backend.memory.empty)
    weights = load(saved_w8a8(random_model("qwen3"), tmp_path), backend, "int8")
    made = [linear.weight for x in weights.attention_layers() for linear in x.linears]
    arranged = [weight for weight, _ in layout.arranged]
    assert all(one is other for one, other in zip(arranged, [*made, weights.lm_head.weight], strict=True))
    assert [table for _, table in layout.arranged] == [False] * len(made) + [True]
    assert [weight.values.shape for weight in made if isinstance(weight, QuantizedWeight)][:2] == [(32, 128), (64, 32)]
    assert weights.padded_vocabulary == 128
    layout.arranged.clear()
    untied = load(saved_w8a8(random_model("qwen3-untied"), tmp_path / "untied"), backend, "int8")
    assert not any(table for _, table in layout.arranged)
    assert layout.arranged[-1][0] is untied.lm_head.weight


def test_int8_too_many_inputs_are_refused(tmp_path):
    folder = saved_w8a8(random_model("llama"), tmp_path)
    edit_config(folder, intermediate_size=40000)
    wide = ModelConfig.from_folder(folder)
    with pytest.raises(ModelError, match=r"mlp.down_proj has 40000 inputs; supported: up to 32768 in int8"):
        stored_bytes(wide, torch.float32, CpuBackend())


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-bias", "llama"])
@pytest.mark.parametrize("head", ["auto", "int8"])
def test_stored_bytes_equal_allocated(tmp_path, kind, scheme, head, cpu):
    model = random_model(kind).to(torch.bfloat16)
    folder = saved_w8a8(model, tmp_path, scheme) if scheme else saved(model, tmp_path)
    config = ModelConfig.from_folder(folder, head)
    weights = load(folder, cpu, head, torch.bfloat16)
    assert stored_bytes(config, torch.bfloat16, cpu) == sum(tensor.nbytes for tensor in storage(weights))
    apart = weights.embedding is not weights.lm_head.weight
    embedding = weights.embedding
    unread = 0
    if apart:
        assert isinstance(embedding, FloatWeight)
        values = embedding.values
        unread = (values.words if isinstance(values, PackedWeight) else values).nbytes
    assert read_bytes(config, torch.bfloat16, cpu) == stored_bytes(config, torch.bfloat16, cpu) - unread


def test_stored_bytes_int8_are_half_of_bfloat16():
    sizes = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 4,
             "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = ModelConfig.from_dict(sizes)
    quantized = dataclasses.replace(
        config, quantization=Quantization(((("Linear",), W8A8()),)), lm_head_dtype="int8")
    cpu = CpuBackend(native=False)  # stores floats unchanged
    whole, half = (stored_bytes(c, torch.bfloat16, cpu) for c in (config, quantized))
    assert half == pytest.approx(whole / 2 + 1024**2, rel=0.01)  # the embedding stays in bfloat16


def test_int8_every_linear_layer_has_an_input_scheme(tmp_path):
    layer: LayerWeights = load(saved(random_model("llama"), tmp_path)).attention_layers()[0]
    assert [linear.inputs for linear in layer.linears] == [None] * 4


@pytest.mark.parametrize(("changes", "dtype", "expected"), [
    ({}, torch.bfloat16, 1024),  # gate and up, the largest of the first layer
    ({"intermediate_size": 1024, "head_dim": 512}, torch.bfloat16, 1024),  # queries, keys and values
    ({}, torch.float32, 0),
    ({"num_hidden_layers": 1, "vocab_size": 1000}, torch.bfloat16, 0),  # fits into the cache
    ({"hidden_size": 1020}, torch.bfloat16, 0),  # only `down` can be compact, less than 128 MiB of it
])
def test_compared_inputs_are_of_largest_weight_in_first_layer(changes, dtype, expected):
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 50000}
    config = ModelConfig.from_dict({**QWEN3, **sizes, **changes})
    assert compared_inputs(config, dtype) == expected


def test_compared_inputs_of_int8_layers_are_of_head():
    config = dataclasses.replace(
        ModelConfig.from_dict(QWEN3), hidden_size=1024, vocab_size=150000,
        quantization=Quantization(((("Linear",), W8A8()),), ("lm_head",)))
    assert compared_inputs(config, torch.bfloat16) == 1024
    assert compared_inputs(dataclasses.replace(config, lm_head_dtype="int8"), torch.bfloat16) == 0
