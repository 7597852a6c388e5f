"""`npuserve check --accept`: compares a device with the CPU and with the kernels' golden functions.

`command` runs the parts in order. Each part yields findings (`report`): `kernels`, `model` (tokens, with the prompts
and answers of `tokens`), `captures` and `latency`.
"""
