"""values.schema.json has all settings of the server, with the server's ranges."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
import pytest

from npuserve.service.config import ConfigError, ServerConfig
from tests.helm.chart import Object
from tests.helm.test_values import SCHEMA

CONFIG: Object = SCHEMA["properties"]["config"]["properties"]
# The chart derives these from other values.
DERIVED = {"host", "port", "metrics_host", "metrics_port", "health_port", "model", "served_name", "device",
           "drain_seconds", "state_folder", "tls_cert", "tls_key", "tls_client_ca", "api_keys"}


def test_schema_has_every_setting():
    """Add a new setting with its range under config in values.schema.json, and to tests/helm/combinations.py."""
    assert set(CONFIG) | DERIVED == set(ServerConfig.__struct_fields__)
    assert not set(CONFIG) & DERIVED


@pytest.mark.parametrize("name", sorted(CONFIG))
def test_schema_ranges_equal_the_servers(name: str):
    def takes(value: Any) -> bool:
        try:
            ServerConfig(**{"emulate": True, "min_priority": -100, name: value})
        except ConfigError:
            return False
        return True

    schema = CONFIG[name]
    kind = next(f.type for f in msgspec.structs.fields(ServerConfig) if f.name == name)
    for part in schema.get("anyOf", [schema]):
        if "minimum" in part:
            step = 1 if part["type"] == "integer" else part["minimum"] / 2 or 0.5
            assert [takes(part["minimum"] - step), takes(part["minimum"]), takes(part["maximum"]),
                    takes(part["maximum"] + 1)] == [False, True, True, False]
            assert part["type"] == {int: "integer", float: "number"}[kind]
        elif "enum" in part:
            allowed = get_args(kind) if get_origin(kind) else [0, *(1 << n for n in range(14))]
            assert part["enum"] == [value for value in allowed if takes(value)]
        else:
            assert part["type"] == ("boolean" if kind is bool else "string")
