from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels import native
from npuserve.kernels.native.packed import dense
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import check_weights, load_weights, refused_bytes, report_ignored_head
from tests.support.models import FAMILIES, edit_config, random_model, saved


def load(folder: Path, cpu: CpuBackend | None = None, dtype: torch.dtype = torch.float32,
         progress=lambda done, total: None):
    return load_weights(folder, ModelConfig.from_folder(folder), dtype, cpu or CpuBackend(), progress)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of model.safetensors; "__" in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("shards", [False, True])
def test_loader_writes_every_number(tmp_path, monkeypatch, kind, shards, cpu):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 1 << 10)  # a few rows
    model = random_model(kind)
    saved(model, tmp_path, **({"max_shard_size": "20KB"} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
    seen: list[tuple[int, int]] = []
    weights = load(tmp_path, cpu, progress=lambda done, total: seen.append((done, total)))

    state = model.state_dict()
    vocabulary = model.config.vocab_size
    assert torch.equal(dense(weights.embedding.values)[:vocabulary], state["model.embed_tokens.weight"])
    assert torch.equal(dense(weights.lm_head.weight.values)[:vocabulary], state["lm_head.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    for index, layer in enumerate(weights.attention_layers()):
        prefix = f"model.layers.{index}"
        for fused, names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.o, ("self_attn.o_proj",)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.down, ("mlp.down_proj",)),
        ):
            expected = torch.cat([state[f"{prefix}.{name}.weight"] for name in names])
            assert torch.equal(dense(fused.weight.values), expected)
            assert (fused.bias is None) == (f"{prefix}.{names[0]}.bias" not in state)
            if fused.bias is not None:
                assert torch.equal(fused.bias, torch.cat([state[f"{prefix}.{name}.bias"] for name in names]))
        assert torch.equal(layer.input_norm, state[f"{prefix}.input_layernorm.weight"])
        assert torch.equal(layer.post_norm, state[f"{prefix}.post_attention_layernorm.weight"])
        if layer.q_norm is not None and layer.k_norm is not None:
            assert torch.equal(layer.q_norm, state[f"{prefix}.self_attn.q_norm.weight"])
            assert torch.equal(layer.k_norm, state[f"{prefix}.self_attn.k_norm.weight"])
        else:
            assert f"{prefix}.self_attn.q_norm.weight" not in state
    assert seen[-1] == (4 * model.num_parameters(),) * 2
    assert seen == sorted(seen)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3-untied", False)])
def test_loader_pads_vocabulary_to_tile(tmp_path, kind, tied, cpu):
    weights = load(saved(random_model(kind), tmp_path), cpu)
    assert cpu.capabilities.vocabulary_tile == 64
    embedding, head = dense(weights.embedding.values), dense(weights.lm_head.weight.values)
    assert weights.padded_vocabulary == len(embedding) == 128
    assert torch.equal(head[100:], head[:1].expand(28, -1))
    assert (weights.embedding is weights.lm_head.weight) == tied
    if not tied:
        assert not embedding[100:].any()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_loader_converts_dtypes_as_torch(tmp_path, stored, loaded, cpu):
    model = random_model("qwen3-bias").to(stored)
    weights = load(saved(model, tmp_path), cpu, loaded)
    state = model.state_dict()
    qkv, down = weights.attention_layers()[1].qkv.weight, weights.attention_layers()[1].down.weight
    assert qkv.dtype == down.dtype == weights.norm.dtype == loaded
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(dense(qkv.values), torch.cat([state[name] for name in names]).to(loaded))
    assert torch.equal(dense(down.values), state["model.layers.1.mlp.down_proj.weight"].to(loaded))


def test_loader_ignores_harmless_tensors(tmp_path):
    saved(random_model("qwen3"), tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.ones(100, 32))  # the model is tied: the embedding is used
    rewrite(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    weights = load(tmp_path)
    assert not (dense(weights.lm_head.weight.values) == 1).all()


@pytest.mark.parametrize(("change", "warnings"), [(None, 0), (0, 0), (1e-3, 1)])
def test_loader_of_a_tied_model_reports_another_lm_head(tmp_path, caplog, monkeypatch, change, warnings):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 1 << 10)  # a few rows
    table = random_model("qwen3").state_dict()["model.embed_tokens.weight"].clone()
    saved(random_model("qwen3"), tmp_path)
    if change is not None:
        table[-1, -1] += change
        rewrite(tmp_path, lm_head__weight=table)
    report_ignored_head(tmp_path, ModelConfig.from_folder(tmp_path))
    assert caplog.text.count("lm_head.weight is ignored, and differs from model.embed_tokens.weight") == warnings


def test_loader_reports_another_lm_head_on_one_rank(tmp_path, caplog):
    saved(random_model("qwen3"), tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.ones_like(random_model("qwen3").state_dict()["model.embed_tokens.weight"]))
    for rank in range(2):
        report_ignored_head(tmp_path, ModelConfig.from_folder(tmp_path).sharded(Shard(rank, 2)))
    assert caplog.text.count("lm_head.weight is ignored") == 1


def test_loader_reports_all_problems_at_once(tmp_path):
    saved(random_model("llama"), tmp_path)
    rewrite(
        tmp_path,
        model__norm__weight=None,
        model__layers__2__mlp__up_proj__weight=None,
        model__layers__3__mlp__up_proj__weight=torch.ones(48, 32),
        model__layers__0__self_attn__q_proj__weight=torch.ones(31, 32),
        model__layers__1__self_attn__q_proj__weight=torch.ones(32, 32, dtype=torch.int8),
    )
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    for part in (
        "2 missing: ", "model.norm.weight", "model.layers.2.mlp.up_proj.weight",
        "1 unknown: model.layers.3.mlp.up_proj.weight",
        "1 of the wrong shape: model.layers.0.self_attn.q_proj.weight [31, 32] instead of [32, 32]",
        "1 not of a float type: model.layers.1.self_attn.q_proj.weight I8",
    ):
        assert part in message
    with pytest.raises(ModelError) as caught:
        check_weights(tmp_path, ModelConfig.from_folder(tmp_path))
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", FAMILIES)
def test_check_weights_returns_the_tensors_that_are_loaded(tmp_path, kind):
    model = random_model(kind)
    saved(model, tmp_path)
    rewrite(tmp_path, model__layers__9__self_attn__rotary_emb__inv_freq=torch.ones(8))
    config = ModelConfig.from_folder(tmp_path)
    for shard in (Shard(0, 1), Shard(1, 2)):
        names = check_weights(tmp_path, config.sharded(shard))
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        assert set(names) == model.state_dict().keys() - tied


def test_loader_with_many_missing_tensors_names_a_few(tmp_path):
    saved(random_model("qwen3"), tmp_path)
    layers = ModelConfig.from_folder(tmp_path).num_layers
    edit_config(tmp_path, num_hidden_layers=layers + 45, layer_types=["full_attention"] * (layers + 45))
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert f"; 495 missing: model.layers.{layers}.input_layernorm.weight, " in message
    assert message.endswith(f" and 492 more; config.json has {layers + 45} layers, the files have {layers}")
    assert len(message) < 600


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_loader_not_finite_number_names_tensor(tmp_path, name, number, cpu):
    saved(random_model("qwen3"), tmp_path)
    name = f"model.{name}"
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor.view(-1)[-1] = number
    rewrite(tmp_path, **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError) as caught:
        load(tmp_path, cpu)
    assert str(caught.value) == f"{tmp_path}: {name}: has numbers that are not finite (NaN or infinity)"


def test_loader_number_beyond_dtype_is_refused():
    numbers = torch.tensor([65504.0, -1e5])
    loader._check_finite(numbers, torch.bfloat16)
    loader._check_finite(numbers[:1], torch.float16)
    loader._check_finite(numbers[:0], torch.float16)
    with pytest.raises(ValueError, match=r"^has numbers that are too large for float16 \(1e\+05\); take another dtype"):
        loader._check_finite(numbers, torch.float16)


@pytest.mark.parametrize("shards", [False, True])
def test_loader_with_weights_linked_from_outside_names_the_file(tmp_path, shards):
    folder, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    saved(random_model("qwen3"), folder, **({"max_shard_size": "20KB"} if shards else {}))
    config, weights = ModelConfig.from_folder(folder), max(folder.glob("*.safetensors"))
    weights.rename(outside)
    weights.symlink_to(outside)
    with pytest.raises(ModelError, match=f"{weights.name}: is a symbolic link to {outside}; a model"):
        load_weights(folder, config, torch.float32, CpuBackend())


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "b.safetensors", "config.json"])
def test_loader_with_a_git_lfs_pointer_names_the_file(tmp_path, file):
    saved(random_model("qwen3"), tmp_path)
    if file != "model.safetensors":
        (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
        (tmp_path / "b.safetensors").touch()
        index = {"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f\nsize 12\n"
    (tmp_path / file).write_text(pointer)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert str(caught.value) == (f"{tmp_path / file}: is a Git LFS pointer, not the file itself; "
                                 f"download it with: git -C {tmp_path} lfs pull")


def test_loader_unexpected_bias_is_refused(tmp_path):
    saved(random_model("llama-bias"), tmp_path)
    edit_config(tmp_path, mlp_bias=False)
    with pytest.raises(ModelError, match=r"9 unknown: .*mlp.down_proj.bias"):
        load(tmp_path)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _absent(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def _noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")


def _index(folder: Path, value: object) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_pickled, "pytorch_model.bin is pickled, which can run code.*convert it to safetensors"),
        (_absent, "has neither model.safetensors nor model.safetensors.index.json$"),
        (_truncated, "is not a complete safetensors file"),
        (_noise, "is not a complete safetensors file"),
        (lambda folder: _index(folder, {}), "must be a JSON object whose weight_map"),
        (lambda folder: _index(folder, []), "must be a JSON object whose weight_map"),
        (lambda folder: _index(folder, {"weight_map": {"x": "b.safetensors"}}), "not in the folder: b.safetensors"),
        (lambda folder: _index(folder, {"weight_map": {"x": "../a.safetensors"}}), "not in the folder: ../a"),
        (lambda folder: _index(folder, {"weight_map": {"x": 1}}), "not in the folder: 1"),
    ],
)
def test_loader_invalid_files_are_refused(tmp_path, spoil, message):
    saved(random_model("llama"), tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "a.safetensors"])
def test_loader_file_that_cannot_be_opened_is_named(tmp_path, name, monkeypatch):
    saved(random_model("llama"), tmp_path)
    if name != "model.safetensors":
        _index(tmp_path, {"weight_map": {"x": "a.safetensors"}})
    opened = Path.open

    def open_others(self, *args, **options):
        if self.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_others)
    with pytest.raises(ModelError, match=f"{tmp_path}/{name}: cannot be read: Permission denied$"):
        load(tmp_path)


def test_loader_tensor_in_two_shards_is_refused(tmp_path):
    saved(random_model("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    weight_map = {"model.norm.weight": "b.safetensors", "lm_head.weight": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"b.safetensors: tensor model.norm.weight is in another file too"):
        load(tmp_path)


def test_loader_releases_mapped_pages(tmp_path, monkeypatch, cpu):
    def mapped_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile:"))

    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 1 << 20)
    folder = saved(random_model("llama", vocab_size=40000, hidden_size=128, tie_word_embeddings=False), tmp_path)
    size = (folder / "model.safetensors").stat().st_size >> 10
    assert size > 40000
    before, resident = mapped_kib(), []
    load(folder, cpu, progress=lambda done, total: resident.append(mapped_kib()))
    assert len(resident) > 40
    assert max(resident) - before < size / 3


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_refused_bytes_equal_those_of_the_loaded_weights(tmp_path, monkeypatch):
    """The compact form refuses weights whose exponents differ too much. Both ranks have such weights."""
    monkeypatch.setattr(native.library(), "compact", True)
    saved(random_model("qwen3"), tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert refused_bytes(tmp_path, config, torch.bfloat16, CpuBackend()) == 0
    generator = torch.Generator().manual_seed(0)
    wide = {f"model__layers__{layer}__{name}__weight": torch.exp2(torch.rand(shape, generator=generator) * 200 - 100)
            for layer, name, shape in ((0, "mlp__down_proj", (32, 48)), (2, "self_attn__k_proj", (32, 32)))}
    rewrite(tmp_path, **wide)
    for rank in (Shard(), Shard(0, 2), Shard(1, 2)):
        of_rank = config.sharded(rank)
        loaded = load_weights(tmp_path, of_rank, torch.bfloat16, CpuBackend(), lambda done, total: None)
        assert refused_bytes(tmp_path, of_rank, torch.bfloat16, CpuBackend()) == loaded.unplanned_bytes > 0
    assert refused_bytes(tmp_path, config, torch.float32, CpuBackend()) == 0


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_refused_bytes_leave_out_int8_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(native.library(), "compact", True)
    saved(random_model("qwen3-untied"), tmp_path)
    rows = torch.exp2(torch.rand(100, 32, generator=torch.Generator().manual_seed(0)) * 200 - 100)
    rewrite(tmp_path, lm_head__weight=rows)
    for head, refused in (("auto", True), ("int8", False)):
        config = ModelConfig.from_folder(tmp_path, head)
        assert (refused_bytes(tmp_path, config, torch.bfloat16, CpuBackend()) > 0) == refused
