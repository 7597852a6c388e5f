"""EAGLE-3 heads with random weights, in modules of transformers' Llama: the reference of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class MidLayer(nn.Module):
    """Layer of a head: attention over the normed embedding and feature, one after the other."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, eps) for _ in range(3))
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, rows, bias=config.attention_bias))
        self.mlp = LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, features: Tensor, norms_residual: bool) -> Tensor:
        normed = self.hidden_norm(features)
        residual = normed if norms_residual else features
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        count = both.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        cos_sin = self.rotary(both, torch.arange(count)[None])
        residual = residual + self.self_attn(both, position_embeddings=cos_sin, attention_mask=mask)[0]
        return residual + self.mlp(self.post_attention_layernorm(residual))


class EagleHead(nn.Module):
    """Head for a model. inputs: layers whose inputs it reads."""

    def __init__(self, model: PreTrainedModel, inputs: list[int], ids: Tensor | None, *, owns_embedding: bool = False,
                 norms_residual: bool = False, **settings: Any):
        """ids: of the model, for those of the head; None for all."""
        super().__init__()
        served = model.config
        settings = {"hidden_size": served.hidden_size, "intermediate_size": 40, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
                    "vocab_size": served.vocab_size, "max_position_embeddings": 64} | settings
        self.config = LlamaConfig(**settings, attn_implementation="eager")
        size = self.config.hidden_size
        self.fc = nn.Linear(len(inputs) * served.hidden_size, size, bias=False)
        self.midlayer = MidLayer(self.config)
        self.norm = LlamaRMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, served.vocab_size if ids is None else len(ids), bias=False)
        if owns_embedding:
            self.embed_tokens = nn.Embedding(served.vocab_size, size)
        for parameter in self.parameters():
            nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3 if parameter.dim() == 1
                            else 1.5 / parameter.shape[-1] ** 0.5)
        self._ids = ids
        self._inputs = inputs
        self._norms_residual = norms_residual
        self._embedding = [self.embed_tokens if owns_embedding else model.get_input_embeddings()]  # no submodule

    def saved(self, folder: Path, **changes: Any) -> Path:
        """Save in the format of published heads. changes: of config.json; None removes a key.

        eagle_config numbers the layers whose outputs are read. Without one, the embedding may be read, too.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        data = self.config.to_diff_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": self.config.vocab_size,
            "draft_vocab_size": self.lm_head.out_features, "norm_before_residual": self._norms_residual,
            "eagle_aux_hidden_state_layer_ids": self._inputs} | changes
        if self._inputs[0] > 0 and "eagle_aux_hidden_state_layer_ids" not in changes:
            outputs = [layer - 1 for layer in self._inputs]
            del data["eagle_aux_hidden_state_layer_ids"]
            data = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}} | data
        (folder / "config.json").write_text(json.dumps({k: value for k, value in data.items() if value is not None}))
        if self._ids is not None:
            tensors["d2t"] = self._ids - torch.arange(len(self._ids))
            tensors["t2d"] = torch.isin(torch.arange(self.config.vocab_size), self._ids)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def trained(self, model: PreTrainedModel, steps: int = 80) -> EagleHead:
        """Train the head to predict what the model says after random tokens. Needs all ids of the model."""
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        for step in range(steps):
            torch.manual_seed(step)
            tokens = torch.randint(3, self.config.vocab_size, (8, 24))
            with torch.no_grad():
                found = model(tokens, output_hidden_states=True)
            features = self.fc(torch.cat([found.hidden_states[layer][:, :-1] for layer in self._inputs], -1))
            output = self.midlayer(self._embedding[0](tokens[:, 1:]), features, self._norms_residual)
            logits = self.lm_head(self.norm(output))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), found.logits[:, 1:].argmax(-1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self

    @torch.no_grad()
    def drafts_of(self, inputs: list[Tensor], tokens: list[int], count: int) -> list[int]:
        """Return what the head drafts after tokens.

        inputs: [1, T, S] of each layer of the model, for T tokens or more, all but the last of these first.
        """
        features = self.fc(torch.cat([inputs[layer][:, : len(tokens) - 1] for layer in self._inputs], -1))
        following, drafts = list(tokens[1:]), list[int]()
        for _ in range(count):
            embedded = self._embedding[0](torch.tensor([following]))
            output = self.midlayer(embedded, features, self._norms_residual)
            best = int(self.lm_head(self.norm(output[:, -1])).argmax())
            drafts.append(best if self._ids is None else int(self._ids[best]))
            following.append(drafts[-1])
            features = torch.cat((features, output[:, -1:]), 1)
        return drafts

    @torch.no_grad()
    def assert_drafts(self, model: PreTrainedModel, drafted: list[tuple[list[int], list[int]]]) -> None:
        """Assert that the head drafts the second list after the first one, whose last token is the sampled one."""
        read: list[tuple[list[int], list[Tensor]]] = []
        for tokens, drafts in sorted(drafted, key=lambda one: -len(one[0])):
            before = tokens[:-1]
            inputs = next((inputs for longer, inputs in read if longer[: len(before)] == before), None)
            if inputs is None:
                inputs = model(torch.tensor([before]), output_hidden_states=True).hidden_states
                read.append((before, inputs))
            assert self.drafts_of(inputs, tokens, len(drafts)) == drafts
