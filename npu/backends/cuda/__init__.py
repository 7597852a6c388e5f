"""NVIDIA GPUs through torch.cuda, with kernels in Triton: backend, graphs, errors, and an emulator without a GPU."""
