"""What Ray's own autoscaler, which reads these manifests in the head's pod, makes of them."""

from typing import Any

import pytest
import yaml
from kubernetes_checks import OVERLAYS, VALUES, Manifest, of_kind, ray_cluster, rendered
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr as derive,
)

from pagefleet.cluster.serve_args import ServeArgs

SERVED = [f"kustomize/{name}" for name in OVERLAYS if not name.endswith("-raycluster")]
SERVED += [f"helm/{name}" for name in VALUES if not name.endswith("raycluster")]


@pytest.fixture(params=SERVED)
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return rendered(request.param)


@pytest.fixture
def node_types(manifests) -> Manifest:
    resource = {"metadata": {"name": "x", "namespace": "y"}, "spec": ray_cluster(manifests)}
    derived: dict[str, Any] = derive(resource)
    return derived["available_node_types"]


@pytest.fixture
def args(manifests) -> ServeArgs:
    (service,) = of_kind(manifests, "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    return ServeArgs.model_validate(config["applications"][0]["args"])


def test_no_replica_and_no_gateway_fits_the_head(node_types):
    resources = node_types["headgroup"]["resources"]
    assert not any(resources.get(name, 0) for name in ("CPU", "GPU", "gateway"))


def test_each_pod_holds_a_replica_and_a_gateway(node_types, args):
    worker = node_types["replicas"]
    assert worker["resources"]["CPU"] >= args.tp * args.num_cpus
    assert worker["resources"].get("GPU", 0) >= args.tp * args.num_gpus
    assert worker["resources"]["gateway"] == 1


def test_there_may_be_a_pod_for_each_replica(manifests, node_types, args):
    worker = node_types["replicas"]
    if ray_cluster(manifests).get("enableInTreeAutoscaling"):
        assert worker["min_workers"] <= args.min_replicas
        assert args.max_replicas <= worker["max_workers"]
    else:  # nobody adds pods
        (group,) = ray_cluster(manifests)["workerGroupSpecs"]
        assert args.max_replicas <= group["replicas"]
