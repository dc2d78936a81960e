"""An OpenAI-compatible chat server that only sleeps: what a load generator measures of it is known. Prints its address; ends with its standard input.

The first token comes 300 ms after the request and every further one 40 ms after the one before."""

import asyncio
import contextlib
import json
import sys
from typing import Any

FIRST_S, GAP_S = 0.3, 0.04


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request a connection."""
    with contextlib.closing(writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        due_s = asyncio.get_running_loop().time() + FIRST_S
        body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0])))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(body["max_tokens"]):
            # Against the clock: a late wake-up is not handed on to all tokens after it.
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            due_s += GAP_S
            event(writer, body["model"], choices=[{"index": 0, "delta": {"content": " word"}}])
            await writer.drain()
        event(writer, body["model"], choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"], "total_tokens": 1 + body["max_tokens"]}
        event(writer, body["model"], choices=[], usage=usage)
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def event(writer: asyncio.StreamWriter, model: str, **fields: Any) -> None:
    whole = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": model} | fields
    chunk(writer, b"data: " + json.dumps(whole).encode() + b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
