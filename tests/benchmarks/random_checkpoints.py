"""Checkpoints of the benchmarks: Llama-architecture models of known shapes with random weights."""

import json
from pathlib import Path

import torch
from engine_workloads import Shape
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

MAX_CONTEXT = 2048
_SPECIAL_TOKENS = ("<|end|>", "<|start|>")


def save_random(
    shape: Shape,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_context: int = MAX_CONTEXT,
) -> None:
    """Weights as `transformers` draws them, rounded to `dtype`; no tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def save_tokenizer(vocab_size: int, folder: Path) -> None:
    """One that has a text for every id: bytes, then numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [*_SPECIAL_TOKENS, *alphabet]
    names = [*known, *(f"Ġ{number}" for number in range(vocab_size - len(known)))]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
