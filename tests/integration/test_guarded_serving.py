"""`pagefleet serve` with keys and TLS, as an operator starts it, and the `openai` client at it."""

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from pagefleet.cluster.api_keys import digest_of
from pagefleet.cluster.client import Client
from pagefleet.protos.errors import Unauthenticated

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PAGEFLEET = str(Path(sys.executable).parent / "pagefleet")
KEY, OTHER = "pf-a-tenants-key-0123456789", "pf-anothers-key-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["block", "lease"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the authority's, the server's and the keys' files."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    (folder / "ca.pem").write_bytes(ca.cert_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(b.bytes() for b in issued.cert_chain_pems))
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    entries = [{"tenant": "acme", "sha256": digest_of(KEY).hex()}]
    (folder / "keys.json").write_text(json.dumps({"keys": entries}))
    return folder


@pytest.fixture(scope="module")
def serving(tiny_model: Path, authority: Path) -> Iterator[dict[str, str]]:
    """One key from the file, another from the environment."""
    command = [
        *(PAGEFLEET, "serve", "--grpc-port", "0", "--http-port", "0", "--json"),
        *("--model", str(tiny_model), "--num-blocks", "64"),
        *("--api-key-file", str(authority / "keys.json")),
        *("--tls-cert", str(authority / "cert.pem"), "--tls-key", str(authority / "key.pem")),
    ]
    environment = os.environ | {"PAGEFLEET_API_KEYS": f"other={OTHER}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 0


def test_the_openai_client_gets_json_and_calls_over_https(serving, authority):
    url = f"https://{serving['http']}/v1"
    trusted = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    with httpx.Client(verify=trusted) as http:
        client = openai.OpenAI(base_url=url, api_key=KEY, http_client=http, max_retries=0)
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": "Is it?"}]
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        reply = client.chat.completions.create(
            model=model, messages=question, response_format=wanted, seed=1, max_tokens=200
        )
        assert set(json.loads(reply.choices[0].message.content)) == {"ok", "kind"}
        tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
        reply = client.chat.completions.create(
            model=model,
            messages=question,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
        )
        (call,) = reply.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"ok", "kind"}
        assert client.responses.create(model=model, input="x", max_output_tokens=4).output_text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert http.get(f"https://{serving['http']}/ready").status_code == 200
        headers = {"authorization": f"Bearer {KEY}"}
        assert http.get(f"https://{serving['http']}/metrics", headers=headers).status_code == 403


def test_grpc_with_the_environments_key_and_authority(serving, authority, monkeypatch):
    monkeypatch.setenv("PAGEFLEET_TLS_CA", str(authority / "ca.pem"))
    with Client(serving["grpc"]) as client, pytest.raises(Unauthenticated):
        client.models()
    monkeypatch.setenv("PAGEFLEET_API_KEY", OTHER)
    with Client(serving["grpc"]) as client:
        assert client.models()
