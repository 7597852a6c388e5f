"""A child of the supervisor that a reader can follow: NAME JOURNAL BEHAVIOUR...

It writes what it lives through to the journal, a JSON array a line. The n-th life takes the n-th behaviour, later
ones the last: live, live:SECONDS (how long it takes to leave), deaf (to SIGTERM and orders), exit:CODE, killer (reports
that the request was found of which its last lives died, then exits), hang (after its first beats), step:SECONDS (stands
still for so long after its first beats, then dies), drain:SECONDS (asks its parent for it, once the engine has been
started).
"""

import contextlib
import itertools
import json
import mmap
import os
import signal
import sys
import threading
import time

name, journal, behaviours = sys.argv[1], sys.argv[2], sys.argv[3:]


def note(what: str, **facts: object) -> None:
    with open(journal, "a") as file:
        file.write(json.dumps([name, what, facts]) + "\n")


def leave(*_: object, **order: object) -> None:
    note("asked", **order)
    time.sleep(float(argument or 0))
    note("left")
    os._exit(0)


arguments = json.loads(sys.stdin.readline())
with open(journal) as file:
    lives = sum(json.loads(line)[:2] == [name, "started"] for line in file)
behaviour, _, argument = behaviours[min(lives, len(behaviours) - 1)].partition(":")
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else leave)
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
note("started", pid=os.getpid(), session=os.getsid(0), arguments=arguments, metrics=folder,
     spin=os.environ.get("GOMP_SPINCOUNT"), mode=oct(os.stat(folder).st_mode))
if behaviour == "killer":
    print(json.dumps({"event": "killer"}), flush=True)
if behaviour in ("exit", "killer"):
    os._exit(int(argument or 1))


def listen() -> None:
    for line in sys.stdin:
        if behaviour != "deaf":
            leave(**json.loads(line))
    note("orphaned")
    os._exit(1)


threading.Thread(target=listen, daemon=True).start()
with open(arguments["pulse"], "r+b") as file:
    pulse = mmap.mmap(file.fileno(), 8)
if "port" in arguments:
    print(json.dumps({"event": "listening", "port": arguments["port"] or 4242}), flush=True)
else:
    print("a library's chatter", flush=True)
    print(json.dumps({"event": "ready", "seconds": 0.1, "kv_cache_tokens": 77, "backend": "cpu",
                      "kernels": {"life": lives + 1}}), flush=True)
if behaviour == "drain":
    said = ""
    while '["engine", "started"' not in said:
        time.sleep(0.01)
        with open(journal) as file:
            said = file.read()
    print(json.dumps({"event": "drain", "seconds": float(argument)}), flush=True)
    argument = ""
for turn in itertools.count(1):
    if behaviour == "step" and turn == 10:
        time.sleep(float(argument))
        os._exit(1)
    if behaviour != "hang" or turn < 10:
        pulse[:8] = turn.to_bytes(8, "little")
    # A front end is ready again after each start of the engine.
    if "port" in arguments:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"event": "ready"}), flush=True)
    time.sleep(0.02)
