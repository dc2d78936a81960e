"""An answer as GenerateResponse messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2

from baton.sglangcompat.session import RoomSession
from baton.wire.v1 import common_pb2


def chunk(request_id: str, tokens: Sequence[int], session: RoomSession, num_prompt: int, num_sent: int) -> Any:
    """tokens: those that are new. num_sent: of the answer, with them."""
    part = sglang_scheduler_pb2.GenerateStreamChunk(
        token_ids=tokens, prompt_tokens=num_prompt, completion_tokens=num_sent, cached_tokens=session.num_resident
    )
    return sglang_scheduler_pb2.GenerateResponse(request_id=request_id, chunk=part)


def complete(request_id: str, session: RoomSession, num_prompt: int) -> Any:
    """The last message. Prefill's answer is its one token: it ends by length."""
    is_stop = session.finished is not None and session.finished.reason == common_pb2.FINISH_REASON_STOP
    whole = sglang_scheduler_pb2.GenerateComplete(
        output_ids=session.token_ids,
        finish_reason="stop" if is_stop else "length",
        prompt_tokens=num_prompt,
        completion_tokens=len(session.token_ids),
        cached_tokens=session.num_resident,
    )
    if is_stop:
        whole.matched_token_id = session.token_ids[-1]
    return sglang_scheduler_pb2.GenerateResponse(request_id=request_id, complete=whole)
