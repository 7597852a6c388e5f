"""Front-end process: the gRPC servers, their servicers, and the building of response messages.

Imports of `service`: top level, `ipc`, `processes`, `streams`, `text`, `rpc`, `access`, `parsing`, `requests` and
`gateway`.
"""
