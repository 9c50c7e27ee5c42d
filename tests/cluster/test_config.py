"""Settings of a cluster: what is refused, and how sizes are read."""

from pathlib import Path

import pytest

from pagefleet.cluster.config import (
    ClusterConfig,
    CommandError,
    NamedModel,
    default_served_name,
    format_bytes,
    name_models,
    parse_bytes,
    parse_faults,
)
from pagefleet.workers.faults import Faults


def make_config(**changes: object) -> ClusterConfig:
    return ClusterConfig(**{"models": (NamedModel("m", "m"),), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 2**30),
        ("512MiB", 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("2g", 2 * 10**9),
        ("3kB", 3000),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1XB", "1e9", "GiB", "9" * 400])
def test_other_texts_are_not_sizes(text: str):
    with pytest.raises(CommandError, match="is not a size"):
        parse_bytes(text)


def test_faults_are_read():
    faults = parse_faults(["preempt-every=7", "nan-fill"])
    assert make_config(faults=faults).faults == Faults(preempt_every=7, nan_fill=True)
    with pytest.raises(CommandError, match=r"--fault: .*late-copies"):
        parse_faults(["slow-copies"])


def test_sizes_are_written():
    assert format_bytes(0) == "0 B"
    assert format_bytes(512 * 2**20) == "512 MiB"
    assert format_bytes(3 * 2**40) == "3 TiB"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemption_mode": "drop"}, "--preemption-mode must be one of recompute, swap, auto"),
        ({"admission_rule": "any"}, "--admission-rule must be one of known-length, full-length"),
        ({"watermark": 1.0}, "--watermark must be from 0 to below 1"),
        ({"max_num_waiting": 0}, "--max-num-waiting"),
        ({"max_queue_s": 0.0}, "--max-queue-s must be above 0"),
        ({"speculative": "draft"}, "--speculative must be one of off, ngram"),
        ({"num_speculative_tokens": 0}, "--num-speculative-tokens"),
        ({"prompt_lookup_min": 0}, "--prompt-lookup-min"),
        ({"prompt_lookup_min": 6}, "--prompt-lookup-max must be at least 6, is 5"),
        ({"replicas": 0}, "--replicas"),
        ({"tp": 0}, "--tp"),
        ({"block_size": 0}, "--block-size"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"grpc_port": 70000}, "--grpc-port"),
        ({"grpc_port": 8000}, "both 8000"),
        ({"num_blocks": 0}, "--num-blocks"),
        ({"num_blocks": 8, "kv_memory": 2**20}, "give one"),
        ({"memory_fraction": 1.5}, "--gpu-memory-utilization"),
        ({"host_memory": -1}, "--host-memory"),
        ({"dtype": "float8"}, "--dtype"),
        ({"weight_dtype": "int4"}, "--weight-dtype must be one of auto, bfloat16, int8"),
        ({"quantized_weights": "float"}, "--quantized-weights"),
        ({"device": "tpu"}, "--device"),
        ({"models": (NamedModel("m", ""),)}, "--served-model-name"),
        ({"models": (NamedModel("a", "m"), NamedModel("b", "m"))}, "one name"),
        ({"models": ()}, "no model"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str):
    with pytest.raises(CommandError, match=message):
        make_config(**changes)


def test_any_free_port_may_be_asked_for_twice():
    assert make_config(grpc_port=0, http_port=0).http_port == 0


def test_each_model_has_the_name_of_its_place():
    models = (NamedModel("a/b", "first"), NamedModel("c/d", "second"))
    assert name_models(["a/b", "c/d"], ["first", "second"]) == models
    assert make_config(models=models, replicas=3).num_replicas == 6
    assert [model.name for model in name_models(["a/b", "c/d"], [])] == ["a/b", "c/d"]
    with pytest.raises(CommandError, match="one name for each"):
        name_models(["a/b", "c/d"], ["first"])


def test_a_folder_is_served_under_its_name_and_a_hub_id_under_itself(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    assert default_served_name(str(tmp_path / "my-model")) == "my-model"
    assert default_served_name("org/name") == "org/name"
