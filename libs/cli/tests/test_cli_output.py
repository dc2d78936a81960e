"""Standard output that is full, closed, or read by nobody: a line and a status, never a traceback."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from baton.wire.v1 import inference_pb2, inference_pb2_grpc

BATON = (sys.executable, "-m", "baton.cli.main")
FULL = "baton: standard output cannot be written: No space left on device\n"


class Talkative(inference_pb2_grpc.InferenceServicer):
    async def ListModels(self, request: object, context: object) -> inference_pb2.ListModelsResponse:  # noqa: N802
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m")])

    async def Chat(self, request: object, context: object) -> AsyncIterator[inference_pb2.GenerateResponse]:  # noqa: N802
        for _ in range(100):
            yield inference_pb2.GenerateResponse(text="on and on ")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    running = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Talkative(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    yield f"127.0.0.1:{port}"
    await running.stop(None)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("model", "list"), ("bench", "--help")])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*BATON, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, FULL)


async def test_also_in_the_middle_of_an_answer(address: str) -> None:
    with open("/dev/full", "wb") as full:  # noqa: ASYNC230 # nothing waits for a device
        chat = await asyncio.create_subprocess_exec(*BATON, "chat", "hello", "--address", address, stdout=full, stderr=subprocess.PIPE)
        _, said = await asyncio.wait_for(chat.communicate(), 60)
    assert (chat.returncode, said.decode()) == (1, FULL)


def test_a_reader_that_has_gone_knows() -> None:
    """As `baton … | head -1` ends."""
    with subprocess.Popen([*BATON, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert (command.stderr.read(), command.wait(60)) == ("", 1)


def test_no_standard_output_at_all() -> None:
    done = subprocess.run(["bash", "-c", '"$@" >&-', "-", *BATON, "--version"], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "baton: standard output is closed: give the command one, as a file or /dev/null\n"
