"""What a request must be to run here at all. Knows the replica's limits, not its state."""

from ..protos.errors import InvalidArgument
from ..protos.messages import AdmissionClass, EngineRequest
from .config import SchedulerConfig


def token_limit(request: EngineRequest, config: SchedulerConfig) -> int:
    """The most tokens, prompt and output, that a sample of this request may have.

    Raises:
        InvalidArgument: it is empty, too long, or could never fit the pool.
    """
    num_prompt, sampling = len(request.prompt_token_ids), request.sampling
    if not num_prompt:
        raise InvalidArgument("prompt", "is empty")
    if min(request.prompt_token_ids) < 0:
        raise InvalidArgument("prompt", "holds a negative token id")
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise InvalidArgument("sampling.max_tokens", "is negative")
    if not request.samples:
        raise InvalidArgument("sampling.n", "is zero")
    _check_size(request, config)
    if sampling.max_tokens is not None:
        return min(num_prompt + sampling.max_tokens, config.max_context)
    if request.admission_class is AdmissionClass.GUARANTEED:
        raise InvalidArgument("sampling.max_tokens", "must be set for a guarantee")
    return config.max_context


def _check_size(request: EngineRequest, config: SchedulerConfig) -> None:
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + max(len(sample.output_token_ids) for sample in request.samples)
    # Who samples needs a position for the first token; who only prefills may fill the context.
    num_least = num_prompt if request.sampling.max_tokens == 0 else num_prompt + 1
    if max(num_known, num_least) > config.max_context:
        raise InvalidArgument(
            "prompt", f"has {num_prompt} tokens, the context holds {config.max_context}"
        )
    num_blocks = -(-num_known // config.block_size)
    if num_blocks > config.num_blocks:
        raise InvalidArgument(
            "prompt", f"needs {num_blocks} blocks, the pool has {config.num_blocks}"
        )
