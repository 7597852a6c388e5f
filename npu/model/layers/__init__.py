"""Layers that models are made of, one file each: parameters, state, forward over kernels, bytes of activations.

`layer.py` defines what a layer declares. Storage, allocation, loader, memory plan, cache, quantizer and roofline derive
from these declarations. Imports torch only for type checking, since the configuration of a model is read without it.
"""
