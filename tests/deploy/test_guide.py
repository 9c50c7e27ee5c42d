"""The guide names what there is: folders, overlays, flags, images and Secrets."""

import re
import shlex

import pytest
from kubernetes_checks import DEPLOY, OVERLAYS, VALUES, rendered
from typer.testing import CliRunner

from pagefleet.cluster.main import app

GUIDE = (DEPLOY / "README.md").read_text("utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```console\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_every_link_leads_somewhere():
    for path in re.findall(r"\]\(([^):#]+)\)", GUIDE):
        assert (DEPLOY / path).exists(), path


def test_every_path_is_there():
    for path in re.findall(r"(?<![\w./])deploy/([\w./-]+\w)", GUIDE):
        assert (DEPLOY / path).exists(), path


def test_every_overlay_and_every_example_is_explained():
    for name in {name.removesuffix("-raycluster") for name in (*OVERLAYS, *VALUES)}:
        assert f"`{name}`" in GUIDE


OURS = [
    words[words.index(name) :]
    for words in COMMANDS
    for name in ("serve", "generate", "keys")
    if f"pagefleet {name}" in " ".join(words)
]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_our_commands_have_these_flags(words: list[str]):
    name, *flags = words
    text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert "Usage" in text
    for flag in flags:
        assert not flag.startswith("--") or flag in text, flag


def test_the_secrets_that_pods_name_are_explained():
    named = set(re.findall(r"(?:secretName|name): (pagefleet-[\w-]+)", str_of_all()))
    secrets = {name for name in named if re.search(r"keys|key|redis|tls$", name)}
    made = set(re.findall(r"kubectl create secret \w+ ([\w-]+)", GUIDE))
    assert secrets <= made | {"pagefleet-api-keys"}


def str_of_all() -> str:
    return str([rendered(f"kustomize/{name}") for name in OVERLAYS]).replace("'", "")
