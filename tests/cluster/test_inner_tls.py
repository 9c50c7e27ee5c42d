"""TLS of the streams inside the cluster: both ends must show the cluster's own certificate."""

from dataclasses import replace
from pathlib import Path

import pytest
from gateway_fakes import FakeLeader, engine_request, lease_of, read_tokens

from pagefleet.cluster.engine_client import EngineClient, ReplicaLost, secure_channels
from pagefleet.cluster.inner_tls import make_stream_tls
from pagefleet.cluster.security import GatewaySecurity, stream_tls_from
from pagefleet.cluster.tls import TlsError, TlsFiles
from pagefleet.workers.stream_tls import StreamTls


@pytest.fixture(scope="module")
def tls() -> StreamTls:
    return make_stream_tls()


async def generate(leader: FakeLeader, client: EngineClient) -> list[int]:
    await leader.start()
    try:
        return await read_tokens(client.submit(lease_of(leader), engine_request("k", 5)))
    finally:
        await client.close()
        await leader.stop()


async def test_both_ends_with_the_clusters_certificate_talk(tls: StreamTls):
    client = EngineClient("gw", secure_channels(tls))
    assert len(await generate(FakeLeader("r0", tls=tls), client)) == 5


@pytest.mark.parametrize("end", ["plaintext", "another cluster", "no certificate"])
async def test_nobody_else_does(tls: StreamTls, end: str):
    other = make_stream_tls()
    clients = {
        "plaintext": EngineClient("gw"),
        "another cluster": EngineClient("gw", secure_channels(other)),
        # trusts the leader, but shows what the leader does not trust
        "no certificate": EngineClient(
            "gw", secure_channels(replace(other, authority=tls.authority))
        ),
    }
    with pytest.raises(ReplicaLost):
        await generate(FakeLeader("r0", tls=tls), clients[end])


def write(folder: Path, tls: StreamTls) -> tuple[Path, Path, Path]:
    paths = (folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    for path, content in zip(paths, (tls.certificate, tls.key, tls.authority), strict=True):
        path.write_bytes(content)
    return paths


def test_an_operators_files_are_read(tls: StreamTls, tmp_path: Path):
    assert stream_tls_from(write(tmp_path, tls)) == tls
    assert stream_tls_from((None, None, None)) is None


def test_files_that_do_not_fit_are_refused_by_name(tls: StreamTls, tmp_path: Path):
    certificate, key, authority = write(tmp_path, replace(tls, key=make_stream_tls().key))
    with pytest.raises(TlsError, match=r"cert\.pem.*not the certificate's"):
        stream_tls_from((certificate, key, authority))
    with pytest.raises(TlsError, match="belong together"):
        stream_tls_from((certificate, None, authority))
    with pytest.raises(TlsError, match=r"nowhere\.pem"):
        stream_tls_from((tmp_path / "nowhere.pem", key, authority))


def test_streams_have_tls_where_clients_have(tls: StreamTls):
    assert GatewaySecurity().with_streams().streams is None
    files = TlsFiles(Path("cert.pem"), Path("key.pem"))
    assert GatewaySecurity(tls=files).with_streams().streams is not None
    assert GatewaySecurity(tls=files, streams=tls).with_streams().streams is tls


def test_no_key_is_printed(tls: StreamTls):
    assert "PRIVATE" not in repr(tls)
