"""The arguments of the Serve application: checked values, documented one by one.

What `serve run pagefleet.cluster.serve_app:app NAME=VALUE…` takes, and `args:` in a Serve config
file. Names and meanings are those of `pagefleet serve` where there is a flag for it. Knows
nothing of Ray.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .config import ClusterConfig, CommandError, name_models, parse_bytes
from .default_model import NAME
from .tls import InnerTlsFiles

LOOPBACK = "127.0.0.1"


class ModelArgs(BaseModel):
    """One model: its checkpoint, its replicas' sizes, and how many of them there may be."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = ""
    """A checkpoint folder that every node sees, or a hub id; empty = the default model."""
    served_model_name: str = ""
    """What clients call it; empty = the folder's name or the id."""
    weights_version: int = Field(0, ge=0)
    """Raise it with each new checkpoint under the same name, also when going back to an old one,
    and above what `pagefleet update-weights` gave: the highest is served, and running streams end
    on the weights they began with."""
    tp: int = Field(1, ge=1)
    """Ranks of one replica, all on one node."""
    num_cpus: float = Field(1.0, gt=0)
    """CPUs that each rank takes of its node."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that each rank takes; 0 = it runs on the CPU."""

    min_replicas: int = Field(1, ge=0)
    """0 = none while nobody asks for anything; the first request starts one and waits for it."""
    initial_replicas: int | None = Field(None, ge=0)
    """None = `min_replicas`."""
    max_replicas: int = Field(1, ge=1)
    upscale_delay_s: float = Field(2.0, ge=0)
    """Blocks have to be missing for so long."""
    downscale_delay_s: float = Field(300.0, ge=0)
    """A replica has to be superfluous for so long."""
    downscale_to_zero_delay_s: float = Field(600.0, ge=0)
    """Nobody may have asked for so long before the last replica goes."""
    startup_s: float = Field(60.0, ge=0)
    """How long a replica takes to start, until one has been measured: what comes back of blocks
    before that needs no new one."""
    max_surge_percent: int = Field(0, ge=0, le=100)
    """Of the replicas, how many may be started beyond their number in a rolling update, before
    old ones go; needs room for them. 0 = an old one goes first, and its requests wait or move."""

    num_blocks: int | None = Field(None, ge=1)
    """KV pool of a replica, in blocks."""
    kv_memory: str | None = None
    """The same in bytes of each rank, like 2GiB."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """The same as a share of the device's memory."""
    block_size: int = Field(16, ge=1)
    host_memory: str = "0"
    """Second tier of each rank, in bytes."""
    max_model_len: int | None = Field(None, ge=2)
    """The longest sequence; None = the model's own."""
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    max_num_waiting: int | None = Field(None, ge=1)
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    admission_rule: str = "known-length"
    watermark: float = Field(0.01, ge=0, lt=1)
    speculative: str = "off"
    num_speculative_tokens: int = Field(5, ge=1)
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    overlap_steps: bool | None = None
    dtype: str = "auto"
    weight_dtype: str = "auto"
    quantized_weights: str = "auto"
    deterministic: bool = False

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.served_model_name or (
            name_models([self.model], ())[0].name if self.model else NAME
        )

    @model_validator(mode="after")
    def _check(self) -> "ModelArgs":
        initial = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} <= initial_replicas {initial} <= "
                f"max_replicas {self.max_replicas} does not hold"
            )
        try:
            self.cluster_config()
        except CommandError as error:
            raise ValueError(str(error)) from error
        return self

    def cluster_config(self) -> ClusterConfig:
        """The same as `pagefleet serve` has it. Raises CommandError."""
        return ClusterConfig(
            models=name_models([self.model], [self.name]),
            tp=self.tp,
            num_blocks=self.num_blocks,
            kv_memory=parse_bytes(self.kv_memory) if self.kv_memory else None,
            memory_fraction=self.gpu_memory_utilization,
            block_size=self.block_size,
            host_memory=parse_bytes(self.host_memory),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            admission_rule=self.admission_rule,
            watermark=self.watermark,
            max_num_waiting=self.max_num_waiting,
            speculative=self.speculative,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            overlap_steps=self.overlap_steps,
            dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            quantized_weights=self.quantized_weights,
            device="cuda" if self.num_gpus else "cpu",
            deterministic=self.deterministic,
            address="auto",
        )


class ServeArgs(ModelArgs):
    """The application: its first model, further ones, and its gateways."""

    more_models: tuple[ModelArgs, ...] = ()
    """Served by the same gateways and the same controller."""
    gateways: int = Field(1, ge=1)
    """On so many nodes there is one, each on the same ports of its node."""
    host: str = LOOPBACK
    """Where the gateways listen; 0.0.0.0 = for everybody who reaches the node."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    http_port: int = Field(8080, ge=0, le=65535)
    """Not 8000, where Serve's own proxy listens."""
    hold_s: float = Field(600.0, ge=0)
    """How long a request waits for a replica while there is none."""
    drain_s: float = Field(30.0, ge=0)
    """How long streams go on at a replica that has to go, before they move to another one with
    the same weights, without a seam."""
    max_stream_s: float = Field(600.0, ge=0)
    """How long they go on where they cannot move: the only replica of its weights, a gateway."""
    max_queue_s: float | None = Field(None, gt=0)
    """Refuse, with a time to come back, what would wait longer for its blocks."""
    api_key_file: str | None = None
    """Hashed API keys, see `pagefleet keys`; also from the gateways' environment."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    inner_tls_cert: str | None = None
    """Of the streams to replicas, made out to the DNS name pagefleet-stream, on every node; with
    its key, and the authority of both ends. Without them the streams are plaintext."""
    inner_tls_key: str | None = None
    inner_tls_ca: str | None = None

    @property
    def inner_tls(self) -> InnerTlsFiles:
        """Files of every node: certificate, key, authority."""
        names = (self.inner_tls_cert, self.inner_tls_key, self.inner_tls_ca)
        certificate, key, authority = (None if name is None else Path(name) for name in names)
        return certificate, key, authority

    @property
    def models(self) -> tuple[ModelArgs, ...]:
        """All of them, the application's own first."""
        return (self, *self.more_models)

    @model_validator(mode="after")
    def _check_application(self) -> "ServeArgs":
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models would have one name: {', '.join(names)}")
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError(f"grpc_port and http_port are both {self.grpc_port}")
        return self
