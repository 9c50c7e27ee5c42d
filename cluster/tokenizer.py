"""A model's tokenizer folder: text and chats to token ids, ids back to text.

Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, nothing else of a
checkpoint. Long texts are tokenized in a thread, so that they do not hold up other streams.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from jinja2 import TemplateError
from tokenizers import Tokenizer as HuggingFaceTokenizer

from ..protos.errors import InvalidArgument
from ..workers.heap import give_back_freed
from .chat_template import FIELD as CHAT_FIELD
from .chat_template import ChatTemplate
from .detokenizer import IncrementalDetokenizer, TokenPieces
from .generation import ChatPrompt, TextPrompt
from .validation import check_text

# Below this many characters a text takes less than a thread switch under load costs.
_INLINE_CHARACTERS = 2000


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        backend: HuggingFaceTokenizer,
        *,
        bos_token: str | None = None,
        ensure_bos: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._bos_token_id = backend.token_to_id(bos_token) if bos_token is not None else None
        self._ensure_bos = ensure_bos
        self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.chat_template = chat_template
        self.pieces = TokenPieces(backend)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """FileNotFoundError where the folder has no `tokenizer.json`, ValueError if it is none."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: a served model needs a fast tokenizer's file")
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        tokenizer = cls(
            _read_backend(path),
            bos_token=special_tokens.get("bos_token"),
            ensure_bos=config.get("add_bos_token") is True,
            chat_template=_load_chat_template(folder, config, special_tokens),
        )
        give_back_freed()  # the file takes several times what stays of it
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text without lone surrogates."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self._bos_token_id
        if add_special_tokens and self._ensure_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False
    ) -> str:
        """The text of token ids.

        continues: they follow a prompt, so a space before their first word belongs to the text.
        """
        stream = IncrementalDetokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
        text = "".join([*map(stream.push, token_ids), stream.flush()])
        if self.pieces.strips_leading_space and not continues:
            text = text.removeprefix(" ")
        return text

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, max_tokens: int) -> list[int]:
        """A client's prompt to token ids.

        Raises InvalidArgument for what is no text, what the template refuses, and a text that
        cannot fit `max_tokens` however it is tokenized (so that nobody pays to find out).
        """
        if isinstance(prompt, ChatPrompt):
            num_messages = len(prompt.messages)
            if num_messages > max_tokens:
                problem = f"{num_messages} messages exceed {max_tokens} tokens"
                raise InvalidArgument(CHAT_FIELD, problem)
            text, field, special = self._render(prompt), CHAT_FIELD, False
        else:
            text, field, special = prompt.text, "text", prompt.add_special_tokens
        check_text(field, text)
        if len(text) > max_tokens * self._longest_token:
            raise InvalidArgument(field, f"{len(text)} characters exceed {max_tokens} tokens")
        if len(text) <= _INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens=special)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=special)

    def _render(self, prompt: ChatPrompt) -> str:
        if self.chat_template is None:
            raise InvalidArgument("chat", "the model has no chat template")
        return self.chat_template.render(prompt.messages, prompt.tools, prompt.template_kwargs)


def _read_backend(path: Path) -> HuggingFaceTokenizer:
    try:
        return HuggingFaceTokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is no tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        values: object = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return cast(dict[str, object], values)


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """`bos_token` and its like; older files have an object instead of a string."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = cast(dict[str, object], token).get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _load_chat_template(
    folder: Path, config: dict[str, object], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """`chat_template.jinja`, else the config's; of several, the one named "default"."""
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = cast(list[dict[str, str]], source)
            source = next((t["template"] for t in named if t["name"] == "default"), None)
        return ChatTemplate(source, special_tokens) if isinstance(source, str) else None
    except (TemplateError, UnicodeDecodeError, LookupError, TypeError) as error:
        raise ValueError(f"{folder}: its chat template cannot be read: {error}") from error
