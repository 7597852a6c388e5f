"""config.json of EAGLE-3 heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.model.eagle import read_eagle
from npuserve.npu.model.families.config_json import ModelError

HEAD = {"num_hidden_layers": 1, "vocab_size": 9, "hidden_size": 8}


@pytest.mark.parametrize(("layers", "changes", "inputs"), [
    (36, {}, (2, 18, 33)),
    (36, {"eagle_config": {"use_aux_hidden_state": True}}, (2, 18, 33)),
    (36, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 18, 33)),
    (94, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, (2, 47, 91)),
    (36, {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
])
def test_layers_of_published_heads(
    tmp_path: Path, layers: int, changes: dict[str, Any], inputs: tuple[int, ...]
) -> None:
    """Those of eagle_config are the layers before: by default SpecForge trains with the outputs of 1, 17 and 32."""
    data = HEAD | changes
    assert read_eagle(data, tmp_path, layers, 8).inputs == inputs


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6])
def test_absent_layers_of_a_small_model_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ModelError, match=f"is missing, and a served model of {layers} layers has no default"):
        read_eagle(HEAD, tmp_path, layers, 8)
