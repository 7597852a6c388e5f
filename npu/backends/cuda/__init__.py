"""NVIDIA GPUs through torch.cuda, with kernels in Triton."""
