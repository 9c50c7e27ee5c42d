"""The certificates of the streams inside the cluster: from an operator's files, or made at start.

What is made lives as long as the cluster and is written nowhere; its authority's key is dropped as
soon as it has signed. Speaks to nobody.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..workers.stream_tls import STREAM_NAME, StreamTls
from .tls import TlsError

_VALID = timedelta(days=3650)
_CLOCK_SKEW = timedelta(hours=1)
_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def make_stream_tls() -> StreamTls:
    """A new authority and the one certificate it signs, which every part of the cluster shows."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name, name = _name("pagefleet authority"), _name(STREAM_NAME)
    authority = (
        _builder(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(name, authority_name, key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(STREAM_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return StreamTls(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        authority.public_bytes(pem),
    )


def read_stream_tls(certificate: Path, key: Path, authority: Path) -> StreamTls:
    """An operator's files. Raises TlsError where they are not to be read, or do not fit."""
    parts: list[bytes] = []
    for path in (certificate, key, authority):
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise TlsError(f"{path}: {error.strerror or error}") from error
    tls = StreamTls(*parts)
    try:
        _check(tls)
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise TlsError(f"{certificate}, {key}, {authority}: {error}") from error
    return tls


def _check(tls: StreamTls) -> None:
    certificate = x509.load_pem_x509_certificate(tls.certificate)
    key = serialization.load_pem_private_key(tls.key, None)
    x509.load_pem_x509_certificates(tls.authority)
    if certificate.public_key() != key.public_key():
        raise ValueError("the key is not the certificate's")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    if STREAM_NAME not in names.value.get_values_for_type(x509.DNSName):
        raise ValueError(f"the certificate is not made out to the DNS name {STREAM_NAME}")


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
    )
