"""Execution of steps: batch, runner, decoder, sampler, KV cache, prefill on the host, memory plan.

Imports of `npu`: top level, `backends` and `model`.
"""
