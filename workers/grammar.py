"""Which tokens an output may go on with, so that it matches its grammar.

A grammar's state is a function of the output tokens alone: after a preemption, a resume elsewhere
or a rollback it is made again by reading them. Knows rows' tokens and one tokenizer file; knows
neither logits nor the scheduler. What grammars mean is llguidance's.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ..scheduler.output import Int32Array

BoolArray = NDArray[np.bool_]


class GrammarError(Exception):
    """The output cannot go on: its tokens do not match, or the grammar is too complex."""


class GrammarTokenizer:
    """The vocabulary as grammars see it. Read in a thread: it takes a second or more."""

    def __init__(self, file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._file = file
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.only_eos = np.zeros(vocab_size, dtype=np.bool_)
        self.only_eos[list(eos_token_ids)] = True
        reader = ThreadPoolExecutor(1, "pagefleet-grammar")
        self._loaded = reader.submit(self._load)
        reader.shutdown(wait=False)

    def matcher(self, grammar: str) -> LLMatcher:
        """A new one, at the beginning. GrammarError where the model has no usable tokenizer."""
        try:
            return LLMatcher(self._loaded.result(), grammar, log_level=0)
        except (OSError, ValueError) as error:
            raise GrammarError(f"the model's tokenizer has no grammars: {error}") from error

    def _load(self) -> LLTokenizer:
        text = self._file.read_text("utf-8")
        eos = list(self.eos_token_ids) or None
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)


class GrammarState:
    """How far one row's output has come in its grammar."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._read = np.empty(0, dtype=np.int32)

    def allowed(self, tokenizer: GrammarTokenizer, output: Int32Array) -> BoolArray:
        """bool [vocab_size], never all False. output: every output token so far, int32 [n].

        After the grammar's end only what ends a sequence is allowed. Raises GrammarError.
        """
        if np.isin(output, tokenizer.eos_token_ids).any():
            return tokenizer.only_eos  # it goes on behind its end: the client asked for that
        matcher = self._advance(tokenizer, output)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=tokenizer.vocab_size, bitorder="little").view(np.bool_)
        if matcher.is_error():
            raise _error_of(matcher)
        if not allowed.any():
            raise GrammarError("no token of the model can go on")
        return allowed

    def _advance(self, tokenizer: GrammarTokenizer, output: Int32Array) -> LLMatcher:
        num_read = len(self._read)
        goes_on = np.array_equal(output[:num_read], self._read)
        if self._matcher is None or not goes_on:
            self._matcher = tokenizer.matcher(self._grammar)
            num_read = 0
        new = output[num_read:]
        if len(new) > 0 and not self._matcher.consume_tokens(new.tolist()):
            raise _error_of(self._matcher)
        self._read = output.copy()
        return self._matcher


def _error_of(matcher: LLMatcher) -> GrammarError:
    """Its first line: the others are the whole state."""
    return GrammarError(matcher.get_error().partition("\n")[0] or "the output does not match")
