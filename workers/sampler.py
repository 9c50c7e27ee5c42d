"""From a step's logits to its tokens and log-probabilities, for rows of the input batch.

Knows rows and their parameters; the arithmetic is `kernels.sampling`. A row whose logits are
not finite fails alone.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..kernels import sampling as kernels
from ..protos.messages import TokenLogprobs
from ..scheduler.output import BeamCandidates, Int32Array
from .drafts import DraftSamples
from .grammar import GrammarError, GrammarTokenizer
from .input_batch import InputBatch, Int64Array
from .upload import Download, to_host, upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Samples:
    """token_ids: int32 [n]; logprobs by entry, of entries that asked; failed: entries whose
    logits were not finite (their token is 0); candidates by entry, of beams."""

    token_ids: Int32Array
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    failed: tuple[int, ...] = ()
    candidates: dict[int, BeamCandidates] = field(default_factory=dict[int, BeamCandidates])


class Sampler:
    """Chooses one token per entry.

    Log-probabilities are the model's own: of the logits before penalties, bias, temperature and
    filters. A beam's candidates have their log-probabilities changed by penalties and bias.
    grammar_tokenizer: needed by rows with a grammar. filtered: the kernel backend's
    `filtered_weights`.
    """

    def __init__(
        self,
        batch: InputBatch,
        grammar_tokenizer: GrammarTokenizer | None = None,
        filtered: kernels.Filter = kernels.filtered_weights,
    ) -> None:
        self._batch = batch
        self._grammar_tokenizer = grammar_tokenizer
        self._filtered = filtered

    def sample(
        self, logits: Tensor, rows: Int32Array, drafts: DraftSamples | None = None
    ) -> Samples:
        """`launch`, and its result."""
        return self.launch(logits, rows, drafts).result()

    def launch(
        self, logits: Tensor, rows: Int32Array, drafts: DraftSamples | None = None
    ) -> "SamplesInFlight":
        """Ask for everything on the device; waits for nothing where no row has a grammar.

        logits: float32 [n, vocab], may be overwritten; rows: int32 [n], whose parameters, tokens
        and seed choose; drafts: which of them lie behind a row's guesses.
        """
        params = self._batch.sampling
        lengths = self._batch.num_tokens[rows]
        if drafts is not None:
            lengths += drafts.offsets
        is_special = bool(params.is_special[rows].any())
        raw = logits.clone() if is_special and self._wants_logprobs(rows) else logits
        if is_special:
            self._normalise_beams(logits, rows)
            self._adjust(logits, rows, lengths)
        token_ids, finite = self._choose(logits, rows, lengths)
        logprobs = self._logprobs(raw, rows, token_ids) if is_special else None
        candidates = self._candidates(logits, rows) if is_special else {}
        return SamplesInFlight(token_ids, finite, drafts, logprobs, candidates)

    def _choose(
        self, logits: Tensor, rows: Int32Array, lengths: Int64Array
    ) -> tuple[Tensor, Tensor]:
        """A token for each row, 0 where its logits were not finite; and whether they were."""
        best, finite = kernels.greedy(logits)
        is_random = self._batch.sampling.is_random[rows]
        # A GPU is not waited for to know; what is drawn there from anything is masked.
        all_finite = not best.is_cuda and bool(finite.numpy().all())
        if not (best.is_cuda or all_finite):
            is_random &= finite.numpy()
        drawn = is_random.nonzero()[0]
        if len(drawn) == len(rows):
            best = self._draw(logits, rows, lengths, drawn)
        elif len(drawn) > 0:
            best[upload(drawn, logits.device)] = self._draw(logits, rows, lengths, drawn)
        return best if all_finite else best.masked_fill(~finite, 0), finite

    def _wants_logprobs(self, rows: Int32Array) -> bool:
        wanted = self._batch.sampling.num_logprobs
        return bool(wanted) and any(row in wanted for row in rows.tolist())

    def _normalise_beams(self, logits: Tensor, rows: Int32Array) -> None:
        """Beams compare log-probabilities over several steps: penalties change those, in place."""
        beams = self._batch.sampling.num_candidates
        if beams:
            for entry in [entry for entry, row in enumerate(rows.tolist()) if row in beams]:
                logits[entry] = logits[entry].log_softmax(dim=-1)

    def _adjust(self, logits: Tensor, rows: Int32Array, lengths: Int64Array) -> None:
        """Penalties, bias, and no end before min_tokens, in place. lengths: tokens before each."""
        params = self._batch.sampling
        penalised = np.flatnonzero(params.is_penalised[rows])
        if len(penalised) > 0:
            self._penalise(logits, rows, lengths, penalised)
        num_outputs = lengths - self._batch.num_prompt_tokens[rows]
        for entry, (row, num_output) in enumerate(
            zip(rows.tolist(), num_outputs.tolist(), strict=True)
        ):
            if row in params.logit_bias:
                token_ids, values = (torch.from_numpy(a) for a in params.logit_bias[row])
                entries = torch.full_like(token_ids, entry).to(logits.device)
                kernels.add_bias(
                    logits, entries, token_ids.to(logits.device), values.to(logits.device)
                )
            if row in params.forbidden_ids and num_output < params.min_tokens[row]:
                forbidden = torch.from_numpy(params.forbidden_ids[row]).to(logits.device)
                kernels.forbid(logits, torch.full_like(forbidden, entry), forbidden)
            if row in params.grammars:
                self._constrain(logits[entry], row)

    def _constrain(self, logits: Tensor, row: int) -> None:
        """Only what the row's grammar allows, in place. A row that cannot go on fails alone."""
        assert self._grammar_tokenizer is not None, f"row {row} has a grammar"
        batch = self._batch
        output = batch.tokens[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
        try:
            state = batch.sampling.grammars[row]
            allowed = torch.from_numpy(state.allowed(self._grammar_tokenizer, output))
        except GrammarError as error:
            logger.warning("a row left its grammar: %s", error)
            logits.fill_(float("nan"))
            return
        allowed = allowed.to(logits.device)
        if not bool(logits[allowed].isfinite().any()):
            # the grammar's end before min_tokens: the grammar wins
            logits.masked_fill_(allowed, 0.0)
        logits.masked_fill_(~allowed, float("-inf"))

    def _penalise(
        self, logits: Tensor, rows: Int32Array, lengths: Int64Array, entries: Int64Array
    ) -> None:
        batch, params, device = self._batch, self._batch.sampling, logits.device
        chosen = rows[entries]
        lens = lengths[entries]
        tokens = batch.tokens[chosen, : int(lens.max())].astype(np.int64)
        index = torch.from_numpy(entries).to(device)
        part = logits if len(entries) == len(logits) else logits[index]
        kernels.apply_penalties(
            part,
            kernels.PenaltyParams(
                token_ids=torch.from_numpy(tokens).to(device),
                prompt_lens=torch.from_numpy(batch.num_prompt_tokens[chosen]).to(device),
                lens=torch.from_numpy(lens).to(device),
                repetition=torch.from_numpy(params.repetition[chosen]).to(device),
                presence=torch.from_numpy(params.presence[chosen]).to(device),
                frequency=torch.from_numpy(params.frequency[chosen]).to(device),
            ),
        )
        if part is not logits:
            logits[index] = part

    def _draw(
        self, logits: Tensor, rows: Int32Array, lengths: Int64Array, entries: Int64Array
    ) -> Tensor:
        """One id for each of the entries: int64, on the device."""
        params, device = self._batch.sampling, logits.device
        chosen = rows[entries]
        uniforms = kernels.uniforms(
            params.seed[chosen], params.sample_index[chosen], lengths[entries]
        )
        top_k, top_p, min_p = (p[chosen] for p in (params.top_k, params.top_p, params.min_p))
        return kernels.sample(
            logits if len(entries) == len(logits) else logits[upload(entries, device)],
            kernels.DrawParams(
                temperature=upload(params.temperature[chosen], device),
                top_k=upload(top_k, device),
                top_p=upload(top_p, device),
                min_p=upload(min_p, device),
                uniforms=upload(uniforms, device),
                limits=kernels.Limits(
                    bool((top_k > 0).any()), bool((top_p < 1.0).any()), bool((min_p > 0).any())
                ),
            ),
            self._filtered,
        )

    def _logprobs(
        self, logits: Tensor, rows: Int32Array, token_ids: Tensor
    ) -> "LogprobsInFlight | None":
        wanted = self._batch.sampling.num_logprobs
        entries = [entry for entry, row in enumerate(rows.tolist()) if row in wanted]
        if not entries:
            return None
        counts = [wanted[int(rows[entry])] for entry in entries]
        index = upload(np.array(entries, dtype=np.int64), logits.device)
        chosen = token_ids[index]
        found = kernels.logprobs(logits[index], chosen, max(counts))
        columns = (found.chosen, found.ranks, found.top_ids, found.top)
        on_host = kernels.Logprobs(*map(to_host, columns))
        return LogprobsInFlight(entries, counts, to_host(chosen), on_host)

    def _candidates(self, logits: Tensor, rows: Int32Array) -> dict[int, tuple[Tensor, Tensor]]:
        wanted = self._batch.sampling.num_candidates
        if not wanted:
            return {}
        return {
            entry: kernels.best_tokens(logits[entry], wanted[row])
            for entry, row in enumerate(rows.tolist())
            if row in wanted
        }


@dataclass(frozen=True, slots=True)
class LogprobsInFlight:
    """Of some entries, on their way to the host before the step's tokens. chosen: int64 [n],
    found: by their places in `entries`."""

    entries: list[int]
    counts: list[int]
    chosen: Tensor
    found: kernels.Logprobs

    def result(self) -> list[tuple[int, TokenLogprobs]]:
        """By entry, once the step's tokens have come."""
        rows = _token_logprobs(self.found, self.chosen, self.counts)
        return list(zip(self.entries, rows, strict=True))


class SamplesInFlight:
    """What was asked of the device. token_ids: int64 [n], there, before guesses are judged."""

    def __init__(
        self,
        token_ids: Tensor,
        finite: Tensor,
        drafts: DraftSamples | None,
        logprobs: LogprobsInFlight | None,
        candidates: dict[int, tuple[Tensor, Tensor]],
    ) -> None:
        self.token_ids = token_ids
        self._finite = finite
        self._drafts = drafts
        self._logprobs = logprobs
        self._candidates = candidates
        self._answer: Download | None = None
        if token_ids.is_cuda:
            self._answer = Download(torch.stack([token_ids, finite.to(torch.int64)]))

    def result(self) -> Samples:
        """On the host: the step's one read-back, and another for beams.

        Samples behind a wrong guess are -1, and nothing else is told of them.
        """
        if self._answer is None:
            token_ids, is_told = self.token_ids.numpy().astype(np.int32), self._finite.numpy()
        else:
            answer = self._answer.result()
            token_ids, is_told = answer[0].astype(np.int32), answer[1] != 0
        failed = () if is_told.all() else tuple(np.flatnonzero(~is_told).tolist())
        if self._drafts is not None:
            counts = self._drafts.counting(token_ids)
            token_ids[~counts] = -1
            failed = tuple(entry for entry in failed if counts[entry])
            is_told = is_told & counts
        if self._logprobs is None and not self._candidates:
            return Samples(token_ids, failed=failed)
        logprobs = [] if self._logprobs is None else self._logprobs.result()
        return Samples(
            token_ids,
            {entry: found for entry, found in logprobs if is_told[entry]},
            failed,
            {
                entry: BeamCandidates(ids.cpu().numpy().astype(np.int32), values.cpu().numpy())
                for entry, (ids, values) in self._candidates.items()
                if is_told[entry]
            },
        )


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Of the given ids and of the counts[i] best at each position.

    logits: float32 [n, vocab]; token_ids: int64 [n].
    """
    return _token_logprobs(kernels.logprobs(logits, token_ids, max(counts)), token_ids, counts)


def _token_logprobs(
    found: kernels.Logprobs, token_ids: Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    columns = zip(
        token_ids.tolist(),
        found.chosen.tolist(),
        found.ranks.tolist(),
        found.top_ids.tolist(),
        found.top.tolist(),
        counts,
        strict=True,
    )
    entries: list[TokenLogprobs] = []
    for token_id, logprob, rank, top_ids, top, count in columns:
        best = zip(top_ids[:count], top[:count], strict=True)
        others = [pair for pair in best if pair[0] != token_id]
        entries.append(
            TokenLogprobs(
                token_ids=(token_id, *(pair[0] for pair in others)),
                logprobs=(logprob, *(pair[1] for pair in others)),
                rank=rank,
            )
        )
    return entries
