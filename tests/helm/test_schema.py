"""values.schema.json has all settings of the server, with the server's ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec
import pytest

from npuserve.service.config import ConfigError, ServerConfig
from tests.helm.chart import Object, needs_helm, refused, template
from tests.helm.test_values import DEFAULTS, SCHEMA

DERIVED = {"host", "port", "metrics_host", "metrics_port", "health_port", "openai_port", "openai_api_keys", "model",
           "served_name", "device", "drain_seconds", "tls_cert", "tls_key", "tls_client_ca", "api_keys"}
"""Settings that the chart derives from other values. The schema lets them pass, and _checks.tpl names these values."""
REMOVED = {"state_folder"}
"""Settings of earlier versions. The schema lets them pass, and _checks.tpl says what to do."""
ALL: Object = SCHEMA["properties"]["config"]["properties"]
CONFIG: Object = {name: schema for name, schema in ALL.items() if name not in DERIVED | REMOVED}

SIZES = {"max_message_size", "kv_cache_memory", "kv_offload_memory", "kv_store_memory"}
"""Settings that are numbers of bytes, or texts with a unit."""

STORE: Object = {"kv_offload_memory": 1 << 30, "kv_store": "master:50051", "kv_store_secret": "/secret/store"}


def test_schema_has_every_setting():
    """Add a new setting with its range under config in values.schema.json, and to tests/helm/combinations.py."""
    assert set(ALL) - REMOVED == set(ServerConfig.__struct_fields__)
    assert {name for name, schema in ALL.items() if not schema} == DERIVED | REMOVED


@needs_helm
@pytest.mark.parametrize("name", sorted(DERIVED))
def test_chart_refuses_a_derived_setting_and_names_its_value(name: str):
    done = template({"config": {name: "x"}})
    said = re.search(rf"config\.{name}: .*, and set ([\w.]+) instead", done.stderr)
    assert said, done.stderr
    value: Any = DEFAULTS
    for part in said.group(1).split("."):
        value = value[part]


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
    if "minimum" in schema:
        step = 1 if kind is int else schema["minimum"] / 2 or 0.5
        assert [takes(schema["minimum"] - step), takes(schema["minimum"]), takes(schema["maximum"]),
                takes(schema["maximum"] + 1)] == [False, True, True, False]
        number = {int: "integer", float: "number"}[kind]
        assert schema["type"] == ([number, "string"] if name in SIZES else number)
    elif "enum" in schema:
        allowed = get_args(kind) if get_origin(kind) else [0, *(1 << n for n in range(14))]
        assert schema["enum"] == [value for value in allowed if takes(value)]
    else:
        assert schema["type"] == ("boolean" if kind is bool else "string")


@needs_helm
@pytest.mark.parametrize(("name", "config"), [
    ("min_priority", {"min_priority": 1, "max_priority": 0}),
    ("min_priority", {"max_priority": -1}),
    ("max_model_len", {"max_model_len": 1}),
    ("emulate_relax", {"emulate_relax": "fp32"}),
    ("admin_certificates", {"admin_certificates": "admin"}),
    ("kv_events", {"kv_events": "grpc", "prefix_cache": False}),
    ("kv_offload_memory", {"kv_offload_memory": 1 << 30, "prefix_cache": False}),
    ("kv_store_secret", {"kv_store_secret": "/secret/store"}),
    ("kv_store_secret", {"kv_offload_memory": 1 << 30, "kv_store": "master:50051"}),
    ("kv_store", {"kv_store": "master:50051", "kv_store_secret": "/secret/store"}),
    ("kv_store", {**STORE, "kv_store": "master:65536"}),
    ("kv_store", {**STORE, "tensor_parallel_size": 2}),
    ("kv_events_replay_endpoint", {"kv_events": "grpc", "kv_events_replay_endpoint": "tcp://*:5558"}),
    ("kv_events_endpoint", {"kv_events_endpoint": "tcp://router:65536"}),
    ("otlp_endpoint", {"otlp_endpoint": "http://collector:65536/"}),
])
def test_chart_refuses_settings_that_the_server_refuses(name: str, config: Object):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        ServerConfig(**config)
    done = template({"config": config})
    assert done.returncode != 0, f"{config} were accepted"
    assert f"config.{name}: " in done.stderr, done.stderr


@needs_helm
@pytest.mark.parametrize("config", [
    {"min_priority": -100, "max_priority": 0}, {"max_model_len": 2}, {"emulate": True, "emulate_relax": "fp32"},
    {"kv_offload_memory": 1 << 30}, STORE, {**STORE, "kv_store": "[fd00::5]:50051"},
    {"kv_events": "off", "prefix_cache": False},
    {"kv_events": "grpc", "prefix_cache": True},
    {"kv_events": "grpc", "kv_events_endpoint": "tcp://*:65535"}, {"kv_events_endpoint": "ipc:///run/kv:70000"},
    {"otlp_endpoint": "https://[::1]:65535/"},
])
def test_chart_accepts_settings_that_the_server_accepts(config: Object):
    ServerConfig(**config)
    done = template({"config": config})
    assert done.returncode == 0, done.stderr


def test_schema_requires_values_that_templates_cannot_miss():
    """An empty value, as `replicaCount:`, removes the default: without `required` it would render as 0 or nothing."""
    optional = re.compile(
        r"(config|(gateway\.smg\.|model\.init\.)?resources|podSecurityContext|dashboards\.labels)\.|securityContext")

    def missing(schema: Object, defaults: Object, path: str = "") -> Iterator[str]:
        schema = SCHEMA["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        for name, default in defaults.items():
            if optional.match(path + name):
                continue
            if default not in (None, "", [], {}) and name not in schema.get("required", []):
                yield path + name
            if isinstance(default, dict) and "properties" in schema:
                yield from missing(schema["properties"][name], default, f"{path}{name}.")

    assert list(missing(SCHEMA, DEFAULTS)) == []


@needs_helm
def test_helm_refuses_empty_values_by_name():
    done = template({"replicaCount": None, "tls": None, "affinity": None, "gateway": {"smg": {"ports": None}}})
    assert done.returncode != 0
    assert refused(done.stderr) >= {"replicaCount", "tls", "affinity", "gateway.smg.ports"}, done.stderr
