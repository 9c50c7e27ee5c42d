"""A whole checkpoint of a few hundred kilobytes: random weights, a byte tokenizer, a template."""

import json
from pathlib import Path

from factories import make_llama
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<|end|>", "<|start|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(folder: Path, scale: float = 2.0) -> Path:
    """Every byte is a token, so every text can be a prompt and every output is some text.

    scale: of the weights; models of different scales say different things.
    """
    make_llama(
        folder,
        vocab_size=len(SPECIAL_TOKENS) + 256,
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        max_position=2048,
        scale=scale,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
