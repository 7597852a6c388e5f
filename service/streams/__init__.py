"""Streams between a front end and the engine: the front end's client, its streams, and the records that continue them.

It also holds the front end's other calls to the engine: subscriptions to KV events and profiles. Imports of `service`:
the files at its top level and `ipc`.
"""
