"""The gateway smg in the chart: its pod, its rights, and what the network policies admit."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from typing import Any, ClassVar

import pytest

from tests.helm.chart import CHART, Object, find, merged, needs_helm, notes, pod, problems, render, workload
from tests.helm.combinations import COMBINATIONS
from tests.helm.test_chart import STACKS

pytestmark = needs_helm

NAME = "demo-npuserve-gateway"
ASK = CHART / "files" / "ask.py"
SERVER = {"app.kubernetes.io/name": "npuserve", "app.kubernetes.io/instance": "demo",
          "app.kubernetes.io/component": "server"}
GATEWAY = {**SERVER, "app.kubernetes.io/component": "gateway"}
PLAINTEXT: Object = {"tls": {"secretName": ""}, "apiKeys": {"secretName": ""}, "helmTest": {"apiKeySecretName": ""}}


def smg(**values: Any) -> Object:
    """Return values of a chart that runs smg."""
    return {"gateway": {"enabled": True, "kind": "smg", "smg": values}}


def of_gateway(objects: list[Object]) -> list[Object]:
    """Return the objects whose component is the gateway."""
    return [o for o in objects if o["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "gateway"]


def gateway_pod(objects: list[Object]) -> Object:
    spec: Object = find(objects, "Deployment", NAME)["spec"]["template"]["spec"]
    return spec


def arguments(objects: list[Object]) -> list[str]:
    """Return the arguments of smg."""
    (container,) = gateway_pod(objects)["containers"]
    found: list[str] = container["args"]
    return found


def flags(objects: list[Object]) -> dict[str, str]:
    """Return flag -> value of the arguments."""
    return dict(word.removeprefix("--").split("=", 1) for word in arguments(objects)
                if word.startswith("--") and "=" in word)


def peers(policy: Object, port: int | str) -> Any:
    """Return the peers that a policy admits to a port; None for all."""
    (rule,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": port}]]
    return rule.get("from")


@pytest.mark.parametrize("presets", STACKS, ids="+".join)
def test_gateway_renders_with_every_preset(presets: tuple[str, ...]):
    values = merged(PLAINTEXT, smg(image={"digest": "sha256:" + "0" * 64}, clientsFrom=[
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]))
    if presets == ("prod",):
        presets = ("cpu", "prod")
    objects = render(values, presets)
    assert not problems(objects, "1.29")
    kinds = sorted(o["kind"] for o in of_gateway(objects))
    monitors = ["Service", "ServiceMonitor"] if "prod" in presets else []
    assert kinds == sorted(["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "Service",
                            "ServiceAccount", *monitors])


@pytest.mark.parametrize("gateway", [
    {}, {"kind": "smg"}, {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "envoy"}}}]}])
def test_gateway_is_absent_unless_it_is_enabled_as_smg(gateway: Object):
    objects = render({"gateway": gateway})
    assert of_gateway(objects) == []
    assert not [o for o in objects if o["kind"] in ("Role", "RoleBinding")]


def test_gateway_discovers_the_pods_of_the_servers():
    objects = render({**smg(), "ports": {"grpc": 8001}})
    given = flags(objects)
    assert given["service-discovery-port"] == "8001"
    assert given["service-discovery-namespace"] == "llm"
    words = arguments(objects)
    assert "--service-discovery" in words
    begin = words.index("--selector") + 1
    selector = dict(word.split("=", 1) for word in words[begin:begin + 3])
    assert words[begin + 3].startswith("--")
    assert selector.items() <= workload(objects)["spec"]["template"]["metadata"]["labels"].items()
    assert not selector.items() <= find(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"].items()
    assert selector == SERVER


def test_gateway_role_is_to_list_and_watch_pods_of_the_namespace():
    objects = render(smg())
    assert find(objects, "Role")["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert not [o for o in objects if o["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    binding = find(objects, "RoleBinding")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "llm"}]
    spec = gateway_pod(objects)
    assert spec["serviceAccountName"] == find(objects, "ServiceAccount", NAME)["metadata"]["name"]
    assert spec["automountServiceAccountToken"] is True
    assert pod(objects)["automountServiceAccountToken"] is False
    assert pod(objects)["serviceAccountName"] != spec["serviceAccountName"]


@pytest.mark.parametrize(("account", "name"), [({"create": False}, "default"),
                                               ({"create": False, "name": "own"}, "own")])
def test_gateway_without_an_account_of_its_own_gets_no_rights(account: Object, name: str):
    objects = render(smg(serviceAccount=account))
    assert gateway_pod(objects)["serviceAccountName"] == name
    assert {o["kind"] for o in of_gateway(objects)} == {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"}


def test_gateway_alone_is_admitted_to_the_grpc_port():
    policy = find(render(smg()), "NetworkPolicy", "demo-npuserve")
    assert peers(policy, "grpc") == [{"podSelector": {"matchLabels": GATEWAY}}]
    further = [{"podSelector": {"matchLabels": {"app": "batch"}}}]
    values = merged(smg(), {"gateway": {"from": further}})
    policy = find(render(values), "NetworkPolicy", "demo-npuserve")
    assert peers(policy, "grpc") == [{"podSelector": {"matchLabels": GATEWAY}}, *further]


@pytest.mark.parametrize("clients", [[], [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]])
def test_gateway_admits_clients_to_the_http_port(clients: list[Object]):
    scrapers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = {**smg(clientsFrom=clients), "networkPolicy": {"metricsFrom": scrapers}}
    policy = find(render(values), "NetworkPolicy", NAME)
    assert policy["spec"]["podSelector"]["matchLabels"] == GATEWAY
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    test = {"podSelector": {"matchLabels": {**SERVER, "app.kubernetes.io/component": "test"}}}
    assert peers(policy, "http") == ([*clients, test] if clients else None)
    assert peers(policy, "metrics") == scrapers
    assert len(policy["spec"]["ingress"]) == 2


@pytest.mark.parametrize("openshift", [False, True])
def test_gateway_reaches_pods_dns_and_the_kubernetes_api(openshift: bool):
    api = [{"ipBlock": {"cidr": "10.96.0.1/32"}}]
    values = {**smg(apiServer={"to": api, "ports": [6443]}, egress=[{"ports": [{"port": 4317}]}]),
              "openshift": openshift}
    pods, dns, server, further = find(render(values), "NetworkPolicy", NAME)["spec"]["egress"]
    assert pods == {"ports": [{"port": 50051}], "to": [{"podSelector": {"matchLabels": SERVER}}]}
    assert {port["port"] for port in dns["ports"]} == ({53, 5353} if openshift else {53})
    assert server == {"ports": [{"port": 6443}], "to": api}
    assert further == {"ports": [{"port": 4317}]}


def test_gateway_pod_is_restricted():
    values = {"podSecurityContext": {"runAsUser": 2000}, **smg()}
    spec = gateway_pod(render(values))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 2000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                            "capabilities": {"drop": ["ALL"]}}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp"}
    assert spec["enableServiceLinks"] is False
    opened = gateway_pod(render({"openshift": True, **smg()}))
    assert "runAsUser" not in opened["securityContext"]


def test_gateway_probes_use_the_port_for_health():
    objects = render(smg(ports={"health": 31000}, tls={"secretName": "cert"}))
    (container,) = gateway_pod(objects)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = flags(objects)
    assert {name: int(given[flag]) for name, flag in {
        "http": "port", "metrics": "prometheus-port", "health": "health-check-port"}.items()} == ports
    assert ports["health"] == 31000
    assert {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")} == {
        "startup": {"path": "/liveness", "port": "health"}, "readiness": {"path": "/readiness", "port": "health"},
        "liveness": {"path": "/liveness", "port": "health"}}


@pytest.mark.parametrize("termination", [{}, {"drainSeconds": 0, "preStopSeconds": 0},
                                         {"drainSeconds": 600, "preStopSeconds": 30}])
def test_gateway_grace_period_holds_the_streams_of_the_servers(termination: Object):
    objects = render({**smg(), "termination": termination})
    spec = gateway_pod(objects)
    (container,) = spec["containers"]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    shutdown = int(flags(objects)["shutdown-grace-period-secs"])
    assert int(hook[1]) + shutdown < spec["terminationGracePeriodSeconds"]
    assert spec["terminationGracePeriodSeconds"] == pod(objects)["terminationGracePeriodSeconds"]
    deadline = find(objects, "Deployment", NAME)["spec"]["progressDeadlineSeconds"]
    assert deadline == find(objects, "Deployment", "demo-npuserve")["spec"]["progressDeadlineSeconds"]


def test_gateway_secrets_are_no_arguments():
    """The key is in no object but its Secret; smg reads the certificate from a volume."""
    objects = render(smg(tls={"secretName": "cert"}, apiKeys={"secretName": "keys", "key": "k"}))
    spec = gateway_pod(objects)
    (container,) = spec["containers"]
    assert "--api-key=$(SMG_API_KEY)" in container["args"]
    (variable,) = [v for v in container["env"] if v["name"] == "SMG_API_KEY"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": "k"}}
    given, mounts = flags(objects), {m["mountPath"]: m for m in container["volumeMounts"]}
    assert (given["tls-cert-path"], given["tls-key-path"]) == ("/etc/gateway-tls/tls.crt", "/etc/gateway-tls/tls.key")
    assert mounts["/etc/gateway-tls"]["readOnly"] is True
    (volume,) = [v for v in spec["volumes"] if v["name"] == mounts["/etc/gateway-tls"]["name"]]
    assert volume["secret"]["secretName"] == "cert"
    (port,) = find(objects, "Service", NAME)["spec"]["ports"]
    assert (port["port"], port["appProtocol"]) == (80, "https")
    assert "api-key" not in flags(render(smg()))


def test_gateway_takes_the_tokenizer_from_the_servers():
    """Its request to the hub must fail at once, whatever the network policy does with packets."""
    (container,) = gateway_pod(render(smg(extraEnv=[{"name": "HF_ENDPOINT", "value": "https://hub"}])))["containers"]
    values = [v["value"] for v in container["env"] if v["name"] == "HF_ENDPOINT"]
    assert values == ["http://127.0.0.1:1", "https://hub"], "the last one counts"


def test_gateway_extra_arguments_come_last():
    objects = render(smg(extraArgs=["--request-timeout-secs", "60"], toolCallParser="qwen", reasoningParser="qwen3"))
    assert arguments(objects)[-2:] == ["--request-timeout-secs", "60"]
    assert flags(objects)["tool-call-parser"] == "qwen"
    assert flags(objects)["reasoning-parser"] == "qwen3"


@pytest.mark.parametrize("registry", ["", "registry.example.com:5000/llm"])
def test_gateway_image_is_its_own(registry: str):
    prefix = f"{registry}/" if registry else ""
    values = {"global": {"imageRegistry": registry}, "image": {"tag": "9"}, "imagePullSecrets": [{"name": "pull"}]}
    spec = gateway_pod(render({**values, **smg()}))
    version = find(render(smg()), "Deployment", NAME)["metadata"]["labels"]["app.kubernetes.io/version"]
    assert spec["containers"][0]["image"] == f"{prefix}npuserve-gateway:{version}"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    digest = "sha256:" + "0" * 64
    spec = gateway_pod(render({**values, **smg(image={"digest": digest, "repository": "g"})}))
    assert spec["containers"][0]["image"] == f"{prefix}g@{digest}"


@pytest.mark.parametrize("scrape", ["annotations", "serviceMonitor", "none"])
def test_gateway_metrics_are_scraped_as_those_of_the_servers(scrape: str):
    objects = render({**smg(ports={"metrics": 29001}), "metrics": {"scrape": scrape, "labels": {"release": "p"}}})
    annotations = find(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["annotations"]
    assert (annotations.get("prometheus.io/port") == "29001") == (scrape == "annotations")
    monitors = [o for o in of_gateway(objects) if o["kind"].endswith("Monitor")]
    assert len(monitors) == (scrape.endswith("Monitor"))
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "p"
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [o for o in objects if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
        assert service["spec"]["ports"][0]["port"] == 29001
        wanted = service["spec"]["selector"].items()
        labels = find(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"].items()
        assert wanted <= labels
        assert not wanted <= workload(objects)["spec"]["template"]["metadata"]["labels"].items()


def test_gateway_and_servers_are_selected_apart():
    """Services, budgets and workloads of one select no pod of the other."""
    objects = render(smg())
    servers = workload(objects)["spec"]["template"]["metadata"]["labels"].items()
    gateways = find(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"].items()
    for each in objects:
        selector = each.get("spec", {}).get("selector") or {}
        selector = selector.get("matchLabels", selector)
        if selector:
            assert (selector.items() <= servers) != (selector.items() <= gateways), each["metadata"]["name"]
    assert [s["labelSelector"]["matchLabels"] for s in gateway_pod(objects)["topologySpreadConstraints"]] == [
        GATEWAY, GATEWAY]
    strict = {**smg(), "topologySpread": {"whenUnsatisfiable": "DoNotSchedule"}}
    assert {s["whenUnsatisfiable"] for s in gateway_pod(render(strict))["topologySpreadConstraints"]} == {
        "ScheduleAnyway"}


def test_gateway_notes_name_its_address_and_the_missing_key():
    text = notes(smg())
    assert "OPENAI_BASE_URL=http://demo-npuserve-gateway.llm.svc:80/v1" in text
    assert "WARNING: smg asks for no key" in text
    text = notes(smg(tls={"secretName": "t"}, apiKeys={"secretName": "k"}, service={"port": 443}))
    assert "OPENAI_BASE_URL=https://demo-npuserve-gateway.llm.svc:443/v1" in text
    assert "WARNING" not in text


@pytest.mark.parametrize(("values", "url", "given"), [
    ({}, "http://demo-npuserve-gateway.llm.svc:80", {}),
    ({"service": {"port": 443}, "tls": {"secretName": "cert"}}, "https://demo-npuserve-gateway.llm.svc:443",
     {"GATEWAY_CA": "cert"}),
    ({"apiKeys": {"secretName": "keys", "key": "k"}}, "http://demo-npuserve-gateway.llm.svc:80",
     {"GATEWAY_KEY": "keys"})])
def test_helm_test_of_the_gateway_has_its_address_and_credentials(values: Object, url: str, given: dict[str, str]):
    """The pods of the servers admit smg alone, so there is one test, and smg's policy admits its pod."""
    objects = render(smg(clientsFrom=[{"podSelector": {"matchLabels": {"app": "web"}}}], **values))
    made = find(objects, "Pod")
    assert made["metadata"]["name"] == f"{NAME}-test"
    (container,) = made["spec"]["containers"]
    assert container["command"][2].strip() == ASK.read_text().strip()
    variables = {v["name"]: v.get("value") or v["valueFrom"]["secretKeyRef"]["name"] for v in container["env"]}
    assert variables["GATEWAY_URL"] == url
    assert {"GATEWAY_CA", "GATEWAY_KEY"} & variables.keys() == given.keys()
    if "GATEWAY_CA" in given:
        mount = next(m for m in container["volumeMounts"] if variables["GATEWAY_CA"].startswith(m["mountPath"]))
        (volume,) = [v for v in made["spec"]["volumes"] if v["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == given["GATEWAY_CA"]
    assert peers(find(objects, "NetworkPolicy", NAME), "http")[-1] == {
        "podSelector": {"matchLabels": {name: made["metadata"]["labels"][name] for name in SERVER}}}


class Gateway(http.server.BaseHTTPRequestHandler):
    """OpenAI API of one model. seen: (path, key, body) of each call. wrong: path that fails."""

    seen: ClassVar[list[tuple[str, str | None, Any]]] = []
    wrong: ClassVar[str] = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.seen.append((self.path, self.headers["Authorization"], json.loads(self.rfile.read(length) or "null")))
        answer = {"/v1/models": {"data": [{"id": "qwen"}]}, "/v1/completions": {"choices": [{"text": "a cat"}]}}
        body = json.dumps({"error": "no workers"} if self.path == self.wrong else answer[self.path]).encode()
        self.send_response(503 if self.path == self.wrong else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@pytest.mark.parametrize("wrong", ["", "/v1/models", "/v1/completions"])
def test_helm_test_of_the_gateway_fails_unless_it_is_answered(wrong: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gateway, "seen", [])
    monkeypatch.setattr(Gateway, "wrong", wrong)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run([sys.executable, ASK], capture_output=True, text=True, timeout=60, env={
            "GATEWAY_URL": f"http://127.0.0.1:{server.server_port}", "GATEWAY_KEY": "secret", "GATEWAY_WAIT": "0"})
        server.shutdown()
    if wrong:
        assert done.returncode == 1
        assert "no workers" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "qwen: a cat\n")
        (_, key, _), (path, _, body) = Gateway.seen
        assert (key, path) == ("Bearer secret", "/v1/completions")
        assert body["model"] == "qwen"


def test_gateway_production_combination_has_tls_keys_and_a_digest():
    presets, values = COMBINATIONS["smg in production, every value"]
    objects = render(values, presets)
    (container,) = gateway_pod(objects)["containers"]
    assert container["image"].endswith("@sha256:" + "1" * 64)
    assert {"tls-cert-path", "api-key"} <= flags(objects).keys()
