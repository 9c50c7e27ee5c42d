"""What is handed to Serve: deployments and their settings. Nothing is started here."""

from pathlib import Path

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from tiny_model import make_tiny_model

from pagefleet.cluster.serve_app import app
from pagefleet.cluster.serve_args import ModelArgs
from pagefleet.cluster.serve_gateway import gateway_spec
from pagefleet.cluster.serve_replica import replica_spec


def deployments(**args: object):
    """By name, as Serve builds them from the arguments of a config file."""
    application = call_user_app_builder_with_args_if_necessary(app, args)
    built = build_app(application, name="fleet")
    return {deployment.name: deployment for deployment in built.deployments}


def test_gateways_keep_their_number_and_replicas_scale():
    made = deployments(model="org/a", min_replicas=0, max_replicas=4, gateways=2, max_stream_s=90)
    gateway, replica = made["Gateway"], made["Replica"]
    scaling = gateway._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 2)
    assert gateway._replica_config.max_replicas_per_node == 1
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.metrics_interval_s) == (0, 4, 1.0)
    assert scaling.policy.policy_kwargs == {"model": "org/a"}
    assert replica._deployment_config.graceful_shutdown_timeout_s >= 90


def test_each_rank_has_a_bundle_and_the_replica_itself_takes_nothing():
    replica = deployments(model="org/a", tp=2, num_gpus=1, num_cpus=3)["Replica"]
    assert replica._replica_config.placement_group_bundles == [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert replica._replica_config.placement_group_strategy == "STRICT_PACK"
    assert replica.ray_actor_options["num_cpus"] == 0


def test_each_model_has_a_deployment_of_its_own():
    made = deployments(model="org/a", more_models=[{"model": "org/b", "max_replicas": 3}])
    assert set(made) == {"Gateway", "Replica", "Replica-org-b"}
    scaling = made["Replica-org-b"]._deployment_config.autoscaling_config
    assert scaling.policy.policy_kwargs == {"model": "org/b"}


def test_only_models_without_a_least_number_are_on_demand():
    from pagefleet.cluster.serve_args import ServeArgs

    more = [{"model": "org/b", "min_replicas": 0}]
    args = ServeArgs.model_validate({"model": "org/a", "more_models": more, "hold_s": 5})
    assert gateway_spec(args).on_demand.models == ("org/b",)
    assert gateway_spec(args).on_demand.hold_s == 5


def test_a_replica_has_a_new_id_and_the_weights_of_its_deployment(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "tiny")
    spec = replica_spec(ModelArgs(model=str(folder), weights_version=3, tp=2), "x7")
    assert (spec.replica_id, spec.model, spec.num_ranks) == ("tiny-x7", "tiny", 2)
    assert (spec.config.model, spec.config.weights_version) == (str(folder), 3)


def test_what_is_no_checkpoint_is_told_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(Exception, match=r"no config\.json"):
        replica_spec(ModelArgs(model=str(tmp_path)), "x7")
