"""Tests of the kernels in CUDA C++: on a CPU, where each thread of a grid is a fiber, and compiled for Hopper."""
