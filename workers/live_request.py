"""A request inside the engine: where its deltas go, and what is still due. Decides nothing."""

from collections.abc import Callable

from ..protos.errors import PagefleetError
from ..protos.messages import EngineRequest, FinishReason, SequenceDelta

# Called on the engine thread, once per step, with the step's number and all the deltas of the
# requests submitted with it. Must not block; two sinks are one if they compare equal.
DeltaSink = Callable[[int, list[SequenceDelta]], object]


class LiveRequest:
    """A request with samples that have not ended.

    num_sent: by index of each such sample, the output tokens already delivered (those that a
    resumed sample brought along counted).
    """

    __slots__ = ("num_sent", "request", "sink")

    def __init__(self, request: EngineRequest, sink: DeltaSink) -> None:
        self.request = request
        self.sink = sink
        self.num_sent = {sample.index: len(sample.output_token_ids) for sample in request.samples}

    def note(self, delta: SequenceDelta) -> None:
        """Follow what is delivered."""
        if delta.finish_reason is None:
            self.num_sent[delta.index] = delta.first_position + len(delta.token_ids)
        else:
            del self.num_sent[delta.index]

    def error_deltas(self, error: PagefleetError) -> list[SequenceDelta]:
        """The end, by `error`, of every sample still due."""
        return error_deltas(self.request.request_key, self.num_sent, error)


def error_deltas(
    request_key: str, num_sent: dict[int, int], error: PagefleetError
) -> list[SequenceDelta]:
    """The last delta of each sample in `num_sent` (index → output tokens delivered)."""
    return [
        SequenceDelta(
            request_key=request_key,
            index=index,
            first_position=position,
            finish_reason=FinishReason.ERROR,
            error=error.message,
            error_class=_public_class(error),
        )
        for index, position in num_sent.items()
    ]


def _public_class(error: PagefleetError) -> str:
    """The nearest class of the public tree that `error` is one of."""
    public = (base for base in type(error).__mro__ if base.__module__ == PagefleetError.__module__)
    return next(public).__name__
