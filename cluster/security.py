"""How a gateway is guarded, as plain values: what `pagefleet serve` was told, for the gateway.

Travels to the gateway's process, through the supervisor's, so it holds files' names and hashes,
never a client's key, and what reads or makes certificates is imported where that is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..workers.stream_tls import StreamTls
from .access import Access
from .api_keys import ApiKey, KeyRing, SecurityError, keys_from_environment
from .tls import NO_INNER_TLS, InnerTlsFiles, TlsError, TlsFiles, check_files

__all__ = ["GatewaySecurity", "SecurityError", "security_from", "stream_tls_from"]


@dataclass(frozen=True, slots=True)
class GatewaySecurity:
    """No keys and no key file: everybody may do everything. No tls: plaintext.

    streams: TLS of the streams to the replicas, which have it in their own settings.
    """

    keys: tuple[ApiKey, ...] = ()
    key_file: Path | None = None
    tls: TlsFiles | None = None
    streams: StreamTls | None = None

    @property
    def has_keys(self) -> bool:
        """Clients need one."""
        return bool(self.keys) or self.key_file is not None

    def access(self) -> Access:
        """The door for both fronts. Raises KeysError."""
        return Access(KeyRing(self.keys, self.key_file) if self.has_keys else None)

    def check(self) -> None:
        """Raises KeysError or TlsError for what a gateway could not start with."""
        self.access()
        if self.tls is not None:
            check_files(self.tls)

    def with_streams(self) -> "GatewaySecurity":
        """With certificates made for the streams where clients have TLS and nobody gave any."""
        if self.tls is None or self.streams is not None:
            return self
        from .inner_tls import make_stream_tls

        return replace(self, streams=make_stream_tls())


def security_from(
    environment: Mapping[str, str],
    *,
    api_key_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_client_ca: Path | None = None,
    inner_tls: InnerTlsFiles = NO_INNER_TLS,
) -> GatewaySecurity:
    """Out of a command's options and environment. Raises KeysError and TlsError."""
    if (tls_cert is None) != (tls_key is None):
        raise TlsError("--tls-cert and --tls-key belong together")
    if tls_client_ca is not None and tls_cert is None:
        raise TlsError("--tls-client-ca needs --tls-cert and --tls-key")
    tls = None
    if tls_cert is not None and tls_key is not None:
        ca = None if tls_client_ca is None else tls_client_ca.resolve()
        tls = TlsFiles(tls_cert.resolve(), tls_key.resolve(), ca)
    file = None if api_key_file is None else api_key_file.resolve()
    streams = stream_tls_from(inner_tls)
    security = GatewaySecurity(keys_from_environment(environment), file, tls, streams)
    security.check()
    return security


def stream_tls_from(files: InnerTlsFiles) -> StreamTls | None:
    """What the three files say; None without any. Raises TlsError."""
    certificate, key, authority = files
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise TlsError("--inner-tls-cert, --inner-tls-key and --inner-tls-ca belong together")
    from .inner_tls import read_stream_tls

    return read_stream_tls(certificate, key, authority)
