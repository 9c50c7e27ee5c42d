"""The arguments of the Serve application: as strings of a command line, and wrong ones."""

import pytest
from pydantic import ValidationError

from pagefleet.cluster.serve_args import ServeArgs


def test_arguments_of_a_command_line_are_strings():
    args = ServeArgs.model_validate(
        {"model": "org/name", "tp": "2", "num_blocks": "64", "max_replicas": "3", "num_gpus": "1"}
    )
    config = args.cluster_config()
    assert (args.name, config.tp, config.num_blocks, config.device) == ("org/name", 2, 64, "cuda")


def test_each_model_has_its_own_settings():
    args = ServeArgs.model_validate(
        {"model": "org/a", "more_models": [{"model": "org/b", "kv_memory": "1GiB"}]}
    )
    assert [model.name for model in args.models] == ["org/a", "org/b"]
    assert args.models[1].cluster_config().kv_memory == 2**30


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"replica": 1}, "replica"),
        ({"min_replicas": 2}, "min_replicas 2 <= initial_replicas 2 <= max_replicas 1"),
        ({"kv_memory": "much"}, "'much' is not a size"),
        ({"num_blocks": 8, "kv_memory": "1GiB"}, "give one"),
        ({"dtype": "float16"}, "--dtype"),
        ({"grpc_port": 1, "http_port": 1}, "are both 1"),
        ({"model": "org/a", "more_models": [{"model": "org/a"}]}, "two models would have one name"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, object], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        ServeArgs.model_validate(wrong)
