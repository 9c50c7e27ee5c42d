"""Tokenizer folders and chat templates."""

import json
from pathlib import Path

import pytest
from gateway_fakes import make_tokenizer

from pagefleet.cluster.chat_template import ChatTemplate
from pagefleet.cluster.generation import ChatPrompt, TextPrompt
from pagefleet.cluster.tokenizer import Tokenizer
from pagefleet.protos.errors import InvalidArgument


def save(folder: Path, *, with_bos: bool, **config: object) -> Path:
    make_tokenizer(with_bos=with_bos)._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bos_is_added_once_whoever_is_to_add_it(tmp_path):
    for with_bos in (True, False):
        folder = save(tmp_path, with_bos=with_bos, bos_token="<s>", add_bos_token=True)
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.encode("a")[0] == 256
        assert tokenizer.encode("a").count(256) == 1
        assert 256 not in tokenizer.encode("a", add_special_tokens=False)


def test_older_configs_have_objects_for_special_tokens(tmp_path):
    folder = save(
        tmp_path,
        with_bos=False,
        bos_token={"content": "<s>", "lstrip": False},
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    assert Tokenizer.load(folder)._render(ChatPrompt([{"role": "user", "content": "x"}])) == "<s>x"


def test_a_template_file_goes_before_the_config(tmp_path):
    folder = save(tmp_path, with_bos=False, chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(folder)._render(ChatPrompt([{"role": "u"}])) == "new"


def test_the_default_of_several_templates(tmp_path):
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert (
        Tokenizer.load(save(tmp_path, with_bos=False, chat_template=several))._render(
            ChatPrompt([{"role": "u"}])
        )
        == "d"
    )


def test_a_folder_without_tokenizer_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_file_is_said_so(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"x": 1')
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


async def test_long_texts_give_the_same_tokens():
    tokenizer = make_tokenizer()
    text = "wörd " * 3000
    assert await tokenizer.tokenize(TextPrompt(text), 100_000) == tokenizer.encode(text)


async def test_a_text_that_can_never_fit_is_not_tokenized():
    with pytest.raises(InvalidArgument, match="exceed"):
        await make_tokenizer().tokenize(TextPrompt("x" * 10_000), 100)
    with pytest.raises(InvalidArgument, match="exceed"):
        await make_tokenizer().tokenize(ChatPrompt([{"role": "u", "content": ""}] * 101), 100)


async def test_a_three_byte_character_at_byte_1000_and_nul():
    tokenizer = make_tokenizer()
    text = "x" * 998 + "日\0本"
    ids = await tokenizer.tokenize(TextPrompt(text, add_special_tokens=False), 2000)
    assert tokenizer.decode(ids) == text


async def test_lone_surrogates_are_refused_in_chats_too():
    with pytest.raises(InvalidArgument, match="surrogate"):
        await make_tokenizer().tokenize(ChatPrompt([{"role": "u", "content": "\ud83d"}]), 100)


TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == "stop" %}{% break %}{% endif %}
    <|{{ m.role }}|>{{ m.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_templates_have_what_transformers_gives_them():
    template = ChatTemplate(TEMPLATE, {})
    messages = [{"role": r, "content": " hi "} for r in ("user", "stop", "user")]
    assert template.render(messages) == "    <|user|>hi<|assistant|>"
    as_json = ChatTemplate("{{ messages[0] | tojson }}", {})
    assert as_json.render([{"role": "<é>"}]) == '{"role": "<é>"}'
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(messages).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_the_messages_fault(source):
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.field == "chat.messages"
