"""A chat template's words for how much to think."""

import pytest

from pagefleet.cluster.chat_template import ChatTemplate
from pagefleet.protos.errors import InvalidArgument

HELLO = [{"role": "user", "content": "hi"}]
LEVELS = "{{ reasoning_effort if reasoning_effort else 'unset' }}"
SWITCH = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{{ enable_thinking }}{# </think> #}"
)


@pytest.mark.parametrize(
    ("source", "variables", "prompt"),
    [
        (LEVELS, {}, "unset"),
        (LEVELS, {"reasoning_effort": "low"}, "low"),
        (SWITCH, {}, "True"),
        (SWITCH, {"reasoning_effort": "high"}, "True"),
        (SWITCH, {"reasoning_effort": "none"}, "False"),
        (SWITCH, {"reasoning_effort": "high", "enable_thinking": False}, "False"),
        ("plain", {"reasoning_effort": "none"}, "plain"),
    ],
)
def test_effort_is_said_in_the_templates_words(source, variables, prompt):
    assert ChatTemplate(source, {}).render(HELLO, variables=variables) == prompt


@pytest.mark.parametrize(
    ("source", "effort"), [("plain", "high"), ("always {# </think> #}", "none")]
)
def test_effort_is_refused_where_it_would_change_nothing(source, effort):
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source, {}).render(HELLO, variables={"reasoning_effort": effort})
    assert caught.value.field == "reasoning_effort"
