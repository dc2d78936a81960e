"""What a room's servers say of its answer: checked, put in order and kept for its one reader. Lives on the event loop; nothing in it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import grpc

from baton.gateway.continuation import ended_by
from baton.gateway.tokens import TokenConflictError, TokenMerge, TokenStream
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

#: Why a server may say that an answer has ended; other reasons are the gateway's own.
_REASONS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class BrokenAnswerError(Exception):
    """The answer cannot go on. Code, origin and cause are the failure's that ends its room."""

    def __init__(self, code: grpc.StatusCode, origin: common_pb2.Origin.ValueType, cause: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.origin = origin
        self.cause = cause


class RoomAnswer:
    """Owned by its room. Tokens come by `merged`, which checks them, and go to the reader by `push`."""

    def __init__(self, start: worker_pb2.Start, *, is_split: bool, max_buffered: int) -> None:
        """is_split: prefill owes the first token, decode the others. max_buffered: tokens that may wait for the reader."""
        #: Those of the request and, in a room that goes on with an answer, those of the answer so far.
        self.num_prompt_tokens = len(start.prompt_token_ids)
        self.stream = TokenStream(max_buffered)
        self.is_complete = False
        #: By number of the token in this answer; taken out by whoever takes the token.
        self.logprobs: dict[int, inference_pb2.TokenLogprobs] = {}
        #: Of the prompt's tokens behind the first, where they were asked for; whole when the first token comes.
        self.prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self._sampling = start.sampling
        self._wants_logprobs = start.sampling.HasField("top_logprobs")
        self._wants_prompt_logprobs = start.sampling.HasField("prompt_logprobs")
        self._first_from = common_pb2.ORIGIN_PREFILL if is_split else common_pb2.ORIGIN_DECODE
        self._merge = TokenMerge(start.sampling.max_tokens)
        self._finished: worker_pb2.Finished | None = None

    @property
    def num_tokens(self) -> int:
        """Those of the answer that are in order."""
        return self._merge.num_delivered

    # --- tokens ---------------------------------------------------------------------------------------------------------------

    def merged(self, first: int, tokens: list[int]) -> Iterable[list[int]]:
        """What is next in the answer with `tokens`, the first of which is number `first`. Each is to be pushed before the next is asked for.

        Raises BrokenAnswerError, here or while iterated over.
        """
        if self._merge.extend(first, tokens):
            self._check_logprobs(len(tokens))
            return (tokens,)
        return self._one_by_one(first, tokens)

    def _one_by_one(self, first: int, tokens: list[int]) -> Iterator[list[int]]:
        for index, token in enumerate(tokens, first):
            try:
                following = self._merge.add(index, token)
            except TokenConflictError as error:
                raise BrokenAnswerError(grpc.StatusCode.INTERNAL, common_pb2.ORIGIN_TRANSFER, "token_conflict", str(error)) from None
            if following:
                self._check_logprobs(len(following))
                yield following

    def begins_with(self, following: list[int]) -> bool:
        """Whether what was merged last has the answer's first token."""
        return self._merge.num_delivered == len(following)

    def push(self, following: list[int]) -> None:
        """Hands tokens to the reader. Raises BrokenAnswerError when it is too far behind."""
        if not self.stream.push(following):
            text = "the client reads more slowly than the answer is made: more tokens wait for it than --max-buffered-tokens allows"
            raise BrokenAnswerError(grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.ORIGIN_CLIENT, "slow_reader", text)

    # --- log probabilities: each comes before its token -----------------------------------------------------------------------

    def take_logprobs(self, index: int, logprobs: inference_pb2.TokenLogprobs) -> None:
        if self._merge.num_delivered <= index < self._sampling.max_tokens:
            self.logprobs.setdefault(index, logprobs)

    def take_prompt_logprobs(self, first: int, logprobs: Sequence[inference_pb2.TokenLogprobs]) -> None:
        if first == len(self.prompt_logprobs) + 1 and first + len(logprobs) <= self.num_prompt_tokens:
            self.prompt_logprobs += logprobs

    def _check_logprobs(self, num_following: int) -> None:
        """Of the tokens that were merged last."""
        end = self._merge.num_delivered
        if self._wants_prompt_logprobs and end == num_following and len(self.prompt_logprobs) < self.num_prompt_tokens - 1:
            text = f"the first token came with {len(self.prompt_logprobs)} of the prompt's {self.num_prompt_tokens - 1} log probabilities"
            raise self._lost(0, text)
        if self._wants_logprobs:
            missing = [index for index in range(end - num_following, end) if index not in self.logprobs]
            if missing:
                text = f"token number {missing[0]} of the answer came without the log probabilities that were asked for"
                raise self._lost(missing[0], text)

    def _lost(self, index: int, text: str) -> BrokenAnswerError:
        """index: number of the first token that is not as it was to be."""
        origin = self._first_from if index == 0 else common_pb2.ORIGIN_DECODE
        return BrokenAnswerError(grpc.StatusCode.INTERNAL, origin, "tokens_lost", text)

    # --- its end --------------------------------------------------------------------------------------------------------------

    def finished(self, said: worker_pb2.Finished) -> None:
        """A server says that the answer has ended; tokens of it may be on their way still."""
        self._finished = said

    def ending(self, *, first_is_owed: bool) -> common_pb2.FinishReason.ValueType | None:
        """Why the answer is complete: it is said to have ended and every token is there. None: not yet.

        first_is_owed: prefill may still send the first token. Raises BrokenAnswerError when tokens are missing that nobody owes.
        """
        if self._finished is None or self.is_complete:
            return None
        if self._finished.reason not in _REASONS:
            text = f"the answer has ended for reason number {self._finished.reason}, which this gateway does not know"
            raise BrokenAnswerError(grpc.StatusCode.INTERNAL, common_pb2.ORIGIN_DECODE, "worker_protocol", text)
        missing = self._finished.completion_tokens - self._merge.num_delivered
        if missing <= 0:
            return self._finished.reason
        if not first_is_owed or missing > self._merge.num_early + 1:
            raise self._lost(self._merge.num_delivered, f"the answer has {self._finished.completion_tokens} tokens, {missing} of them never came")
        return None

    def ending_unsaid(self) -> common_pb2.FinishReason.ValueType | None:
        """Why the tokens that are here are the whole answer, whatever a server has still to say of it; None: they are not."""
        return ended_by(self._sampling, self._merge.tokens)

    def complete(self, reason: common_pb2.FinishReason.ValueType) -> None:
        self.is_complete = True
        self.stream.end(reason)
