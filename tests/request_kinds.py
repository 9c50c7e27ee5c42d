"""Requests that use every sampling parameter, for tests that compare two ways to serve them."""

from dataclasses import replace

from model_driver import GREEDY, Answer, make_request, random_prompt

from pagefleet.protos.messages import EngineRequest, SamplingParams

VOCAB = 131
SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)


def requests_of_every_kind() -> list[EngineRequest]:
    prompts = [random_prompt(length, VOCAB, length) for length in (5, 8, 16, 23)]
    kinds = {
        "greedy": GREEDY,
        "sampled": SAMPLED,
        "filtered": replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.02),
        "penalised": replace(
            SAMPLED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
        ),
        "logprobs": replace(SAMPLED, logprobs=3, prompt_logprobs=2),
        "biased": replace(GREEDY, logit_bias=((7, 2.0),), logprobs=0),
        "ending": replace(SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(0, 131, 9))),
        "late": replace(
            SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(0, 131, 9)), min_tokens=12
        ),
    }
    requests = [
        make_request(f"{name} {place}", prompt, sampling)
        for place, prompt in enumerate(prompts)
        for name, sampling in kinds.items()
    ]
    return [*requests, make_request("three", prompts[3], replace(SAMPLED, n=3), n=3)]


def without_usage(answers: dict[tuple[str, int], Answer]) -> dict[tuple[str, int], Answer]:
    return {key: replace(answer, usage=None) for key, answer in answers.items()}
