"""baton.v1.Inference over grpc.aio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2

from baton.gateway import structured
from baton.gateway.answer import Piece
from baton.gateway.callers import Caller, Doorkeeper
from baton.gateway.errors import GatewayError, MalformedBodyError, MissingFieldError, TooManyValuesError, WrongTypeError
from baton.gateway.inference import Inference
from baton.gateway.requests import ChatPrompt, InferenceRequest, Prompt, SamplingOptions, TextPrompt, TokenPrompt
from baton.gateway.structured import Structure
from baton.gateway.tools.offer import NO_PARAMETERS, Offer, Tool, earlier_call, forced_structure, json_object, offer
from baton.gateway.withheld import told
from baton.servicekit import extract
from baton.wire.status import failure_status, status_code, trailing_metadata
from baton.wire.v1 import inference_pb2

SERVICE = "baton.v1.Inference"

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)

#: In one message: gRPC's clients take 4 MiB unless they are told otherwise, and one entry has at most some 250 bytes.
PROMPT_LOGPROBS_AT_ONCE = 4096

_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


class InferenceServicer:
    """One stream a request. A client that leaves ends its room at once: gRPC cancels the handler."""

    def __init__(self, inference: Inference, doorkeeper: Doorkeeper, max_messages: int) -> None:
        """max_messages: more of one chat are refused unread: each is looked at on the event loop."""
        self._inference = inference
        self._doorkeeper = doorkeeper
        self._max_messages = max_messages

    async def Generate(self, request: inference_pb2.GenerateRequest | DecodeError, context: Context) -> None:  # noqa: N802
        accepted_at = time.monotonic()
        try:
            caller = self._caller(context)
            whole = _whole(request)
            await self._answer(_request(whole, _generate_prompt(whole), caller, context, accepted_at), context)
        except GatewayError as error:
            await abort(context, error)

    async def Chat(self, request: inference_pb2.ChatRequest | DecodeError, context: Context) -> None:  # noqa: N802
        accepted_at = time.monotonic()
        try:
            caller = self._caller(context)
            whole = _whole(request)
            await self._answer(_request(whole, _chat_prompt(whole, self._max_messages), caller, context, accepted_at), context)
        except GatewayError as error:
            await abort(context, error)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest | DecodeError, context: Context
    ) -> inference_pb2.ListModelsResponse:
        try:
            self._caller(context)
        except GatewayError as error:
            await abort(context, error)
        return inference_pb2.ListModelsResponse(models=self._inference.models())

    def _caller(self, context: Context) -> Caller:
        """Asked before anything of the request is looked at. Raises UnauthenticatedError, ForbiddenError."""
        return self._doorkeeper.client(authorization(context))

    async def _answer(self, request: InferenceRequest, context: Context) -> None:
        """Writes rather than yields: a cancellation then arrives here at once, not when a generator is collected."""
        async with self._inference.open(request) as answer:
            await asyncio.sleep(0)  # the servers get their starts first: this message takes a write of its own
            await context.write(inference_pb2.GenerateResponse(request_id=answer.request_id, seed=answer.seed, usage=answer.usage))
            several = len(answer.choices) > 1
            first = True
            async for piece in answer:
                for part in batched(answer.prompt_logprobs, PROMPT_LOGPROBS_AT_ONCE) if first else ():
                    await context.write(inference_pb2.GenerateResponse(prompt_logprobs=part))
                first = False
                said = inference_pb2.GenerateResponse(text=piece.text, token_ids=piece.token_ids, logprobs=piece.logprobs, choice=piece.choice)
                if several and piece.finish is not None:
                    said.finish_reason = piece.finish
                if piece.reasoning or piece.calls:
                    _add_chat_parts(said, piece)
                if piece.text or piece.token_ids or piece.reasoning or piece.calls or said.finish_reason:
                    await context.write(said)
            last = inference_pb2.GenerateResponse(request_id=answer.request_id, usage=answer.usage)
            if not several and answer.finish_reason is not None:
                last.finish_reason = answer.finish_reason
            if request.report:
                last.report.CopyFrom(await answer.report())
            await context.write(last)


def register(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """As the generated function does, but a message that cannot be read reaches the servicer: it is the client's mistake, not INTERNAL."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate,
            request_deserializer=_lenient(inference_pb2.GenerateRequest),
            response_serializer=inference_pb2.GenerateResponse.SerializeToString,
        ),
        "Chat": grpc.unary_stream_rpc_method_handler(
            servicer.Chat,
            request_deserializer=_lenient(inference_pb2.ChatRequest),
            response_serializer=inference_pb2.GenerateResponse.SerializeToString,
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            servicer.ListModels,
            request_deserializer=_lenient(inference_pb2.ListModelsRequest),
            response_serializer=inference_pb2.ListModelsResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _lenient(kind: type[M]) -> Callable[[bytes], M | DecodeError]:
    def deserialize(data: bytes) -> M | DecodeError:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return error

    return deserialize


def authorization(context: Context) -> list[str]:
    """The values of that header."""
    return [value for key, value in context.invocation_metadata() or () if key == "authorization" and isinstance(value, str)]


def _whole(request: M | DecodeError) -> M:
    if isinstance(request, DecodeError):
        raise MalformedBodyError("", f"the message cannot be read as protobuf (strings must be UTF-8): {request}")
    return request


def _request(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, prompt: Prompt, caller: Caller, context: Context, accepted_at: float
) -> InferenceRequest:
    remaining_s = context.time_remaining()
    return InferenceRequest(
        model=request.model,
        prompt=prompt,
        sampling=_sampling(request.sampling, prompt.offer if isinstance(prompt, ChatPrompt) else None),
        accepted_at=accepted_at,
        deadline=None if remaining_s is None else accepted_at + remaining_s,
        report=request.report,
        caller=caller,
        request_id=request.request_id,
        priority=request.priority,
        trace=extract(context.invocation_metadata()),
    )


def _sampling(given: inference_pb2.SamplingParams, offered: Offer | None) -> SamplingOptions:
    optional = (
        "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "top_logprobs", "n", "prompt_logprobs",
    )  # fmt: skip
    return SamplingOptions(
        **{name: getattr(given, name) if given.HasField(name) else None for name in optional},  # type: ignore[arg-type]
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        structure=forced_structure(offered, _structure(given.structured) if given.HasField("structured") else None, "tool_choice"),
        names={name: f"sampling.{name}" for name in (*optional, "stop", "stop_token_ids", "logit_bias", "ignore_eos")},
    )


def _structure(given: inference_pb2.StructuredOutput) -> Structure | None:
    field = f"sampling.structured.{given.WhichOneof('format')}"
    match given.WhichOneof("format"):
        case "json_schema":
            return structured.json_schema(given.json_schema, field)
        case "regex":
            return structured.regex(given.regex, field)
        case "grammar":
            return structured.lark(given.grammar, field)
        case "choice":
            return structured.choice(list(given.choice.texts), f"{field}.texts")
        case "json_object":
            return structured.json_object(field) if given.json_object else None
        case _:
            raise MissingFieldError("sampling.structured", "sampling.structured is empty: set one of its formats, or leave it out")


def _add_chat_parts(said: inference_pb2.GenerateResponse, piece: Piece) -> None:
    said.reasoning = piece.reasoning
    for part in piece.calls:
        said.tool_calls.add(index=part.index, id=part.call_id, name=part.name, arguments=part.arguments)


def _generate_prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, "text")
        case "token_ids":
            return TokenPrompt(request.token_ids.ids, "token_ids.ids")
        case _:
            raise MissingFieldError("prompt", "prompt is missing: set text or token_ids")


def _chat_prompt(request: inference_pb2.ChatRequest, max_messages: int) -> ChatPrompt:
    if not request.messages:
        raise MissingFieldError("messages", "messages is empty: a conversation has at least one message")
    if len(request.messages) > max_messages:
        raise TooManyValuesError("messages", f"{len(request.messages)} messages", max_messages)
    messages = [_chat_message(message, f"messages[{number}]") for number, message in enumerate(request.messages)]
    return ChatPrompt(messages, offer=_offer(request))


def _chat_message(message: inference_pb2.ChatMessage, path: str) -> dict[str, Any]:
    if message.role not in _CHAT_ROLES:
        raise WrongTypeError(f"{path}.role", f"{path}.role={message.role!r} is none of {', '.join(_CHAT_ROLES)}")
    for field, of in (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) and message.role != of:
            raise WrongTypeError(f"{path}.{field}", f"{path}.{field} is of role {of}, and role is {message.role}: leave it out")
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    made |= {name: value for name, value in given.items() if value}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        made["tool_calls"] = [earlier_call(one.id, one.name, one.arguments, f"{path}.tool_calls[{number}].arguments") for number, one in calls]
    return made


def _offer(request: inference_pb2.ChatRequest) -> Offer | None:
    tools = []
    for number, tool in enumerate(request.tools):
        path = f"tools[{number}].parameters"
        tools.append(Tool(tool.name, tool.description or None, json_object(tool.parameters, path) or NO_PARAMETERS))
    choice = request.tool_choice.WhichOneof("choice") or "auto"
    if choice == "function":
        return offer(tools, "named", request.tool_choice.function, parallel=not request.single_tool_call)
    return offer(tools, choice, "", parallel=not request.single_tool_call)


async def abort(context: Context, error: GatewayError) -> NoReturn:
    """Ends the call with the error's status and details."""
    status = failure_status(told(error.failure()), error.violations())
    if error.retry_after_s is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
    await context.abort(status_code(status.code), status.message, trailing_metadata(status))
    raise AssertionError("abort returns never")


def batched(items: Sequence[M], size: int) -> Iterator[Sequence[M]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
