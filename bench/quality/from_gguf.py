"""Conversion of a GGUF file of make_gguf.py to a checkpoint of the numbers that it stands for, in bfloat16.

    PYTHON bench/quality/from_gguf.py MODEL FILE.gguf OUT

MODEL is the folder that the file was made of; OUT gets its other files. PYTHON has the packages gguf and numpy. For
Qwen2 and Qwen3. Prints the bits of a weight.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from make_gguf import NAMES, TOP


def name_of(tensor: str) -> str:
    """Return the checkpoint's name of a tensor of the file."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor):
        part = next(name for name, theirs in NAMES.items() if theirs == match[2])
        return f"model.layers.{match[1]}.{part}.{match[3]}"
    return next(name for name, theirs in TOP.items() if theirs == tensor)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to bfloat16, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    model, file, out = map(Path, sys.argv[1:])
    out.mkdir()
    for each in model.iterdir():
        if each.is_file() and each.suffix != ".safetensors":
            shutil.copy(each, out)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    tensors = gguf.GGUFReader(file).tensors
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name_of(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as data:
        data.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data.write(rounded(dequantize(tensor.data, tensor.tensor_type)).tobytes())
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    numbers = sum(int(np.prod(tensor.shape)) for tensor in matrices)
    print(f"{8 * sum(int(tensor.n_bytes) for tensor in matrices) / numbers:.2f} bits a weight")


if __name__ == "__main__":
    main()
