"""The Ray Serve application: gateways, and for each model an autoscaling deployment of replicas.

    serve run pagefleet.cluster.serve_app:app model=org/name max_replicas=4
    serve deploy config.yaml          import_path: pagefleet.cluster.serve_app:app, args: {…}

    Gateway (one a node) ── demand for blocks ──► Serve's controller ──► Replica, Replica-…
         └────── gRPC: tokens ──────► leaders of replicas        both beside one controller actor

Knows which deployments there are and with which of Serve's settings. `serve_args` says what may
be set; the parts are `serve_gateway`, `serve_replica`, `serve_policy`, `serve_controller`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import re
import warnings
from typing import cast

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from .serve_args import ModelArgs, ServeArgs
from .serve_gateway import ServeGateway
from .serve_policy import BlockDeficitPolicy, watch_gateways
from .serve_replica import STOP_MARGIN_S, ServeReplica

GATEWAY, REPLICA = "Gateway", "Replica"
_WAIT_LOOP_S = 0.1  # Serve waits so long at first, though nothing runs through it
_METRICS_S = 1.0
_GATEWAY_STOP_S = 30.0


def app(args: ServeArgs) -> Application:
    """What Serve runs. Each argument is explained in `ServeArgs`."""
    names = [REPLICA, *(f"{REPLICA}-{_plain(model.name)}" for model in args.more_models)]
    replicas = [_replica(name, model, args) for name, model in zip(names, args.models, strict=True)]
    return _gateway(args).bind(args, replicas)


def _replica(name: str, model: ModelArgs, args: ServeArgs) -> Application:
    bundle = {"CPU": model.num_cpus} | ({"GPU": model.num_gpus} if model.num_gpus else {})
    deployment = _deployment(ServeReplica).options(
        name=name,
        ray_actor_options={"num_cpus": 0},  # its ranks have the resources
        placement_group_bundles=[bundle] * model.tp,
        placement_group_strategy="STRICT_PACK",
        autoscaling_config=_autoscaling(
            model.min_replicas,
            model.max_replicas,
            AutoscalingPolicy(
                policy_function=BlockDeficitPolicy, policy_kwargs={"model": model.name}
            ),
            initial_replicas=model.initial_replicas,
            upscale_delay_s=model.upscale_delay_s,
            downscale_delay_s=model.downscale_delay_s,
            downscale_to_zero_delay_s=model.downscale_to_zero_delay_s,
        ),
        max_surge_percent=model.max_surge_percent,
        graceful_shutdown_wait_loop_s=_WAIT_LOOP_S,
        graceful_shutdown_timeout_s=max(args.max_stream_s, args.drain_s) + STOP_MARGIN_S,
    )
    return deployment.bind(model, args)


def _gateway(args: ServeArgs) -> serve.Deployment:
    return _deployment(ServeGateway).options(
        name=GATEWAY,
        ray_actor_options={"num_cpus": 0},
        max_replicas_per_node=1,
        autoscaling_config=_autoscaling(
            args.gateways, args.gateways, AutoscalingPolicy(policy_function=watch_gateways)
        ),
        graceful_shutdown_wait_loop_s=_WAIT_LOOP_S,
        graceful_shutdown_timeout_s=_GATEWAY_STOP_S,
    )


def _deployment(kind: type) -> serve.Deployment:
    return cast(serve.Deployment, serve.deployment(kind))


def _plain(name: str) -> str:
    """A model's name as part of a deployment's."""
    return re.sub(r"[^\w.-]", "-", name)


def _autoscaling(
    least: int,
    most: int,
    policy: AutoscalingPolicy,
    *,
    initial_replicas: int | None = None,
    upscale_delay_s: float = 0.0,
    downscale_delay_s: float = 0.0,
    downscale_to_zero_delay_s: float = 0.0,
) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # The variable that is to replace it holds for everything that runs on a node.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            initial_replicas=initial_replicas,
            metrics_interval_s=_METRICS_S,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            downscale_to_zero_delay_s=downscale_to_zero_delay_s,
            policy=policy,
        )
