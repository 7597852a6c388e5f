"""Measurement of kernels: time, error, bytes and operations beside what the machine can do."""
