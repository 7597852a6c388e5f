"""Fake child process of the supervisor: NAME JOURNAL BEHAVIOUR...

It appends its events to the journal, one JSON array per line. The n-th run takes the n-th behaviour; further runs take
the last one:

live            run until it is stopped
live:SECONDS    take so long to stop
streaming       end only when the engine has failed for good
deaf            ignore SIGTERM and orders
exit:CODE       exit at once
killer          report that the request which crashed the earlier runs was found, then exit
uncaptured:CODE report that captured steps cannot be used, then exit
hang:COUNT      send so many heartbeats, 9 by default, and then no more
step:SECONDS    send no heartbeats for this time after the first ones, then die
drain:SECONDS   request a drain from the parent, once the engine has started
noisy           write 1 MiB of text to stdout, besides its heartbeats
"""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
import time

name, journal, behaviours = sys.argv[1], sys.argv[2], sys.argv[3:]


def note(what: str, **facts: object) -> None:
    with open(journal, "a") as file:
        file.write(json.dumps([name, what, facts]) + "\n")


def stop(*_: object, **order: object) -> None:
    note("stopping", **order)
    time.sleep(float(argument or 0))
    note("stopped")
    os._exit(0)


arguments = json.loads(sys.stdin.readline())
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
with open(journal) as file:
    fcntl.flock(file, fcntl.LOCK_EX)  # two front ends that start at once have different behaviours
    runs = sum(json.loads(line)[:2] == [name, "started"] for line in file)
    behaviour, _, argument = behaviours[min(runs, len(behaviours) - 1)].partition(":")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" or "port" not in arguments else stop)
    note("started", pid=os.getpid(), group=os.getpgrp(), session=os.getsid(0), arguments=arguments, metrics=folder,
         spin=os.environ.get("GOMP_SPINCOUNT"), mode=oct(os.stat(folder).st_mode))
if behaviour == "killer":
    print(json.dumps({"event": "killer"}), flush=True)
if behaviour == "uncaptured":
    print(json.dumps({"event": "capture_failed", "error": "no graphs here", "next_mode": "decoder"}), flush=True)
if behaviour in ("exit", "killer", "uncaptured"):
    os._exit(int(argument or 1))


def listen() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if behaviour == "streaming" and "engine_failed" not in order:
            note("draining")
        elif behaviour != "deaf":
            stop(**order)
    note("orphaned")
    os._exit(1)


threading.Thread(target=listen, daemon=True).start()
if "port" in arguments:
    print(json.dumps({"event": "listening", "port": arguments["port"] or 4242}), flush=True)
else:
    print("output of a library", flush=True)
    print(json.dumps({"event": "ready", "seconds": 0.1, "kv_cache_tokens": 77, "backend": "cpu",
                      "kernels": {"run": runs + 1}}), flush=True)
if behaviour == "drain":
    written = ""
    while '["engine", "started"' not in written:
        time.sleep(0.01)
        with open(journal) as file:
            written = file.read()
    print(json.dumps({"event": "drain", "seconds": float(argument)}), flush=True)
    argument = ""
if behaviour == "noisy":
    threading.Thread(target=lambda: [print("x" * 1023, flush=True) for _ in range(1024)], daemon=True).start()
for turn in itertools.count(1):
    if behaviour == "step" and turn == 10:
        time.sleep(float(argument))
        os._exit(1)
    if behaviour != "hang" or turn <= int(argument or 9):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"event": "heartbeat"}), flush=True)
    if turn == 1:
        note("beating")
    # Front ends report ready again after each start of the engine.
    if "port" in arguments:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"event": "ready"}), flush=True)
    time.sleep(0.02)
