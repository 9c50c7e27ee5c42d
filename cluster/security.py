"""How a gateway is guarded, as plain values: what `pagefleet serve` was told, for the gateway.

Travels to the gateway's process, so it holds files' names and hashes, never a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .access import Access
from .api_keys import ApiKey, KeyRing, SecurityError, keys_from_environment
from .tls import TlsError, TlsFiles, check_files

__all__ = ["GatewaySecurity", "SecurityError", "security_from"]


@dataclass(frozen=True, slots=True)
class GatewaySecurity:
    """No keys and no key file: everybody may do everything. No tls: plaintext."""

    keys: tuple[ApiKey, ...] = ()
    key_file: Path | None = None
    tls: TlsFiles | None = None

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


def security_from(
    environment: Mapping[str, str],
    *,
    api_key_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_client_ca: Path | None = None,
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
    security = GatewaySecurity(keys_from_environment(environment), file, tls)
    security.check()
    return security
