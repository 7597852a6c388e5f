"""The engine process: its loop, the registry of live requests, and the search for requests that crash it.

Imports of `service`: top level, `ipc`, `processes`, `streams`, `scheduling`, `structured_output`,
`text` and `ranks`.
"""
