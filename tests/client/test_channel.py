"""gRPC channels: TLS settings."""

from __future__ import annotations

from typing import Any

import pytest

from npuserve.client import Tls


@pytest.mark.parametrize(("settings", "message"), [
    ({"ca": 3}, "tls: ca must be a path, got int"),
    ({"cert": b"c.pem", "key": "c.key"}, "tls: cert must be a path, got bytes"),
    ({"server_name": 3}, "tls: server_name must be a text, got int"),
])
def test_tls_setting_of_another_type_raises(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        Tls(**settings)
