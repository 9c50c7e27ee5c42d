"""Every manifest, as Kustomize and Helm render it: valid, unknown keys refused, and safe."""

import copy
import re

import pytest
from kubernetes_checks import (
    DEPLOY,
    OVERLAYS,
    VALUES,
    Manifest,
    of_kind,
    pods,
    problems,
    ray_cluster,
    rendered,
)

ALL = [f"kustomize/{name}" for name in OVERLAYS] + [f"helm/{name}" for name in VALUES]
RAY_PORTS = {6379, 8265, 10001, 52365, 8080}
SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|API_KEYS?$")


@pytest.fixture(params=ALL)
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return rendered(request.param)


def test_every_manifest_fits_its_schema(manifests):
    for manifest in manifests:
        assert problems(manifest) == [], (manifest["kind"], manifest["metadata"]["name"])


def test_there_is_one_cluster_and_it_needs_a_token(manifests):
    assert ray_cluster(manifests)["authOptions"]["mode"] == "token"


def test_groups_say_how_far_they_may_go(manifests):
    for group in ray_cluster(manifests)["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_rays_ports_stay_inside(manifests):
    """A rule without a source is for everybody: it may open the gateways' ports only."""
    (policy,) = [
        m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"] == "pagefleet"
    ]
    labels = policy["spec"]["podSelector"]["matchLabels"]
    cluster = ray_cluster(manifests)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert labels.items() <= group["template"]["metadata"]["labels"].items()
    for rule in policy["spec"]["ingress"]:
        if "from" not in rule:
            opened = {port["port"] for port in rule["ports"]}
            assert opened and not opened & RAY_PORTS


def test_no_pod_has_more_rights_than_it_needs(manifests):
    for pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_secrets_are_named_and_never_written_down(manifests):
    assert of_kind(manifests, "Secret") == []
    for pod in pods(manifests):
        for container in pod["containers"]:
            for variable in container.get("env", ()):
                if SECRET_NAME.search(variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"]


def test_every_container_of_ours_is_probed(manifests):
    cluster = ray_cluster(manifests)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_no_worker_is_restarted_because_the_head_is(manifests):
    """A head that restarts takes a minute; streams go on meanwhile."""
    for group in ray_cluster(manifests)["workerGroupSpecs"]:
        probe = group["template"]["spec"]["containers"][0]["livenessProbe"]
        assert probe["exec"]["command"][:2] == ["pagefleet", "probe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


@pytest.mark.parametrize("typo", ["minReplica", "image"])
def test_an_unknown_key_is_refused(typo: str):
    (service,) = of_kind(copy.deepcopy(rendered("kustomize/cpu-demo")), "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group[typo] = "x"
    assert any(typo in problem for problem in problems(service))


def test_a_missing_key_is_found():
    (service,) = of_kind(copy.deepcopy(rendered("kustomize/cpu-demo")), "RayService")
    del service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    assert any("template" in problem for problem in problems(service))


def test_core_kinds_are_strict_too():
    (policy,) = of_kind(copy.deepcopy(rendered("kustomize/cpu-demo")), "NetworkPolicy")
    policy["spec"]["ingres"] = []
    assert problems(policy)


def test_each_raycluster_is_the_one_of_its_service():
    for name in OVERLAYS:
        if name.endswith("-raycluster"):
            alone = rendered(f"kustomize/{name}")
            served = rendered(f"kustomize/{name.removesuffix('-raycluster')}")
            assert of_kind(alone, "RayCluster") and not of_kind(alone, "RayService")
            assert ray_cluster(alone) == ray_cluster(served)


def test_the_head_can_be_lost_where_there_are_many_nodes():
    cluster = ray_cluster(rendered("kustomize/multi-node"))
    options = cluster["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    services = of_kind(rendered("kustomize/multi-node"), "Service")
    assert (host, int(port)) in {
        (s["metadata"]["name"], s["spec"]["ports"][0]["port"]) for s in services
    }
    assert "secretKeyRef" in options["redisPassword"]["valueFrom"]


def test_no_folder_is_left_out():
    kustomizations = {path.parent.name for path in (DEPLOY / "kuberay").rglob("kustomization.yaml")}
    assert set(OVERLAYS) <= kustomizations
