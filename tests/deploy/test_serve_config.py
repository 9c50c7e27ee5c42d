"""Each serveConfigV2: Ray's schema, unknown keys refused, our arguments, and what it names."""

import json
import shlex
from importlib import import_module
from typing import Any, get_args

import pytest
import yaml
from kubernetes_checks import OVERLAYS, VALUES, Manifest, of_kind, ray_cluster, rendered
from pydantic import BaseModel
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from pagefleet.cluster import serve_app
from pagefleet.cluster.serve_args import ServeArgs
from pagefleet.cluster.serve_replica import STOP_MARGIN_S

SERVED = [f"kustomize/{name}" for name in OVERLAYS if not name.endswith("-raycluster")]
SERVED += [f"helm/{name}" for name in VALUES if not name.endswith("raycluster")]
OPERATORS_PREFIX = "serve"  # of the ports that the operator gives the service


@pytest.fixture(params=SERVED)
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return rendered(request.param)


@pytest.fixture
def service(manifests: tuple[Manifest, ...]) -> Manifest:
    (service,) = of_kind(manifests, "RayService")
    return service["spec"]


@pytest.fixture
def config(service: Manifest) -> Manifest:
    return yaml.safe_load(service["serveConfigV2"])


@pytest.fixture
def args(config: Manifest) -> ServeArgs:
    (application,) = config["applications"]
    return ServeArgs.model_validate(application["args"])


def unknown_keys(config: Any, kind: Any, path: str = "") -> list[str]:
    """Keys that Ray's schema passes over in silence."""
    if isinstance(config, list):
        inner = next(iter(get_args(kind)), None)
        return [key for part in config for key in unknown_keys(part, inner, path)]
    models = [
        k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)
    ]
    if not models or not isinstance(config, dict):
        return []
    fields = models[0].model_fields
    found = [f"{path}{key}" for key in config if key not in fields]
    for key in config.keys() & fields.keys():
        found += unknown_keys(config[key], fields[key].annotation, f"{path}{key}.")
    return found


def test_ray_takes_it(config):
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(config, ServeDeploySchema) == []


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"aplications": []}, ["aplications"]),
        ({"applications": [{"nam": "x"}]}, ["applications.nam"]),
        (
            {"applications": [{"deployments": [{"nmae": "x"}]}]},
            ["applications.deployments.nmae"],
        ),
        ({"http_options": {"prt": 1}}, ["http_options.prt"]),
    ],
)
def test_an_unknown_key_is_found(wrong: Manifest, found: list[str]):
    assert unknown_keys(wrong, ServeDeploySchema) == found


def test_what_it_names_can_be_built(config, args):
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert isinstance(getattr(import_module(module), name)(args), Application)


def test_gateways_are_where_the_service_sends_clients(manifests, config):
    """It sends nobody to the head."""
    cluster = ray_cluster(manifests)
    (deployment,) = config["applications"][0]["deployments"]
    assert deployment["name"] == serve_app.GATEWAY
    needed = deployment["ray_actor_options"]["resources"].keys()
    assert "resources" not in cluster["headGroupSpec"]["rayStartParams"]
    for group in cluster["workerGroupSpecs"]:
        (flag,) = shlex.split(group["rayStartParams"]["resources"])
        assert needed <= json.loads(flag).keys()


def test_the_service_carries_both_ports(manifests, service, args):
    """The operator takes the head's container ports, and only those of the right name."""
    head = ray_cluster(manifests)["headGroupSpec"]["template"]["spec"]["containers"][0]
    taken = {
        port["name"]: port["containerPort"]
        for port in head["ports"]
        if port["name"].split("-")[0] == OPERATORS_PREFIX
    }
    told = {port["name"]: port["port"] for port in service["serveService"]["spec"]["ports"]}
    assert taken == told == {"serve": args.http_port, "serve-grpc": args.grpc_port}
    assert args.host == "0.0.0.0"


def test_probes_and_monitors_know_the_ports(manifests, args):
    for group in ray_cluster(manifests)["workerGroupSpecs"]:
        ports = group["template"]["spec"]["containers"][0]["ports"]
        by_name = {port["name"]: port["containerPort"] for port in ports}
        assert (by_name["serve"], by_name["serve-grpc"]) == (args.http_port, args.grpc_port)


def test_no_upgrade_cuts_a_stream(manifests, service, args):
    longest_s = max(args.max_stream_s, args.drain_s) + STOP_MARGIN_S  # as Serve is told
    assert service["rayClusterDeletionDelaySeconds"] >= longest_s
    assert service["excludeHeadPodFromServeSvc"] is True
    for group in ray_cluster(manifests)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > longest_s
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert longest_s <= float(command[-1]) < pod["terminationGracePeriodSeconds"]


def test_a_replica_fits_a_pod_and_all_of_them_fit_the_groups(manifests, args):
    (group,) = ray_cluster(manifests)["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    num_gpus = int(resources["limits"].get("nvidia.com/gpu", 0))
    for model in args.models:
        assert model.tp * model.num_cpus <= float(resources["requests"]["cpu"])
        assert model.tp * model.num_gpus <= num_gpus
        assert model.max_replicas <= group["maxReplicas"]
    assert args.gateways <= group["minReplicas"]


def test_whoever_has_gpus_has_keys(args):
    assert args.num_gpus == 0 or args.api_key_file is not None
