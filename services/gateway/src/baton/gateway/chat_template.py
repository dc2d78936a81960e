"""The model's chat template: conversations to text, in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.gateway.errors import ChatTemplateError, ModelFolderError, RenderedTooLongError, UnsupportedError


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. For serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Templates come with the weights, from whoever made them: they see plain data and cannot reach Python."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """source: None when the model has no template. special_tokens: bos_token, eos_token, ... as the template names them.

        Raises ModelFolderError for a template that does not compile.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if source is None else _environment().from_string(source)
            self._takes_tools = source is not None and "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))
        except jinja2.TemplateError as error:
            raise ModelFolderError(f"the model's chat template does not compile: {error}") from error

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return self._takes_tools

    def render(self, messages: Sequence[Mapping[str, Any]], most_chars: int | None = None, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt that asks the assistant for the next turn. Special tokens are in it: it is encoded without adding any.

        Raises UnsupportedError without a template, ChatTemplateError when the template refuses the messages, RenderedTooLongError as soon as there
        are more than `most_chars` characters.
        """
        if self._template is None:
            raise UnsupportedError("messages", "messages: this model has no chat template; send a prompt to /v1/completions or Generate")
        try:
            parts = self._template.generate(
                messages=[dict(message) for message in messages], tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
            return _joined(parts, most_chars)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError("messages", f"messages: the model's chat template refuses them: {error}") from error


def _joined(parts: Iterator[str], most_chars: int | None) -> str:
    kept: list[str] = []
    num_chars = 0
    for part in parts:
        kept.append(part)
        num_chars += len(part)
        if most_chars is not None and num_chars > most_chars:
            raise RenderedTooLongError(num_chars)
    return "".join(kept)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Dict:
    """In place of Python's own class, whose attributes a template has no business with."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscored names, so that a template cannot plant Python's special ones."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the template's own names
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template cannot set {name!r}")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 # templates write the local date, as transformers does


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own, it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
