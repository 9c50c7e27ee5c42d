"""Starting a whole cluster and ending it: controller, replicas, gateway, in this order.

Knows the parts, what they need of each other, and how long each may take. Knows nothing of
requests. What is started here ends here, whatever happened in between.
"""

# Ray is not wholly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ..protos.messages import ClusterState, ReplicaInfo, ReplicaState
from ..scheduler.config import AdmissionRule, PreemptionMode
from ..workers.config import WorkerConfig
from ..workers.stream_tls import StreamTls
from .config import ClusterConfig, CommandError
from .controller import ControllerConfig
from .controller_actor import start_controller
from .gateway_addresses import GatewayAddresses
from .gateway_spec import GatewaySpec
from .prefix_transfer import TransferConfig
from .ray_runtime import ray_session
from .replica import ReplicaSpec
from .supervisor_actor import create_supervisor

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_TIMEOUT_S = 20.0
_OPEN_TIMEOUT_S = 60.0
_READY_TIMEOUT_S = 60.0  # from loaded replicas to the controller's "ready": one report
_STOP_TIMEOUT_S = 15.0  # for each part; all of them together stay within a minute
_GATEWAY_GRACE_S = 10.0
_POLL_S = 0.1
_CPU_SHARE = 0.5  # of the free memory, for the KV pools of all replicas on this machine

OnProgress = Callable[[str], None]
Actor = ActorHandle[object]


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that answers."""

    controller: Actor
    supervisor: Actor
    specs: tuple[ReplicaSpec, ...]
    replicas: tuple[ReplicaInfo, ...]
    addresses: GatewayAddresses

    def state(self) -> ClusterState:
        """Every replica's blocks, as the controller sees them now."""
        return _get(self.controller.cluster_state.remote(), ClusterState)

    @property
    def gateway(self) -> Actor:
        """The gateway's actor of now: if one is lost, another takes its ports."""
        deadline = time.monotonic() + _OPEN_TIMEOUT_S
        while time.monotonic() < deadline:
            reply = ray.get(self.supervisor.gateway.remote(), timeout=_CALL_TIMEOUT_S)
            gateway = cast("Actor | None", reply)
            if gateway is not None:
                return gateway
            time.sleep(_POLL_S)
        raise CommandError(f"there was no gateway for {_OPEN_TIMEOUT_S:g} s")

    def check(self) -> None:
        """Raise CommandError if the supervisor, which nothing else restarts, has died."""
        try:
            ray.get(self.supervisor.__ray_ready__.remote(), timeout=_CALL_TIMEOUT_S)
        except RayActorError as error:
            raise CommandError(f"the supervisor has died: {error}") from error
        except GetTimeoutError:
            logger.warning("the supervisor did not answer within %g s", _CALL_TIMEOUT_S)


@contextmanager
def running_cluster(config: ClusterConfig, on_progress: OnProgress) -> Generator[RunningCluster]:
    """Ray and a ready cluster on it, until the block ends.

    A start that fails raises CommandError, and what had been started is gone by then.
    """
    on_progress("starting Ray" if config.address is None else f"joining Ray at {config.address}")
    if config.address is None:
        check_ports(config)
    num_cpus = max(os.cpu_count() or 1, config.num_replicas * config.tp)
    with ray_session(config.address, num_cpus), started_cluster(config, on_progress) as cluster:
        yield cluster


def check_ports(config: ClusterConfig) -> None:
    """Refuse what the gateway could not listen on before any time goes into loading models.

    Only of use on this machine: on a cluster that runs already the gateway may be elsewhere.
    """
    for flag, port in (("--grpc-port", config.grpc_port), ("--http-port", config.http_port)):
        if not port:
            continue  # the system chooses a free one
        try:
            family = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((config.host, port), family=family).close()
        except OSError as error:
            raise CommandError(
                f"{flag} {port}: cannot listen on {config.host}: {error.strerror or error}"
            ) from error


@contextmanager
def started_cluster(config: ClusterConfig, on_progress: OnProgress) -> Generator[RunningCluster]:
    """A ready cluster in the Ray session that this process already has."""
    with ExitStack() as started:
        started.callback(on_progress, "stopped")
        cluster = _start(config, on_progress, started)
        started.callback(on_progress, "stopping")
        yield cluster


def _start(config: ClusterConfig, on_progress: OnProgress, started: ExitStack) -> RunningCluster:
    controller = cast(Actor, start_controller(_controller_config(config)))
    started.callback(ray.kill, controller)
    security = None if config.security is None else config.security.with_streams()
    specs = _replica_specs(config, None if security is None else security.streams)
    word = "replica" if config.replicas == 1 else "replicas"
    names = ", ".join(model.name for model in config.models)
    on_progress(f"loading {names} into {config.replicas} {word}")
    gateway = GatewaySpec(config.host, config.grpc_port, config.http_port, security)
    supervisor = create_supervisor(specs, controller, gateway)
    started.callback(ray.kill, supervisor)
    started.callback(_stop, "supervisor", lambda: supervisor.stop.remote())
    started.callback(_stop, "gateway", lambda: supervisor.close_gateway.remote(_GATEWAY_GRACE_S))
    opening = supervisor.open_gateway.remote()  # its process begins while the replicas load
    replicas = _start_replicas(supervisor)
    on_progress("opening the gateway")
    addresses = _await_gateway(opening)
    cluster = RunningCluster(controller, supervisor, specs, replicas, addresses)
    on_progress("waiting for the first reports")
    _wait_ready(cluster, config.num_replicas)
    return cluster


def _replica_specs(config: ClusterConfig, stream_tls: StreamTls | None) -> tuple[ReplicaSpec, ...]:
    num_gpus = _gpus_per_rank(config)
    # Replicas of one machine share its cores; a GPU's host work keeps one core busy.
    cores = (os.cpu_count() or 1) // (config.num_replicas * config.tp)
    num_cpus = 1 if num_gpus or config.address is not None else max(1, cores)
    worker = worker_config(config, num_cpus, on_gpu=num_gpus > 0)
    worker = replace(worker, stream_tls=stream_tls)
    models = [model for model in config.models for _ in range(config.replicas)]
    return tuple(
        ReplicaSpec(
            f"replica-{number}",
            model.name,
            replace(worker, model=model.checkpoint),
            num_cpus,
            num_gpus,
            num_ranks=config.tp,
        )
        for number, model in enumerate(models)
    )


def _gpus_per_rank(config: ClusterConfig) -> int:
    """1 where GPUs are wanted and Ray has enough, 0 on the CPU."""
    if config.device == "cpu":
        return 0
    have = int(cast("dict[str, float]", ray.cluster_resources()).get("GPU", 0))
    need = config.num_replicas * config.tp
    if config.device == "cuda" and have < need:
        raise CommandError(f"--device cuda: {need} GPUs are needed, Ray has {have}")
    return 1 if have >= need else 0


def worker_config(config: ClusterConfig, num_threads: int, *, on_gpu: bool) -> WorkerConfig:
    fraction = config.memory_fraction
    is_sized = config.num_blocks is not None or config.kv_memory is not None
    if fraction is None and not is_sized and not on_gpu and config.address is None:
        fraction = _CPU_SHARE / max(2, config.num_replicas)
    return WorkerConfig(
        model=config.models[0].checkpoint,
        device="cuda" if on_gpu else "cpu",
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        quantized_weights=config.quantized_weights,
        kv_dtype=config.kv_dtype,
        enforce_eager=config.enforce_eager,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        memory_fraction=fraction,
        host_memory=config.host_memory,
        max_context=config.max_model_len,
        max_num_sequences=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_mode=PreemptionMode(config.preemption_mode),
        admission_rule=AdmissionRule(config.admission_rule),
        watermark=config.watermark,
        max_num_waiting=config.max_num_waiting,
        speculative=config.speculative,
        num_speculative_tokens=config.num_speculative_tokens,
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
        overlap_steps=config.overlap_steps,
        deterministic=config.deterministic,
        faults=config.faults,
        num_threads=num_threads,
    )


def _controller_config(config: ClusterConfig) -> ControllerConfig:
    settings = ControllerConfig()
    transfer = TransferConfig(enabled=config.prefix_transfer)
    return replace(
        settings,
        admission=replace(settings.admission, max_queue_s=config.max_queue_s),
        late_binding=replace(settings.late_binding, transfer=transfer),
    )


def _start_replicas(supervisor: Actor) -> tuple[ReplicaInfo, ...]:
    """Every replica, loaded; how long that takes depends on the model, so there is no limit."""
    try:
        return cast("tuple[ReplicaInfo, ...]", ray.get(supervisor.start.remote()))
    except RayTaskError as error:
        raise CommandError(f"a replica could not be started: {error.cause}") from error
    except RayError as error:
        raise CommandError(f"the replicas could not be started: {error}") from error


def _await_gateway(opening: "ray.ObjectRef[object]") -> GatewayAddresses:
    try:
        return cast(GatewayAddresses, ray.get(opening, timeout=_OPEN_TIMEOUT_S))
    except RayTaskError as error:
        raise CommandError(f"the gateway could not listen: {error.cause}") from error
    except RayError as error:
        raise CommandError(f"the gateway could not be started: {error}") from error


def _wait_ready(cluster: RunningCluster, num_replicas: int) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        states = [replica.state for replica in cluster.state().replicas]
        if states.count(ReplicaState.READY) >= num_replicas:
            return
        time.sleep(_POLL_S)
    raise CommandError(f"the replicas did not report within {_READY_TIMEOUT_S:g} s")


def _stop(name: str, stop: Callable[[], "ray.ObjectRef[object]"]) -> None:
    """Ask a part to end; the supervisor's end is the end of all that it started."""
    try:
        ray.get(stop(), timeout=_STOP_TIMEOUT_S)
    except RayError as error:  # GetTimeoutError is one
        logger.warning("the %s did not stop by itself: %s", name, type(error).__name__)


def _get(reference: object, kind: type[T]) -> T:
    value = ray.get(cast("ray.ObjectRef[object]", reference), timeout=_CALL_TIMEOUT_S)
    assert isinstance(value, kind), f"{value!r} is no {kind.__name__}"
    return value
