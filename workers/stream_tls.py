"""TLS between gateways and leaders: both ends show a certificate of the cluster's own authority.

Holds PEM bytes and turns them into gRPC's credentials; makes none and reads no file. Certificates
are made out to one name, since addresses change with every replica.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings hold one of these, and the command line reads settings at once
    import grpc

STREAM_NAME = "pagefleet-stream"


@dataclass(frozen=True, slots=True)
class StreamTls:
    """One end's certificate and key, and the authority that has signed the other's, all PEM.

    The key is left out of what is printed.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes

    def server_credentials(self) -> "grpc.ServerCredentials":
        """For a leader: whoever connects needs a certificate of the authority."""
        import grpc

        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> "grpc.ChannelCredentials":
        """For a gateway; the channel needs `CHANNEL_OPTIONS` too."""
        import grpc

        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


# A leader's certificate says the name, not the address that a gateway was given.
CHANNEL_OPTIONS: tuple[tuple[str, str], ...] = (("grpc.ssl_target_name_override", STREAM_NAME),)
