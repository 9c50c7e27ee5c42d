"""A call that was found right: all that running it needs, decided once."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..protos.messages import SamplingParams
from .generation import GenerateCall
from .model_catalog import ServedModel


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One request, checked and tokenized.

    call: as the front read it. sampling: the call's, with a seed and the grammar of a forced call.
    request_id: the client's name for it, or one made for it. request_key: unique in the cluster,
    internal. arrived, deadline: on the gateway's clock; no deadline is None.
    """

    call: GenerateCall
    model: ServedModel
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    request_id: str
    request_key: str
    arrived: float
    deadline: float | None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)
