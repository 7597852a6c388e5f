"""`npuserve check --accept`: compares a device with the CPU and with the kernels' golden functions.

`command` lists the parts and runs them. A part is a file that yields findings (`report`): `kernels`, `sizes`, `model`
and `variants`. `model` loads the model, judges its tokens with `tokens`, and runs `sampling`, `captures`, `replays` and
the steps of `latency`.
"""
