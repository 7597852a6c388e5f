"""`npuserve check --accept`: compares a device with the CPU and with the kernels' golden functions.

`command` runs the parts in order, and lists them. Each part is a file that yields findings (`report`): `kernels`,
`sizes`, `model` (it loads the model, judges tokens with `tokens`, and runs `sampling`, `captures`, `replays` and the steps
of `latency`), and `variants`.
"""
