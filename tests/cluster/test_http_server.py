"""The embedded HTTP server's sockets."""

import asyncio
import socket

from starlette.responses import PlainTextResponse

from pagefleet.cluster.http_server import HttpServer


async def test_no_token_waits_for_the_acknowledgement_of_the_last():
    """Its cost cannot be timed on a busy machine, but the option that spares it can be seen."""
    server = HttpServer(PlainTextResponse("yes"))
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    assert b"200" in await reader.readline()
    (connection,) = server._server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await server.stop(0)
