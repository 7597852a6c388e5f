"""Makes gRPC's client thinner; to be imported before grpc, which reads its settings while it is imported.

It takes gRPC's older way to wait for sockets. With the newer one each message wakes three threads, one after the other,
and costs twice the processor time, on a machine that may be the server's too. A gRPC that does not know the setting
any more says so in a line on stderr and goes on.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
