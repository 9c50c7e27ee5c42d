"""The chart's values: its schema refuses what it does not know; what each of them changes."""

import pytest
import yaml
from kubernetes_checks import DEPLOY, Manifest, of_kind, problems, ray_cluster, render_chart

helm = pytest.importorskip("helm_python", exc_type=ImportError)
CHART = DEPLOY / "helm" / "pagefleet"


def test_helm_finds_nothing_to_complain_of():
    assert helm.lint(CHART)["errors"] == []


@pytest.mark.parametrize(
    "values",
    [
        {"kinds": "RayService"},
        {"kind": "RayJob"},
        {"workers": {"replica": 1}},
        {"service": {"httpPort": 80}},
        {"args": {"host": "127.0.0.1"}},
        {"args": {"http_port": 9000}},
        {"image": {"tag": 1}},
        {"monitoring": {"podMonitor": "yes"}},
    ],
)
def test_wrong_values_are_refused(values: Manifest):
    with pytest.raises(helm.HelmError):
        render_chart(values)


def test_every_value_is_in_the_schema():
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_ports_move_together():
    manifests = render_chart({"service": {"httpPort": 9000, "grpcPort": 9001}})
    (service,) = of_kind(manifests, "RayService")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert (args["http_port"], args["grpc_port"]) == (9000, 9001)
    told = [port["port"] for port in service["spec"]["serveService"]["spec"]["ports"]]
    (policy,) = of_kind(manifests, "NetworkPolicy")
    opened = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert told == [9000, 9001] and opened == [[{"port": 9000}, {"port": 9001}]]


def test_longer_streams_get_longer_graces():
    (service,) = of_kind(render_chart({"args": {"max_stream_s": 3600}}), "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= 3600


def test_a_secret_is_mounted_where_the_arguments_look():
    manifests = render_chart({"apiKeys": {"existingSecret": "keys"}})
    pod = ray_cluster(manifests)["workerGroupSpecs"][0]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "api-keys"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "keys"
    (service,) = of_kind(manifests, "RayService")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["api_key_file"].startswith(mount["mountPath"] + "/")


def test_clients_can_be_named():
    source = {"podSelector": {"matchLabels": {"app": "chat"}}}
    (policy,) = of_kind(render_chart({"networkPolicy": {"clients": [source]}}), "NetworkPolicy")
    assert all("from" in rule for rule in policy["spec"]["ingress"])


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
        {"image": {"pullSecrets": ["one", "two"]}, "models": {"hubTokenSecret": "hub"}},
        {"head": {"nodeSelector": {"a": "b"}, "affinity": {"nodeAffinity": {}}}},
        {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        {"monitoring": {"podMonitor": True}, "tls": {"existingSecret": "tls"}},
    ],
)
def test_what_else_can_be_said_is_valid(values: Manifest):
    for manifest in render_chart(values):
        assert problems(manifest) == []
