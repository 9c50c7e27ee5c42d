"""A model in memory and the engine that will run it. Knows no gateway, no network."""
# pyright: reportPrivateImportUsage=false

import logging
from dataclasses import dataclass, replace

from torch.distributed import TCPStore

from ..kernels.cpu_library import end_team
from ..protos.messages import CacheIdentity, ModelCard
from ..scheduler.scheduler import Scheduler
from .config import WorkerConfig
from .engine import Engine
from .executor import make_executor
from .heap import give_back_freed
from .model_runner import MeasuredSpeed, ModelRunner
from .rank_spec import RankSpec
from .step_times import StepTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model in memory, measured, and the engine that will run it."""

    engine: Engine
    runner: ModelRunner
    identity: CacheIdentity
    speed: MeasuredSpeed


def load_engine(
    config: WorkerConfig, spec: RankSpec | None = None, store: TCPStore | None = None
) -> LoadedEngine:
    """Load the model and build an engine that has not started.

    spec, store: where this is the leader of several ranks, what `open_group` gave it.
    """
    runner = ModelRunner.load(config, spec, store)
    executor = make_executor(runner)
    logger.info("memory: %s", runner.partition.text)
    speed = runner.measure(execute=executor.execute)
    give_back_freed()  # the largest step so far, and what imports left
    end_team()  # the engine's thread will have its own
    model = runner.model_info
    identity = CacheIdentity(
        model_fingerprint=model.fingerprint,
        weights_version=config.weights_version,
        kv_dtype=model.kv_dtype,
        block_size=config.block_size,
    )
    settings = replace(
        config.scheduler_config(runner.num_blocks, runner.num_host_blocks, model.max_context),
        block_bytes=runner.storage.layout.num_bytes,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
    )
    scheduler = Scheduler(settings, identity, model.eos_token_ids)
    step_times = StepTimes(speed.decode_step_s)
    overlap = runner.device.type != "cpu" if config.overlap_steps is None else config.overlap_steps
    engine = Engine(scheduler, executor, overlap=overlap, step_times=step_times)
    return LoadedEngine(engine, runner, identity, speed)


def model_card(name: str, loaded: LoadedEngine) -> ModelCard:
    """What a gateway must know of the model, which clients know by `name`."""
    model = loaded.runner.model_info
    return ModelCard(
        model=name,
        tokenizer_dir=model.tokenizer_dir,
        identity=loaded.identity,
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
    )
