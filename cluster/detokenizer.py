"""From token ids to text, one at a time, without ever cutting a character.

Knows the pieces of a tokenizer (the bytes each id stands for), nothing of stop strings or
requests. A piece may end inside a character: its bytes wait until the character is complete.
Every id has a piece, if an empty one, so no sequence of ids can fail.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Json = dict[str, object]


class TokenPieces:
    """The bytes behind each id of one tokenizer, found once and kept.

    Three families of decoders: byte-level BPE (each character of a token is a byte), SentencePiece
    style (a meta symbol for the space, `<0xE2>` tokens for single bytes), and any other, whose
    pieces are what the decoder adds behind an ordinary token.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        parts = _decoder_parts(tokenizer)
        self._bytes_of = _choose_decoder(tokenizer, parts)
        # SentencePiece puts a space before every text; a whole text is shown without it.
        self.strips_leading_space = any(part["type"] in ("Strip", "Metaspace") for part in parts)
        self._pieces: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """BOS, EOS, chat markers: left out of the text unless asked for."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def piece(self, token_id: int) -> bytes:
        """UTF-8, or a part of it; empty for an id that no token has."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._make_piece(token_id)
        return found

    def _make_piece(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)


class IncrementalDetokenizer:
    """The text of one sequence. `push` then `flush` give, together, the text of all its ids."""

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip_special_tokens and self._pieces.is_special(token_id):
            return ""
        return self._decoder.decode(self._pieces.piece(token_id))

    def flush(self) -> str:
        """U+FFFD if the sequence ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _decoder_parts(tokenizer: HuggingFaceTokenizer) -> list[_Json]:
    """The decoder section of tokenizer.json, sequences taken apart."""
    described = cast(_Json, json.loads(tokenizer.to_str())).get("decoder")
    return _flatten(cast(_Json | None, described))


def _choose_decoder(tokenizer: HuggingFaceTokenizer, parts: list[_Json]) -> Callable[[str], bytes]:
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
        return _sentence_piece(parts)
    return _by_context(tokenizer)


def _flatten(decoder: _Json | None) -> list[_Json]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        children = cast(list[_Json], decoder["decoders"])
        return [part for child in children for part in _flatten(child)]
    return [decoder]


def _byte_level(token: str) -> bytes:
    values = [_BYTE_OF_CHARACTER.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode("utf-8")


def _sentence_piece(parts: list[_Json]) -> Callable[[str], bytes]:
    replacements: list[tuple[str, str]] = []
    for part in parts:
        if part["type"] == "Replace":
            pattern = cast(dict[str, str], part["pattern"])
            if "String" in pattern:
                replacements.append((pattern["String"], cast(str, part["content"])))
        elif part["type"] == "Metaspace":
            replacements.append((cast(str, part["replacement"]), " "))
    has_byte_tokens = any(part["type"] == "ByteFallback" for part in parts)

    def bytes_of(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return bytes_of


def _by_context(tokenizer: HuggingFaceTokenizer) -> Callable[[str], bytes]:
    """What the decoder adds behind an ordinary token: a space, a missing "##", …"""
    anchor = next(
        (token for token in sorted(tokenizer.get_vocab()) if token.isascii() and token.isalpha()),
        None,
    )

    def bytes_of(token: str) -> bytes:
        if tokenizer.decoder is None or anchor is None:
            return token.encode("utf-8")
        before = tokenizer.decoder.decode([anchor])
        return tokenizer.decoder.decode([anchor, token])[len(before) :].encode("utf-8")

    return bytes_of


def _make_byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes are themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _make_byte_alphabet()
