"""`npuserve check --accept`: compares a device with the CPU and with the kernels' golden functions.

`command` is the entry: it lists the parts and runs them, and alone imports no torch before it runs. A part is a file
that yields findings (`report`): `kernels`, `model` and `variants`. `model` loads the model by `reference`, judges its
tokens with `tokens` and `rounding`, and runs `sampling`, `captures`, `replays` and the steps of `latency`.

Imports of `cli`: top level and `bench`.
"""
