"""The Dockerfiles: what they copy is there, who they run as, and what is pinned."""

import json
import re
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from kubernetes_checks import DEPLOY, OVERLAYS, ROOT, pods, rendered
from typer.testing import CliRunner

from pagefleet.cluster.main import app

NAMES = sorted(path.name for path in (DEPLOY / "docker").glob("*.Dockerfile"))
Instruction = tuple[str, str]


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest) -> Path:
    return DEPLOY / "docker" / request.param


@pytest.fixture
def instructions(path: Path, tmp_path: Path) -> list[Instruction]:
    """In order; comments apart."""
    parser = DockerfileParser(str(tmp_path / "Dockerfile"), env_replace=False)
    parser.content = path.read_text()
    found = [(part["instruction"], part["value"]) for part in parser.structure]
    return [part for part in found if part[0] != "COMMENT"]


def values(instructions: list[Instruction], name: str) -> list[str]:
    return [value for instruction, value in instructions if instruction == name]


def sources(instructions: list[Instruction]) -> list[str]:
    """Of the build context."""
    copies = [value for value in values(instructions, "COPY") if not value.startswith("--from")]
    return [source for value in copies for source in value.split()[:-1]]


def test_what_is_copied_is_there_and_not_ignored(path: Path, instructions: list[Instruction]):
    ignored = Path(f"{path}.dockerignore").read_text().splitlines()
    for source in sources(instructions):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored


def test_all_that_the_package_is_made_of_is_copied(instructions: list[Instruction]):
    project = (ROOT / "pyproject.toml").read_text()
    packages = set(re.findall(r'^    "pagefleet\.(\w+)', project, re.MULTILINE))
    folders = {source for source in sources(instructions) if (ROOT / source).is_dir()}
    assert packages - {"protos"} <= folders and "protos" in folders


def test_every_stage_begins_with_a_pinned_image(instructions: list[Instruction]):
    arguments = dict(value.partition("=")[::2] for value in values(instructions, "ARG"))
    for value in values(instructions, "FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], value.split()[0])
        name, _, tag = image.partition(":")
        assert name in ("python", "nvidia/cuda")
        assert re.match(r"\d+\.\d+\.\d+-", tag), tag


def test_it_runs_as_the_user_that_the_pods_name(instructions: list[Instruction]):
    (user,) = values(instructions, "USER")
    after = instructions[[part[0] for part in instructions].index("USER") :]
    assert not any("apt-get" in value for _, value in after)
    for name in OVERLAYS:
        for pod in pods(rendered(f"kustomize/{name}"))[:2]:
            security = pod["securityContext"]
            assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_its_commands_are_ours(instructions: list[Instruction]):
    (check,) = values(instructions, "HEALTHCHECK")
    commands = [*values(instructions, "CMD"), check.partition("CMD ")[2]]
    for command in commands:
        program, name, *flags = json.loads(command)
        assert program == "pagefleet"
        text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for flag in flags:
            assert not flag.startswith("--") or flag in text


def test_the_images_are_those_of_the_manifests():
    built = {f"pagefleet:{name.partition('.')[0]}" for name in NAMES}
    everywhere = [pod for name in OVERLAYS for pod in pods(rendered(f"kustomize/{name}"))]
    used = {container["image"] for pod in everywhere for container in pod["containers"]}
    assert {image for image in used if image.startswith("pagefleet:")} == built


@pytest.mark.parametrize("command", ["models", "probe", "serve"])
def test_what_the_build_and_the_pods_run_exists(command: str):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
