"""Quantization of a checkpoint as its config.json describes it: a file for each scheme and each format.

`scheme.py` is what schemes have in common; npu/model/forms stores their weights. Imports no torch.
Imports: formats → compressed_tensors, fp8 → section, assignment, w8a8 → scheme.
"""
