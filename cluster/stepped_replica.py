"""A replica without a model, for the simulator: the real scheduler, step by step, on stated costs.

The `steps` model: a step takes a constant (reading the weights) plus a time per token computed in
it, prefill and decode together, with chunked prefill, preemption and publication as the scheduler
decides. Tokens are made up. Time comes in; nothing here waits.
"""

from dataclasses import dataclass, field

import numpy as np

from ..protos.messages import (
    AdmissionClass,
    EngineRequest,
    FinishReason,
    ReplicaInfo,
    ReplicaReport,
    SampleStart,
    SamplingParams,
)
from ..scheduler.config import PreemptionMode, SchedulerConfig
from ..scheduler.lease_ledger import LeaseRefused
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput
from ..scheduler.scheduler import Scheduler
from .replay_replica import Happening, ReplayCost, SimulatedRequest

_MAX_BATCHED_TOKENS = 2048


@dataclass(slots=True)
class _StepInFlight:
    output: SchedulerOutput
    end: float


@dataclass(slots=True)
class SteppedReplica:
    """One replica's life. Of `cost`: a step takes `token_s` plus its tokens over the rate."""

    info: ReplicaInfo
    cost: ReplayCost
    computed_tokens: int = 0
    preemptions: int = 0
    _steps_done: int = 0
    _sequence_number: int = 0
    _step: _StepInFlight | None = None
    _requests: dict[str, SimulatedRequest] = field(default_factory=dict[str, SimulatedRequest])
    _scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            num_blocks=self.info.num_blocks,
            block_size=self.info.identity.block_size,
            max_num_sequences=self.info.max_num_sequences,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_context=self.info.max_context,
            preemption_mode=PreemptionMode.RECOMPUTE,
        )
        self._scheduler = Scheduler(config, self.info.identity)

    def submit(self, request: SimulatedRequest, now: float) -> bool:
        """A request arrives with its lease; False if the leader refuses the lease."""
        lease = request.lease
        assert lease is not None, f"{request.key} came without a lease"
        is_leased = lease.num_blocks > 0
        message = EngineRequest(
            request_key=request.key,
            prompt_token_ids=tuple(request.trace.prompt().tolist()),
            sampling=SamplingParams(
                max_tokens=request.trace.num_output_tokens,
                temperature=0.0,
                seed=0,
                ignore_eos=True,
            ),
            samples=(SampleStart(0),),
            lease_id=lease.lease_id,
            lease_blocks=lease.num_blocks,
            admission_class=(
                request.trace.admission_class if is_leased else AdmissionClass.BEST_EFFORT
            ),
        )
        try:
            self._scheduler.add_request(message, now)
        except LeaseRefused:
            return False
        self._requests[request.key] = request
        request.replica_id = self.info.replica_id
        return True

    def advance(self, now: float) -> tuple[list[Happening], list[SimulatedRequest]]:
        """End the step that is due and begin the next."""
        step = self._step
        if step is not None and step.end > now:
            return [], []
        if step is not None:
            self._end_step(step.output, now)
        finished = self._take_deltas(now)
        output = self._scheduler.schedule(now)
        if output is None:
            self._step = None
            return [], finished + self._take_deltas(now)
        seconds = self.cost.token_s + output.num_tokens / self.cost.prefill_tokens_per_s
        self._step = _StepInFlight(output, now + seconds)
        self.computed_tokens += output.num_tokens
        return [Happening(now + seconds)], finished

    def unfinished(self) -> list[SimulatedRequest]:
        """The requests that a crash would lose."""
        return list(self._requests.values())

    def report(self, now: float, *, snapshot: bool = False) -> ReplicaReport:
        """The next report of this incarnation."""
        scheduler = self._scheduler
        self._sequence_number += 1
        events = scheduler.take_route_events()
        if snapshot:
            events = scheduler.route_snapshot()[0]
        stats = scheduler.stats()
        self.preemptions = stats.preemptions
        return ReplicaReport(
            replica_id=self.info.replica_id,
            incarnation=self.info.incarnation,
            epoch=stats.epoch,
            sequence_number=self._sequence_number,
            steps_done=self._steps_done,
            device=stats.device,
            host=stats.host,
            leases=stats.leases,
            finished_leases=scheduler.take_finished_leases(),
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            waiting_prefill_tokens=stats.waiting_prefill_tokens,
            prefill_tokens_per_s=self.cost.prefill_tokens_per_s,
            decode_step_s=self.cost.token_s,
            copy_bytes_per_s=0.0,
            preemptions=stats.preemptions,
            events=events,
            digest_device=stats.route_digests[0],
            digest_host=stats.route_digests[1],
            is_snapshot=snapshot,
            hit_tokens=stats.hit_tokens,
            query_tokens=stats.query_tokens,
        )

    def check_integrity(self) -> None:
        """Every part of the scheduler agrees."""
        self._scheduler.check_integrity()

    def _end_step(self, output: SchedulerOutput, now: float) -> None:
        tokens = np.zeros(len(output.sample_rows), dtype=np.int32)
        result = ModelRunnerOutput(step=output.step, token_ids=tokens)
        self._scheduler.update(output, result, now)
        self._steps_done += 1

    def _take_deltas(self, now: float) -> list[SimulatedRequest]:
        finished: list[SimulatedRequest] = []
        for delta in self._scheduler.take_deltas():
            request = self._requests[delta.request_key]
            if delta.token_ids and request.first_token_s is None:
                request.first_token_s = now
            if delta.finish_reason is None:
                continue
            assert delta.finish_reason is FinishReason.LENGTH, f"{request.key}: {delta}"
            if delta.usage is not None:
                request.hit_tokens = delta.usage.cached_tokens
                request.num_preemptions = delta.usage.preemptions
            request.finished_s = now
            finished.append(request)
            del self._requests[delta.request_key]
        return finished
