"""Disables gRPC's event engine in clients. Import this module before grpc, which reads the setting on import.

With the event engine each message wakes three threads in sequence and costs twice the CPU time, often on the server's
machine. A gRPC without this setting prints a warning on stderr and continues.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
