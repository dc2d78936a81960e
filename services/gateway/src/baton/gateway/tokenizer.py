"""Text to token ids and back, off the event loop when it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from baton.gateway.admission import too_long
from baton.gateway.chat_template import ChatTemplate
from baton.gateway.dialect import ReasoningFormat, ToolCallFormat, dialect_of
from baton.gateway.errors import RenderedTooLongError, SurrogateError
from baton.gateway.limits import Limit
from baton.gateway.model_folder import ModelFolder
from baton.gateway.reasoning import BEGIN, END
from baton.gateway.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from baton.gateway.token_bytes import TokenBytes
from baton.servicekit import get_logger

log = get_logger(__name__)

#: About a millisecond of work; what is longer goes to a thread.
MAX_INLINE_CHARS = 4096


class PromptTokenizer:
    """One model's tokenizer and chat template. Owns a few threads; `close` ends them."""

    def __init__(self, folder: ModelFolder, *, num_threads: int = 2, calls: ToolCallFormat = "auto", reasoning: ReasoningFormat = "auto") -> None:
        self._tokenizer = folder.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        #: The bytes that a token stands for.
        self.spell = TokenBytes(self._tokenizer)
        self._template = ChatTemplate(folder.chat_template, folder.special_tokens)
        self.dialect = dialect_of(folder.chat_template, self._template.takes_tools, calls, reasoning)
        special = {token: each for token, each in self._tokenizer.get_added_tokens_decoder().items() if each.special}
        self._marks = {token: each.content for token, each in special.items() if each.content in (*self.dialect.marks, BEGIN, END)}
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.eos_token_ids = folder.eos_token_ids
        #: One above the highest token id that can come out; a model's own vocabulary may be padded beyond it.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        #: Tokens of prompt and answer that the model was made for, as its folder says; None: it does not.
        self.context_tokens = folder.context_tokens
        self.bound = folder.token_bound
        if self.bound.reason:
            log.warning("prompts that are too long are tokenised before they are refused: lower --max-body-bytes", reason=self.bound.reason)

    async def encode(self, prompt: Prompt, limit: Limit | None = None) -> list[int]:
        """The prompt's ids; token ids are taken as they are. limit: what is certain to be longer is refused without being tokenised.

        Raises PromptTooLongError, ChatTemplateError, UnsupportedError, RequestError.
        """
        if isinstance(prompt, ChatPrompt):
            if limit is not None and len(prompt.messages) > limit.num_tokens:
                raise too_long(prompt.field, f"{len(prompt.messages)} messages, each of a token or more", limit)
            num_chars = sum(_num_chars(message) for message in prompt.messages) + _offered_chars(prompt)
            return await self._on_thread_if_long(num_chars, self._encode_chat, prompt, limit)
        if isinstance(prompt, TextPrompt):
            return await self._on_thread_if_long(len(prompt.text), self._encode_text, prompt, limit)
        if limit is not None and len(prompt.ids) > limit.num_tokens:
            raise too_long(prompt.field, f"{len(prompt.ids)} tokens", limit)
        return list(prompt.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_chat(self, ids: Sequence[int]) -> str:
        """The same for a chat's answer: special tokens that mark calls or thinking are text."""
        if not self._marks.keys() & set(ids):
            return self.decode(ids)
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if (mark := self._marks.get(token)) is not None:
                parts += [self.decode(run), mark]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self.decode(run)])

    def has_begun_to_think(self, prompt: Sequence[int]) -> bool:
        """Whether a chat's prompt ends inside of what the model thinks."""
        tail: str = self._tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special_tokens=False)
        return tail.rstrip().endswith(BEGIN)

    async def text_of(self, prompt: TextPrompt | TokenPrompt | ChatPrompt) -> str:
        """What a prompt that is no chat says."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt), "a chat has no one text"
        return await self.spell_all(list(prompt.ids), skip_special_tokens=True)

    async def spell_all(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens that are all in the vocabulary."""
        decode = partial(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        if len(ids) <= MAX_INLINE_CHARS:
            text: str = decode()
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, decode)
        return text

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _on_thread_if_long(self, num_chars: int, encode: Any, prompt: Prompt, limit: Limit | None) -> list[int]:
        if num_chars <= MAX_INLINE_CHARS:
            ids: list[int] = encode(prompt, limit)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, encode, prompt, limit)
        return ids

    def _encode_chat(self, prompt: ChatPrompt, limit: Limit | None) -> list[int]:
        most_chars = None if limit is None else self.bound.most_bytes(limit.num_tokens)
        try:
            messages, tools = self.dialect.view(prompt)
            text = self._template.render(messages, most_chars, tools)
        except RenderedTooLongError as error:
            assert limit is not None
            raise too_long(prompt.field, f"{error.num_chars} characters or more, more than {limit.num_tokens} tokens", limit) from error
        return self._ids(text, prompt.field, limit, add_special_tokens=False)

    def _encode_text(self, prompt: TextPrompt, limit: Limit | None) -> list[int]:
        # An empty text is an empty prompt, also for a tokenizer that would put its begin-of-sequence token there.
        return self._ids(prompt.text, prompt.field, limit, add_special_tokens=True) if prompt.text else []

    def _ids(self, text: str, field: str, limit: Limit | None, *, add_special_tokens: bool) -> list[int]:
        if limit is not None and len(text) > limit.num_tokens:
            fewest = self.bound.fewest(text)
            if fewest > limit.num_tokens:
                raise too_long(field, f"{len(text)} characters, {fewest} tokens or more", limit)
        try:
            if len(text) <= MAX_INLINE_CHARS:  # here and now: the lock, once let go, is had again after a switch of threads, three times as late
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            # Of the library's ways to encode, only the batched ones let go of the interpreter's lock.
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except TypeError as error:  # what the library makes of text that UTF-8 cannot spell
            if not any("\ud800" <= char <= "\udfff" for char in text):
                raise
            raise SurrogateError(field, text) from error


def _num_chars(message: dict[str, Any]) -> int:
    """About: what a template writes around a message counts as well."""
    content, calls = message.get("content"), message.get("tool_calls")
    return _FRAME_CHARS + (len(content) if isinstance(content, str) else 0) + (len(str(calls)) if calls else 0)


def _offered_chars(prompt: ChatPrompt) -> int:
    return 0 if prompt.offer is None else sum(len(str(tool.parameters)) + len(tool.description or "") for tool in prompt.offer.tools)


_FRAME_CHARS = 16
#: "<think>" and a line break behind it have fewer.
_TAIL_TOKENS = 8
