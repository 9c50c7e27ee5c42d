"""A GGUF file of SmolLM2's kind rewritten as a Hugging Face checkpoint folder.

Knows which files a folder has, and GGUF's words for the tokenizer. Tensors and configuration are
read by the workers' `GgufCheckpoint`. Knows nothing of where the file comes from or where the
folder goes.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from ..workers.gguf_checkpoint import GgufCheckpoint
from ..workers.models.config import ModelError
from .config import CommandError

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)
Fields = Mapping[str, object]

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its kind
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write float32 weights, config, tokenizer and chat template of `gguf_file` into `folder`."""
    try:
        checkpoint = GgufCheckpoint(gguf_file)
    except ModelError as error:
        raise CommandError(str(error)) from error
    fields = checkpoint.fields
    flavour = fields.get("tokenizer.ggml.pre")
    if flavour != "smollm":
        raise CommandError(f"{gguf_file.name} has a tokenizer {flavour!r}, expected 'smollm'")
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors():
        tensors[name] = tensor.contiguous()
        progress(*checkpoint.progress)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _model_config(checkpoint))
    _write_json(folder / "generation_config.json", _token_ids(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))


def _model_config(checkpoint: GgufCheckpoint) -> dict[str, object]:
    """What the file says, and what it leaves to the architecture's name."""
    return {
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": checkpoint.fields["llama.rope.dimension_count"],
        **{name: value for name, value in checkpoint.config.values.items() if value is not None},
        **_token_ids(checkpoint.fields),
    }


def _token_ids(fields: Fields) -> dict[str, object]:
    return {
        f"{name}_id": fields[_SPECIAL_TOKENS[name]]
        for name in ("bos_token", "eos_token", "pad_token")
    }


def _tokenizer_config(fields: Fields) -> dict[str, object]:
    tokens = cast(list[str], fields["tokenizer.ggml.tokens"])
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{name: tokens[cast(int, fields[key])] for name, key in _SPECIAL_TOKENS.items()},
    }


def _tokenizer(fields: Fields) -> Tokenizer:
    """Byte-level BPE whose digits stand alone: GGUF's pre-tokenizer `smollm`."""
    tokens = cast(list[str], fields["tokenizer.ggml.tokens"])
    kinds = cast(list[int], fields["tokenizer.ggml.token_type"])
    pairs = (pair.partition(" ") for pair in cast(list[str], fields["tokenizer.ggml.merges"]))
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in pairs],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
