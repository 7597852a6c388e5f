"""Conversion of an OpenVINO model of optimum-cli to a checkpoint of the numbers that it stands for, in bfloat16.

    PYTHON bench/quality/from_openvino.py MODEL FOLDER OUT

MODEL is the folder that FOLDER was exported from; OUT gets its other files and tensors. PYTHON has the packages
openvino, safetensors and torch. Prints the matrices that have less than 8 bits, and those that have more.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from safetensors.torch import load_file, save_file

MODULE = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+|model\.embed_tokens|lm_head)\b")
"""Module in the name of an operation."""


def sources(node: Any) -> Iterator[Any]:
    """Yield the constants from which a node is computed. Nothing for a node that depends on an input of the model."""
    if node.get_type_name() == "Constant":
        yield node
    for value in node.input_values():
        yield from sources(value.get_node())


def depends_on_inputs(node: Any) -> bool:
    if node.get_type_name() in ("Parameter", "ReadValue"):
        return True
    return any(depends_on_inputs(value.get_node()) for value in node.input_values())


def numbers(value: Any) -> torch.Tensor:
    """Return the float32 numbers that a constant expression stands for."""
    model = ov.Model([ov.opset13.convert(value, "f32")], [], "weight")
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([])[0].copy())


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    source, folder, out = map(Path, sys.argv[1:])
    tensors = load_file(source / "model.safetensors")
    bits: dict[str, int] = {}
    for operation in ov.Core().read_model(folder / "openvino_model.xml").get_ordered_ops():
        match = MODULE.search(operation.get_friendly_name())
        place = {"MatMul": 1, "Gather": 0}.get(operation.get_type_name())
        if match is None or place is None or depends_on_inputs(weight := operation.input_values()[place].get_node()):
            continue
        name = f"{match[1]}.weight"
        found = numbers(operation.input_values()[place])
        if name not in tensors or found.shape != tensors[name].shape:
            continue  # such as the rotation of queries
        tensors[name] = found.bfloat16()
        bits[name] = max(sources(weight), key=lambda constant: constant.get_output_size()).get_element_type().bitwidth
    if missing := {name for name, tensor in tensors.items() if tensor.dim() == 2} - bits.keys():
        raise SystemExit(f"{folder}: no weights of {', '.join(sorted(missing))}")
    out.mkdir()
    for each in source.iterdir():
        if each.is_file() and each.suffix != ".safetensors":
            shutil.copy(each, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for low in sorted(set(bits.values())):
        print(f"{low} bits: {sum(each == low for each in bits.values())} matrices")


if __name__ == "__main__":
    main()
