"""`npuserve demo` with the built-in model, and with a server that fails to start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "support" / "fake_child.py"

DRIVER = """
import asyncio, sys
from npuserve.service.config import ServerConfig
from npuserve.cli.demo import demonstrate
from npuserve.service.supervisor.supervisor import Supervisor
fake, journal, front, engine = sys.argv[1:]
command = lambda name, behaviour: [sys.executable, "-S", fake, name, journal, behaviour]
config = ServerConfig(model=".", port=0, metrics_port=0)
supervisor = Supervisor(config, frontend=command("front", front), engine=command("engine", engine))
sys.exit(asyncio.run(demonstrate(supervisor, "Once", 8)))
"""


@pytest.mark.slow
def test_demo_prints_an_answer_and_stops() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "npuserve.cli", "demo", "Once upon a time", "--max-tokens", "8"],
        capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) >= 8
    assert re.search(r"^8 tokens, \d+ tokens/s, first after \d+ ms \(LENGTH\)$", done.stderr, re.MULTILINE)


def test_demo_server_that_fails_to_start_ends_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    command = [sys.executable, "-c", DRIVER, FAKE, journal, "live", "exit:2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


INTERRUPTED = """
import asyncio, os, signal, sys
from npuserve.service.config import ServerConfig
from npuserve.cli import demo
from npuserve.service.supervisor.supervisor import Supervisor
fake, journal, phase = sys.argv[1:]
command = lambda name: [sys.executable, "-S", fake, name, journal, "live"]
never_ready = [sys.executable, "-c", "import time; time.sleep(60)"]

class Client:
    async def wait(self):
        os.kill(os.getpid(), signal.SIGINT)
        return 130

async def start_client(*arguments):
    return Client()

async def main():
    config = ServerConfig(model=".", port=0, metrics_port=0)
    engine = command("engine") if phase == "answer" else never_ready
    supervisor = Supervisor(config, frontend=command("front"), engine=engine)
    running = asyncio.create_task(demo.demonstrate(supervisor, "Once", 8))
    if phase == "start":
        await supervisor.listening.wait()
        os.kill(os.getpid(), signal.SIGINT)
    return await running

asyncio.create_subprocess_exec = start_client
sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("phase", ["start", "answer"])
def test_demo_ctrl_c_stops_the_server_and_exits_with_130(tmp_path: Path, phase: str) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, FAKE, journal, phase], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
