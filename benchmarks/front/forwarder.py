"""The least that a gateway over grpc.aio can be: every call is made again at the server behind, bytes in, bytes out, nothing read or decided.

    python benchmarks/front/forwarder.py HOST:PORT

What it adds is what grpc.aio itself takes of two calls in a chain: the floor of anything that stands in between in Python.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc.aio
import uvloop

from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS


class Forward(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        behind = self._channel.unary_stream(details.method, request_serializer=None, response_deserializer=None)

        async def forward(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            call = behind(request)
            try:
                while isinstance(message := await call.read(), bytes):
                    await context.write(message)
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(forward)


async def serve(address: str) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        server.add_generic_rpc_handlers((Forward(channel),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(json.dumps({"port": port}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
