"""Golden test of the native kernels: a C++ program without Python, and `python -m tests.native`, which builds it."""
