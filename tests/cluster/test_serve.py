"""What is refused before a cluster starts; starting one is tested in `integration/`."""

import socket

import pytest

from pagefleet.cluster.config import ClusterConfig, CommandError, NamedModel
from pagefleet.cluster.serve import check_ports


def config_with(**ports: int) -> ClusterConfig:
    return ClusterConfig(models=(NamedModel("m", "m"),), host="127.0.0.1", **ports)


@pytest.mark.parametrize(
    ("field", "flag"), [("grpc_port", "--grpc-port"), ("http_port", "--http-port")]
)
def test_a_taken_port_is_named_before_anything_starts(field: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        ports = {"grpc_port": 0, "http_port": 0, field: port}
        with pytest.raises(CommandError, match=f"{flag} {port}: cannot listen on 127.0.0.1"):
            check_ports(config_with(**ports))
    check_ports(config_with(**ports))
