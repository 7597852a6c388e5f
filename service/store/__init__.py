"""Store of prefixes that several servers share, behind host memory (scheduling/store_tier.py).

    engine's loop ──► client.py, a thread ──socket──► store_process.py, a process ──► mooncake.py ──TCP──► the store

- `connector.py`: the interface of lookup, load and save.
- `client.py`: the implementation over a process, with deadlines and a circuit breaker.
- `store_process.py`: the process that has the native client, so that a crash or a hang of it costs no request.
- `messages.py`: what client and process exchange.
- `keys.py`: names of values, their encryption, and the identity of the model, all from a secret that servers share.
- `mooncake.py`: Mooncake's store.
- `setup.py`: checks of the settings, and the client of an engine.

Imports of `service`: the files at its top level, and `processes`.
"""
