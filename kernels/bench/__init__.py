"""Measurement of kernels: accuracy, time, minimum bytes and operations, and the ceilings of the machine."""
