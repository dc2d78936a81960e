"""A gRPC client as a process of its own, so that it can be killed and frozen: `python caller.py ADDRESS REQUEST_ID MAX_TOKENS TIMEOUT_S TOKEN...`.

Prints one JSON line a message: {"tokens": [...]}, and at the end {"code", "cause", "origin", "stage", "text"}; code "OK" for a whole answer.
"""

from __future__ import annotations

import json
import sys

import grpc

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from fleet import MODEL

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.status import failure_from_error, origin_name, stage_name
from baton.wire.v1 import common_pb2
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    address, request_id, max_tokens, timeout_s, *prompt = sys.argv[1:]
    sampling = pb.SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=map(int, prompt)), sampling=sampling, request_id=request_id)
    try:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            for message in InferenceStub(channel).Generate(request, timeout=float(timeout_s)):
                say(tokens=list(message.token_ids))
    except grpc.RpcError as error:
        failure = failure_from_error(error, origin=common_pb2.ORIGIN_UNSPECIFIED, cause="")
        code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
        say(code=code, cause=failure.cause, origin=origin_name(failure.origin), stage=stage_name(failure.stage), text=failure.message)
    else:
        say(code="OK")


if __name__ == "__main__":
    main()
