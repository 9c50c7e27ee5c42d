"""Incremental detokenization: equal to decoding at once, whole characters only, any ids."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagefleet.cluster.detokenizer import IncrementalDetokenizer, TokenPieces

TEXT = "naïve café, 日本語 🙂👍🏽 — \t\n end"


def byte_level() -> Tokenizer:
    """Every byte is a token; some merges that end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    smile = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")[0][0]
    half = smile[:2]
    vocab[half] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [(smile[0], smile[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<plain>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece style: words, a meta symbol, single bytes for all else."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ("▁", "▁naïve", "▁café", ",", "e", "n", "d", "▁end", "日"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = IncrementalDetokenizer(TokenPieces(tokenizer), **options)
    return [*(stream.push(i) for i in ids), stream.flush()]


def test_no_piece_ends_inside_a_character():
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(TEXT), "characters must come in several tokens for this to test anything"


def test_byte_fallback_tokens_wait_for_their_character():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(t) for t in ("▁café", "<0xE2>", "<0x98>", "<0x83>", "▁end")]
    assert pieces_of(tokenizer, ids) == [" café", "", "", "☃", " end", ""]


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a").ids, tokenizer.token_to_id("<|end|>")]
    ids.append(tokenizer.token_to_id("<plain>"))
    assert "".join(pieces_of(tokenizer, ids)) == "a<plain>"
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=False)) == "a<|end|><plain>"


def test_an_unfinished_character_shows_as_one_replacement_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("ok🙂").ids[:-1]
    assert pieces_of(tokenizer, ids)[-1] == "\ufffd"
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_ten_thousand_random_ids_decode_as_at_once():
    """Also ids that no token has, and special ones in the middle of characters."""
    tokenizer = byte_level()
    rng = random.Random(33)
    ids = [rng.randrange(tokenizer.get_vocab_size() + 50) for _ in range(10_000)]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
    in_full = "".join(pieces_of(tokenizer, ids, skip_special_tokens=False))
    assert in_full == tokenizer.decode(ids, skip_special_tokens=False)


def test_random_byte_tokens_never_fail():
    tokenizer = byte_fallback()
    rng = random.Random(33)
    ids = [rng.randrange(tokenizer.get_vocab_size() + 50) for _ in range(10_000)]
    "".join(pieces_of(tokenizer, ids)).encode("utf-8")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(cleanup=False)])
def test_other_decoders_give_what_they_add_behind_a_word(decoder):
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "good": 1, "##ness": 2, "me": 3}))
    if decoder is None:
        assert pieces_of(tokenizer, [1, 2, 3]) == ["good", "##ness", "me", ""]
        return
    tokenizer.decoder = decoder
    assert pieces_of(tokenizer, [1, 2, 3]) == [" good", "ness", " me", ""]
