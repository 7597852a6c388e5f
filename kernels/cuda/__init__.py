"""CUDA kernels in C++, compiled at run time by NVRTC: all decoder layers of a decode step of a few rows.

Importing this package does not import CUDA.
"""
