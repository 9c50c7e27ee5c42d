"""Keys at both fronts of a live gateway: who gets in, and what stays apart."""

import asyncio
import json
import ssl
from contextlib import aclosing

import grpc
import grpc.aio
import httpx
import openai
import pytest
import trustme
from gateway_fakes import FakeCluster, until

from pagefleet.cluster.access import Access, scoped_salt
from pagefleet.cluster.api_keys import ApiKey, KeyRing, TenantQuota, digest_of
from pagefleet.cluster.client import AsyncClient, RequestOptions
from pagefleet.cluster.gateway_servers import GatewayServers
from pagefleet.cluster.generation import GenerateCall, TextPrompt
from pagefleet.cluster.security import GatewaySecurity, SecurityError, security_from
from pagefleet.cluster.tls import TlsFiles
from pagefleet.protos import errors
from pagefleet.protos.messages import SamplingParams

ACME, OTHER, ADMIN, SHARER = (f"pf-{name}-0123456789abcdef" for name in ("acme", "b", "c", "d"))
KEYS = (
    ApiKey("acme", digest_of(ACME)),
    ApiKey("other", digest_of(OTHER), quota=TenantQuota(requests_per_minute=2)),
    ApiKey("ops", digest_of(ADMIN), is_admin=True),
    ApiKey("sharer", digest_of(SHARER), shares_cache=True),
)
SHORT = SamplingParams(max_tokens=3, seed=1)
LONG = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Guarded(FakeCluster):
    """A fake cluster whose gateway has keys, and TLS if the test says so."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__()
        self.servers = GatewayServers(self.gateway, GatewaySecurity(KEYS, tls=tls))

    async def __aenter__(self) -> "Guarded":
        for leader in self.leaders:
            await leader.start()
        self.addresses = await self.servers.start("127.0.0.1", 0, 0)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.servers.stop(0)
        await super().__aexit__(*failure)

    def client(self, key: str, **options: object) -> AsyncClient:
        return AsyncClient(self.addresses.grpc, api_key=key, **options)

    def http(self, key: str = "", **options: object) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"http://{self.addresses.http}"
        return httpx.AsyncClient(
            **({"base_url": url, "headers": headers, "verify": False} | options)
        )


@pytest.fixture
async def guarded():
    async with Guarded() as made:
        yield made


async def test_grpc_needs_a_key(guarded):
    async with guarded.client("") as client:
        with pytest.raises(errors.Unauthenticated):
            await client.generate("hi", SHORT)
    async with guarded.client("pf-wrong") as client:
        with pytest.raises(errors.Unauthenticated) as caught:
            await client.models()
        assert "pf-wrong" not in str(caught.value)
    async with guarded.client(ACME) as client:
        assert len((await client.generate("hi", SHORT)).text) == 3
    async with guarded.client(ACME, tenant="other") as client:
        with pytest.raises(errors.PermissionDenied):
            await client.generate("hi", SHORT)
    assert {request.tenant for request in guarded.controller.reserved} == {"acme"}


async def test_http_needs_a_key(guarded):
    async with guarded.http() as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            reply = await http.post(path, content=b"{broken")
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/health")).status_code == 200
    async with guarded.http(ACME) as http:
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        named = await http.get("/v1/models", headers={"x-pagefleet-tenant": "other"})
        assert named.status_code == 403
        basic = await http.get("/v1/models", headers={"authorization": f"Basic {ACME}"})
        assert basic.status_code == 401


async def test_openai_client_sends_its_key(guarded):
    url = f"http://{guarded.addresses.http}/v1"
    async with guarded.http() as http:
        for key, expected in ((ACME, None), ("wrong", openai.AuthenticationError)):
            client = openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, max_retries=0)
            if expected is None:
                reply = await client.chat.completions.create(**BODY)
                assert reply.choices[0].message.content
            else:
                with pytest.raises(expected):
                    await client.chat.completions.create(**BODY)


async def test_the_cluster_is_the_admins(guarded):
    async with guarded.client(ACME) as client:
        with pytest.raises(errors.PermissionDenied):
            await client.cluster_state()
        with pytest.raises(errors.PermissionDenied):
            await client.drain("r0")
        with pytest.raises(errors.PermissionDenied):
            await client.reset_prefix_cache()
        with pytest.raises(errors.PermissionDenied):
            await client.update_weights("org/name")
        with pytest.raises(errors.PermissionDenied):
            await anext(client.watch_cluster())
    async with guarded.client(ADMIN) as client:
        assert len((await client.cluster_state()).replicas) == 2
        async with aclosing(client.watch_cluster()) as watch:
            assert (await anext(watch)).decisions
    async with guarded.http(ACME) as http:
        assert (await http.get("/metrics")).status_code == 403
    async with guarded.http(ADMIN) as http:
        reply = await http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        assert 'pagefleet_request_errors_total{code="PERMISSION_DENIED",front="http"} 1' in (
            reply.text
        )


async def test_nobody_cancels_anothers_request(guarded):
    guarded.engine.gate.clear()
    options = RequestOptions(request_id="mine")
    async with guarded.client(ACME) as client, guarded.client(OTHER) as other:
        running = asyncio.create_task(client.generate("hi", LONG, options=options))
        await until(lambda: guarded.engine.num_live == 1, guarded.engine.changed)
        assert await other.cancel("mine") == 0
        assert guarded.engine.num_live == 1
        assert await client.cancel("mine") == 1
        with pytest.raises(errors.RequestCancelled):
            await running
    guarded.engine.gate.set()


async def test_no_tenant_meets_anothers_prefixes(guarded):
    """The same prompt and the same salt: other hashes, so neither a hit nor its timing."""
    options = RequestOptions(cache_salt="same")
    for key in (ACME, OTHER, ACME):
        async with guarded.client(key) as client:
            await client.generate("x" * 64, SHORT, options=options)
    first, second, third = guarded.controller.reserved
    assert first.route_hashes == third.route_hashes
    assert not set(first.route_hashes) & set(second.route_hashes)
    salts = [request.cache_salt for request in guarded.engine.submitted]
    assert salts[0] == salts[2] != salts[1]


def test_a_sharer_cannot_name_its_way_into_a_private_scope():
    access = Access(KeyRing(KEYS))
    call = GenerateCall(TextPrompt("x"), cache_salt=scoped_salt("acme", ""))
    mine = access.identify(f"Bearer {SHARER}").own(call)
    theirs = access.identify(f"Bearer {ACME}").own(GenerateCall(TextPrompt("x")))
    assert mine.cache_salt != theirs.cache_salt
    assert scoped_salt("a", "bc") != scoped_salt("ab", "c")


async def test_quota_is_429_with_a_time(guarded):
    async with guarded.http(OTHER) as http:
        statuses = [
            (await http.post("/v1/chat/completions", json=BODY)).status_code for _ in range(2)
        ]
        reply = await http.post("/v1/chat/completions", json=BODY)
    assert (statuses, reply.status_code) == ([200, 200], 429)
    assert 28 <= int(reply.headers["retry-after"]) <= 30
    async with guarded.client(OTHER) as client:
        with pytest.raises(errors.Overloaded) as caught:
            await client.generate("hi", SHORT)
    assert caught.value.retry_after_s is not None


# -- TLS -------------------------------------------------------------------------------------


class Authority:
    """A certificate authority and what a gateway reads of it."""

    def __init__(self, folder) -> None:
        self.ca = trustme.CA()
        self.files = TlsFiles(folder / "cert.pem", folder / "key.pem")
        self.folder = folder
        self.write()

    def write(self) -> None:
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        self.files.certificate.write_bytes(b"".join(b.bytes() for b in issued.cert_chain_pems))
        self.files.key.write_bytes(issued.private_key_pem.bytes())

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def with_client_ca(self) -> TlsFiles:
        path = self.folder / "clients.pem"
        path.write_bytes(self.pem)
        return TlsFiles(self.files.certificate, self.files.key, path)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


def channel(authority: Authority, client: trustme.LeafCert | None = None):
    if client is None:
        return grpc.ssl_channel_credentials(authority.pem)
    chain = b"".join(blob.bytes() for blob in client.cert_chain_pems)
    return grpc.ssl_channel_credentials(authority.pem, client.private_key_pem.bytes(), chain)


async def https_status(guarded, context: ssl.SSLContext) -> int:
    url = f"https://{guarded.addresses.http}"
    async with guarded.http(ACME, base_url=url, verify=context) as http:
        return (await http.get("/v1/models")).status_code


async def test_tls_at_both_fronts(tmp_path):
    authority = Authority(tmp_path)
    (tmp_path / "wrong").mkdir()
    wrong = Authority(tmp_path / "wrong")
    async with Guarded(authority.files) as guarded:
        async with guarded.client(ACME, credentials=channel(authority)) as client:
            assert len((await client.generate("hi", SHORT)).text) == 3
        async with guarded.client(ACME, credentials=channel(wrong)) as client:
            with pytest.raises(errors.Unavailable):
                await client.models()
        async with guarded.client(ACME) as client:  # plaintext
            with pytest.raises(errors.Unavailable):
                await client.models()
        assert await https_status(guarded, authority.context()) == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await https_status(guarded, wrong.context())


async def test_mutual_tls(tmp_path):
    authority = Authority(tmp_path)
    (tmp_path / "wrong").mkdir()
    wrong = Authority(tmp_path / "wrong")
    ours, theirs = (a.ca.issue_cert("client.example") for a in (authority, wrong))
    async with Guarded(authority.with_client_ca()) as guarded:
        async with guarded.client(ACME, credentials=channel(authority, ours)) as client:
            assert await client.models()
        for certificate in (None, theirs):
            credentials = channel(authority, certificate)
            async with guarded.client(ACME, credentials=credentials) as client:
                with pytest.raises(errors.Unavailable):
                    await client.models()
        context = authority.context()
        with pytest.raises(httpx.HTTPError):
            await https_status(guarded, context)
        ours.configure_cert(context)
        assert await https_status(guarded, context) == 200


async def test_new_certificates_are_read_without_a_restart(tmp_path):
    authority = Authority(tmp_path)
    async with Guarded(authority.files) as guarded:
        assert await https_status(guarded, authority.context()) == 200
        authority.ca = trustme.CA()  # from now on, only who trusts the new one gets through
        authority.write()
        assert await https_status(guarded, authority.context()) == 200
        async with guarded.client(ACME, credentials=channel(authority)) as client:
            assert await client.models()
        authority.files.key.write_text("broken")
        assert await https_status(guarded, authority.context()) == 200


def test_what_cannot_start_says_why(tmp_path):
    authority = Authority(tmp_path)
    pair = {"tls_cert": authority.files.certificate, "tls_key": authority.files.key}
    assert security_from({}, **pair).tls is not None
    for wrong in (
        {"tls_cert": pair["tls_cert"]},
        {"tls_client_ca": pair["tls_cert"]},
        {"tls_cert": tmp_path / "none", "tls_key": pair["tls_key"]},
        {"tls_cert": pair["tls_key"], "tls_key": pair["tls_cert"]},
        {"api_key_file": tmp_path / "none"},
    ):
        with pytest.raises(SecurityError):
            security_from({}, **wrong)
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"tenant": "a", "sha256": digest_of("k").hex()}]}))
    assert security_from({}, api_key_file=path).has_keys
