"""Text to token ids and back, off the event loop when it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.gateway.chat_template import ChatTemplate
from baton.gateway.errors import RequestError
from baton.gateway.model_folder import ModelFolder
from baton.gateway.requests import ChatPrompt, Prompt, TextPrompt

#: About a millisecond of work; what is longer goes to a thread.
MAX_INLINE_CHARS = 4096


class PromptTokenizer:
    """One model's tokenizer and chat template. Owns a few threads; `close` ends them."""

    def __init__(self, folder: ModelFolder, *, num_threads: int = 2) -> None:
        self._tokenizer = folder.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(folder.chat_template, folder.special_tokens)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.eos_token_ids = folder.eos_token_ids
        #: One above the highest token id that can come out; a model's own vocabulary may be padded beyond it.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    async def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's ids; token ids are taken as they are. Raises ChatTemplateError, UnsupportedError, RequestError."""
        if isinstance(prompt, ChatPrompt):
            return await self._on_thread_if_long(sum(_num_chars(message) for message in prompt.messages), self._encode_chat, prompt)
        if isinstance(prompt, TextPrompt):
            return await self._on_thread_if_long(len(prompt.text), self._encode_text, prompt)
        return prompt.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _on_thread_if_long(self, num_chars: int, encode: Any, prompt: Prompt) -> list[int]:
        if num_chars <= MAX_INLINE_CHARS:
            ids: list[int] = encode(prompt)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, encode, prompt)
        return ids

    def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        return self._ids(self._template.render(prompt.messages), prompt.field, add_special_tokens=False)

    def _encode_text(self, prompt: TextPrompt) -> list[int]:
        # An empty text is an empty prompt, also for a tokenizer that would put its begin-of-sequence token there.
        return self._ids(prompt.text, prompt.field, add_special_tokens=True) if prompt.text else []

    def _ids(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # Of the library's ways to encode, only the batched ones let go of the interpreter's lock.
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except TypeError as error:  # what the library makes of text that UTF-8 cannot spell
            lone = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
            if lone is None:
                raise
            raise RequestError(field, f"{field} has the lone surrogate \\u{ord(lone):04x}: it is not Unicode text") from error


def _num_chars(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0
