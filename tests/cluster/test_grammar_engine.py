"""Grammars in a running engine: every sample matches, also of sequences that were preempted."""

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from pagefleet.cluster import grammar
from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import FinishReason, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "minLength": 10, "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
        "kind": {"enum": ["block", "slot", "lease"]},
    },
    "required": ["word", "numbers", "kind"],
    "additionalProperties": False,
}
PROMPTS = ["Say something in JSON: ", "And another one, with a longer prompt than that: ", "x"]
CONSTRAINED = SamplingParams(
    max_tokens=400, temperature=1.0, top_k=20, seed=3, n=2, grammar=grammar.json_schema(SCHEMA)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def answers(model: Path, num_blocks: int, mode: str) -> tuple[list[str], int]:
    """Texts of all samples, and how often one was preempted."""
    with LLM(
        str(model),
        num_blocks=num_blocks,
        host_memory=2**20,
        preemption_mode=mode,
        deterministic=True,
        num_threads=1,
    ) as llm:
        outputs = [o for c in llm.generate(PROMPTS, CONSTRAINED) for o in c.outputs]
        assert {output.finish_reason for output in outputs} == {FinishReason.STOP}
        return [output.text for output in outputs], llm.stats().preemptions


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[str]:
    texts, num_preempted = answers(model, 256, "recompute")
    assert num_preempted == 0
    return texts


def test_every_sample_matches(undisturbed):
    for text in undisturbed:
        value = json.loads(text)
        assert set(value) == {"word", "numbers", "kind"}
        assert 10 <= len(value["word"]) <= 30


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_grammars_survive_preemption(model, undisturbed, mode):
    texts, num_preempted = answers(model, 26, mode)
    assert num_preempted > 0
    assert texts == undisturbed
