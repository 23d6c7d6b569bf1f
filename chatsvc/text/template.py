"""Chat templates: messages to token ids, the way the model was trained to see them.

The environment is the one Hugging Face's ``apply_chat_template`` gives to templates, so for ordinary messages the ids
are equal to its. Unlike there, nothing in a message can become a control token: see :mod:`chatsvc.text.marks`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chatsvc.errors import InvalidRequest, ModelError
from chatsvc.ggufmeta import read_gguf_head
from chatsvc.modelfiles import ModelFiles
from chatsvc.text.hf_tokenizer import read_json
from chatsvc.text.marks import PRIVATE, Guard, Marks, leaves
from chatsvc.text.tokenizer import Tokenizer
from chatsvc.text.toolparser import OPEN

PROBE = "hello probe 4711"
_RESULT_TAGS = ("<tool_response>", "</tool_response>")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def load_template(files: ModelFiles, tokenizer: Tokenizer, override: Path | None = None) -> ChatTemplate | None:
    """The model's chat template, or the one in the file ``override``; None when the model brings none.

    Raises: ModelError when it is not valid Jinja, the file cannot be read, or the one in it shows no messages.
    """
    if override is not None:
        try:
            sources = {"default": override.read_text(encoding="utf-8")}
        except OSError as error:
            why = "is a folder, not a file" if override.is_dir() else f"cannot be read: {error.strerror}"
            raise ModelError(f"--chat-template {override} {why}") from error
        except ValueError as error:
            raise ModelError(f"--chat-template {override} cannot be read: {error}") from error
    else:
        sources = _gguf_sources(files.path) if files.format == "gguf" else _hf_sources(files.path)
    template = ChatTemplate(sources, tokenizer) if sources else None
    if template is not None and override is not None and not template.shows(PROBE, tokenizer):
        raise ModelError(f"--chat-template {override} does not show the user's messages: is it a chat template?")
    return template


class ChatTemplate:
    """A compiled chat template; thread-safe.

    Attributes:
        knows_tools: it shows tools, and makes the model write calls inside ``<tool_call>``.

    Args:
        sources: name -> Jinja source. ``default`` is used, or ``tool_use`` (if there is one) when tools are given.

    Raises: ModelError when a source is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer) -> None:
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        literals: list[str] = []
        shows_tools = False
        for name, source in sources.items():
            try:
                tree = environment.parse(source)
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                line = getattr(error, "lineno", None)
                raise ModelError(f"the chat template {name!r} is not valid Jinja (line {line}): {error}") from error
            shows_tools = shows_tools or "tools" in jinja2.meta.find_undeclared_variables(tree)
            literals += [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
            literals += [n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
        if "default" not in self._templates:
            raise ModelError(f"no chat template is named default (there are: {', '.join(sorted(sources))})")
        self.knows_tools = shows_tools and any(OPEN in literal for literal in literals)
        tags = [tag for tag in _RESULT_TAGS if tag not in tokenizer.added and any(tag in text for text in literals)]
        self._result_tag = re.compile("|".join(map(re.escape, tags)) or r"(?!)", re.IGNORECASE)
        self._guard = Guard(tokenizer.added.values(), literals)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        assistant_ids: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, BOS included when the template writes one.

        Args:
            messages: OpenAI's messages. No string in them can become an added token.
            add_generation_prompt: end with the head of an assistant message.
            continue_final_message: end inside the last message, which must be the assistant's.
            assistant_ids: message index -> ids that stand for its content, taken over as they are (a closing end
                token that the template writes again is not doubled). Ignored for a message that the template does
                not render exactly once.

        Raises: InvalidRequest (param ``messages``) when the template refuses the messages or fails on them.
        """
        chat = self._without_result_tags(_normalised(messages))
        if continue_final_message:
            if add_generation_prompt:
                raise _bad("continue_final_message and add_generation_prompt exclude each other")
            if chat[-1].get("role") != "assistant" or not isinstance(chat[-1].get("content"), str):
                raise _bad("continue_final_message needs a last message of the assistant with text")
        marks = Marks.choose([*leaves(chat), *leaves(tools)])
        splices = {i: list(ids) for i, ids in (assistant_ids or {}).items() if 0 <= i < len(chat)}
        while True:
            text = self._render(chat, marks, tokenizer, tools, add_generation_prompt, continue_final_message, splices)
            # re.split with one group: text, index, text, index, ..., text.
            cut = re.split(f"{marks.splice}([0-9]+){marks.splice}", text)
            order = [int(index) for index in cut[1::2]]
            lost = {i for i in splices if order.count(i) != 1}
            if not lost:
                return self._join(cut[0::2], [splices[i] for i in order], marks, tokenizer)
            splices = {i: ids for i, ids in splices.items() if i not in lost}

    def shows(self, text: str, tokenizer: Tokenizer) -> bool:
        """Whether a user's message ``text`` stands in what the model is given. True as well when the template refuses
        the message: then it refuses requests, too, and says why."""
        chat = [{"role": "user", "content": text}]
        marks = Marks.choose([text])
        try:
            rendered = self._render(chat, marks, tokenizer, None, True, False, {})
        except InvalidRequest:
            return True
        return text in _clean(rendered, marks)

    def _render(
        self,
        chat: list[dict[str, Any]],
        marks: Marks,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final: bool,
        splices: Mapping[int, Sequence[int]],
    ) -> str:
        marked: list[dict[str, Any]] = self._guard.mark(chat, marks)
        for i in splices:
            marked[i]["content"] = f"{marks.splice}{i}{marks.splice}"
        if continue_final:
            # The space shows whether the template trims contents.
            marked[-1]["content"] += marks.tail + " "
        template = self._templates["default"]
        if tools:
            template = self._templates.get("tool_use", template)
        try:
            text = template.render(
                messages=marked,
                tools=self._guard.mark(tools, marks) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **tokenizer.template_variables,
            )
        except Exception as error:  # whatever a template does with odd input is the input's fault
            raise _bad(f"the model's chat template refuses these messages: {_clean(str(error), marks)}") from error
        if not continue_final:
            return text
        at = text.rfind(marks.tail)
        if at < 0:
            raise _bad("the model's chat template does not show the last message, so it cannot be continued")
        return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()

    def _without_result_tags(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Where a tool's result stands between tags that are plain text, nobody's text may end it or pass for one: a
        backslash inside the tag, as in JSON's ``<\\/tag>``, is the least change that tells them apart."""
        for message in chat:
            if message.get("role") != "assistant" and isinstance(content := message.get("content"), str):
                message["content"] = self._result_tag.sub(lambda m: "<\\" + m.group()[1:], content)
        return chat

    def _join(self, texts: list[str], spliced: list[list[int]], marks: Marks, tokenizer: Tokenizer) -> list[int]:
        ids = tokenizer.encode_parts(self._parts(texts[0], marks, tokenizer, before=spliced[:1]))
        for n, inserted in enumerate(spliced):
            parts = self._parts(texts[n + 1], marks, tokenizer, before=spliced[n + 1 : n + 2])
            if parts and inserted and parts[0] == inserted[-1] and inserted[-1] in tokenizer.eos_token_ids:
                inserted = inserted[:-1]
            ids += inserted
            ids += tokenizer.encode_parts(parts, continuing=True)
        return ids

    def _parts(self, text: str, marks: Marks, tokenizer: Tokenizer, before: list[list[int]]) -> list[str | int]:
        """Rendered text as plain text and added tokens; ``before`` holds the ids that follow it, if any."""
        parts: list[str | int] = []
        for piece, trusted in self._guard.pieces(text, marks):
            for part in tokenizer.split(piece) if trusted else [piece]:
                clean = _clean(part, marks) if isinstance(part, str) else part
                if isinstance(clean, str) and parts and isinstance(parts[-1], str):
                    parts[-1] += clean
                elif clean != "":
                    parts.append(clean)
        last = parts[-1] if parts else None
        if before and before[0] and isinstance(last, str) and last.endswith(" "):
            # "[/INST] " + "▁Hello": the model wrote the space itself, after "[/INST]".
            first = tokenizer.token_bytes(before[0][0])
            if first.startswith(b" "):
                parts[-1:] = [last[:-1]] if len(last) > 1 else []
        return parts


def _normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As Hugging Face hands messages to templates: null fields are absent, reasoning has its known names."""
    if not messages:
        raise _bad("there are no messages")
    chat = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise _bad("a message is not an object")
        plain = {key: value for key, value in message.items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")


def _clean(text: str, marks: Marks) -> str:
    return text.translate({ord(mark): None for mark in (marks.gap, marks.start, marks.end, marks.splice, marks.tail)})


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only passes its body on."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, and no model was trained on that.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # The marks must come through as they are, or they could not be found again.
    return "".join(c if c.isascii() or ord(c) in PRIVATE else json.dumps(c)[1:-1] for c in text)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _gguf_sources(path: Path) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    sources = {}
    for key, value in read_gguf_head(path, longest_list=0).metadata.items():
        if key.startswith(prefix) and isinstance(value, str) and key[len(prefix) : len(prefix) + 1] in ("", "."):
            sources[key[len(prefix) + 1 :] or "default"] = value
    return sources


def _hf_sources(path: Path) -> dict[str, str]:
    config = read_json(path / "tokenizer_config.json").get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(config, str):
        sources["default"] = config
    elif isinstance(config, list):
        sources.update({entry["name"]: entry["template"] for entry in config})
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    try:
        sources.update({name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()})
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template in {path} cannot be read: {error}") from error
    return sources
