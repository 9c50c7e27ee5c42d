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
    grammar_tokenizer: needed by rows with a grammar.
    """

    def __init__(
        self, batch: InputBatch, grammar_tokenizer: GrammarTokenizer | None = None
    ) -> None:
        self._batch = batch
        self._grammar_tokenizer = grammar_tokenizer

    def sample(
        self, logits: Tensor, rows: Int32Array, drafts: DraftSamples | None = None
    ) -> Samples:
        """logits: float32 [n, vocab], may be overwritten; rows: int32 [n], whose parameters,
        tokens and seed choose; drafts: which of them lie behind a row's guesses.

        Samples behind a wrong guess are -1, and nothing else is told of them.
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
        best, finite = kernels.greedy(logits)
        token_ids, is_finite = best.cpu().numpy(), finite.cpu().numpy()
        failed = () if is_finite.all() else tuple(np.flatnonzero(~is_finite).tolist())
        drawn = np.flatnonzero(params.is_random[rows] & is_finite)
        if len(drawn) > 0:
            token_ids[drawn] = self._draw(logits, rows, lengths, drawn)
        if failed:
            token_ids[~is_finite] = 0
        if drafts is not None:
            counts = drafts.counting(token_ids.astype(np.int32))
            token_ids[~counts] = -1
            failed = tuple(entry for entry in failed if counts[entry])
        logprobs = self._logprobs(raw, rows, token_ids, failed) if is_special else {}
        candidates = self._candidates(logits, rows, failed) if is_special else {}
        return Samples(token_ids.astype(np.int32), logprobs, failed, candidates)

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
    ) -> Int64Array:
        """One id for each of the entries."""
        params, device = self._batch.sampling, logits.device
        chosen = rows[entries]
        uniforms = kernels.uniforms(
            params.seed[chosen], params.sample_index[chosen], lengths[entries]
        )
        drawn = kernels.sample(
            logits if len(entries) == len(logits) else logits[torch.from_numpy(entries).to(device)],
            kernels.DrawParams(
                temperature=torch.from_numpy(params.temperature[chosen]).to(device),
                top_k=torch.from_numpy(params.top_k[chosen]).to(device),
                top_p=torch.from_numpy(params.top_p[chosen]).to(device),
                min_p=torch.from_numpy(params.min_p[chosen]).to(device),
                uniforms=torch.from_numpy(uniforms).to(device),
            ),
        )
        return drawn.cpu().numpy()

    def _logprobs(
        self, logits: Tensor, rows: Int32Array, token_ids: Int64Array, failed: tuple[int, ...]
    ) -> dict[int, TokenLogprobs]:
        wanted = self._batch.sampling.num_logprobs
        entries = [
            entry
            for entry, row in enumerate(rows.tolist())
            if row in wanted and entry not in failed and token_ids[entry] >= 0
        ]
        if not entries:
            return {}
        counts = [wanted[int(rows[entry])] for entry in entries]
        index = torch.tensor(entries, device=logits.device)
        chosen = torch.from_numpy(token_ids[entries]).to(logits.device)
        found = token_logprobs(logits[index], chosen, counts)
        return dict(zip(entries, found, strict=True))

    def _candidates(
        self, logits: Tensor, rows: Int32Array, failed: tuple[int, ...]
    ) -> dict[int, BeamCandidates]:
        wanted = self._batch.sampling.num_candidates
        if not wanted:
            return {}
        found: dict[int, BeamCandidates] = {}
        for entry, row in enumerate(rows.tolist()):
            if row in wanted and entry not in failed:
                best = kernels.best_tokens(logits[entry], wanted[row])
                token_ids, logprobs = (column.cpu().numpy() for column in best)
                found[entry] = BeamCandidates(token_ids.astype(np.int32), logprobs)
        return found


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Of the given ids and of the counts[i] best at each position.

    logits: float32 [n, vocab]; token_ids: int64 [n].
    """
    found = kernels.logprobs(logits, token_ids, max(counts))
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
