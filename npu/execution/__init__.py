"""Execution of steps: load, runner, capture, dispatch, batch, decoder, sampler, KV cache, host prefill, memory plan.

Imports of `npu`: top level, `backends` and `model`.
"""
