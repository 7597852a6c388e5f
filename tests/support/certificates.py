"""Test certificates made by the program openssl: authorities and the certificates that they sign."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no program openssl on PATH")
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: object) -> str:
    """Run openssl; return its output."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Pair:
    """Paths of a certificate and its key, in PEM."""

    cert: Path
    key: Path

    def install(self, cert: Path, key: Path) -> None:
        """Replace the files at these paths, each atomically."""
        for source, target in ((self.cert, cert), (self.key, key)):
            shutil.copy(source, fresh := target.with_suffix(".new"))
            os.replace(fresh, target)


class Authority(Pair):
    """Authority that signs certificates for 127.0.0.1, and stores all files in `folder`."""

    def __init__(self, folder: Path, name: str = "authority", days: int = 10):
        super().__init__(folder / f"{name}.pem", folder / f"{name}.key")
        self._folder = folder
        openssl("req", "-x509", *NEW_KEY, "-keyout", self.key, "-out", self.cert, "-subj", f"/CN={name}", "-days", days)

    def issue(self, name: str, days: int = 10, names: str = "DNS:localhost,IP:127.0.0.1",
              new_key: Sequence[str] = NEW_KEY) -> Pair:
        """Return a new certificate with its key.

        name: common name.
        days: days until it expires; negative: it has expired.
        names: alternative names, as openssl writes them; "": none.
        new_key: openssl's options for the key.
        """
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request = self._folder / f"{name}.csr"
        alternative = ("-addext", f"subjectAltName={names}") if names else ()
        openssl("req", "-new", *new_key, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}", *alternative)
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-copy_extensions", "copy",
                "-days", days, "-out", made.cert)
        return made
