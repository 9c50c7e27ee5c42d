"""Certificates of a gateway's two fronts, read again when their files change.

Knows files and both libraries' credentials, nothing of services. A file that cannot be read, or
a pair that does not fit, leaves what was there before in place.
"""

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .api_keys import SecurityError

if TYPE_CHECKING:  # settings hold the files' names, and pass through processes without gRPC
    import grpc

logger = logging.getLogger(__name__)


class TlsError(SecurityError):
    """The files are no usable certificate and key."""


# PEM files of the streams inside the cluster: certificate, key, authority.
InnerTlsFiles = tuple[Path | None, Path | None, Path | None]
NO_INNER_TLS: InnerTlsFiles = (None, None, None)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: clients need a certificate that one of these has signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes whenever a file does."""
        paths = (self.certificate, self.key, self.client_ca)
        return tuple(None if path is None else _stamp(path) for path in paths)


def check_files(files: TlsFiles) -> None:
    """Raises TlsError where a server could not start with them."""
    try:
        _make_context(files)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise TlsError(f"{files.certificate}, {files.key}: {_reason(error)}") from error


class HttpsContext:
    """An `ssl.SSLContext` whose handshakes use the newest files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._newest = _make_context(files)
        self.context = self._newest
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        """Called in each handshake, also of clients that name no server."""
        stamp = self._files.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._newest = _make_context(self._files)
                logger.info("read the TLS files again")
            except (OSError, ssl.SSLError, ValueError) as error:
                logger.error("the TLS files stay as they were: %s", _reason(error))
        connection.context = self._newest


def grpc_credentials(files: TlsFiles) -> "grpc.ServerCredentials":
    """Server credentials that follow the files. Raises TlsError."""
    import grpc

    check_files(files)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files),
        _Fetcher(files),  # pyright: ignore[reportArgumentType] None is allowed, and documented
        require_client_authentication=files.client_ca is not None,
    )


class _Fetcher:
    """What gRPC calls before each handshake; None = nothing has changed."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()

    def __call__(self) -> "grpc.ServerCertificateConfiguration | None":
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            check_files(self._files)
            return _configuration(self._files)
        except (TlsError, OSError) as error:
            logger.error("the TLS files stay as they were: %s", error)
            return None


def _configuration(files: TlsFiles) -> "grpc.ServerCertificateConfiguration":
    import grpc

    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    roots = None if files.client_ca is None else files.client_ca.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


def _make_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key, password=_no_password)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """Without it, OpenSSL would ask on the terminal for an encrypted key's."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {os.strerror(error.errno or 0)}"
    return str(error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
