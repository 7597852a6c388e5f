"""What ties a child to its parent's life, whenever the parent dies."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from npuserve.service.ipc.child import is_transient

CHILD = """
import threading
from npuserve.service.ipc import child
print(child.read_arguments(dict), flush=True)
child.listen(lambda order: print(order, flush=True))
threading.Event().wait()
"""


@pytest.mark.parametrize(("sent", "said"), [
    (b"", b""), (b'{"a": 1}\n', b"{'a': 1}\n"), (b'{"a": 1}\n{"b": 2}\n', b"{'a': 1}\n{'b': 2}\n")])
def test_child_parent_dies_before_or_after_the_arguments_ends_at_once(sent: bytes, said: bytes) -> None:
    """End of file is all that a child sees of a parent that died before it asked the kernel for a signal."""
    done = subprocess.run([sys.executable, "-c", CHILD], input=sent, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, said)


@pytest.mark.parametrize(("error", "transient"), [
    (OSError(errno.ENOMEM, ""), True), (BlockingIOError(errno.EAGAIN, ""), True), (OSError(errno.EMFILE, ""), True),
    (FileNotFoundError(errno.ENOENT, ""), False), (MemoryError(), False), (ValueError(), False)])
def test_child_is_transient(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient
