"""Chat templates in the public formats of well-known models, and a small tokenizer with each one's special tokens."""
# ruff: noqa: RUF001  DeepSeek writes its tokens with a wide bar

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from hone.data.text.tokenizer import Tokenizer

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SMOLLM2 = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a small friendly model<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA2 = """
{%- set offset = 1 if messages[0].role == 'system' else 0 %}
{%- for m in messages[offset:] %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('users and assistants alternate') }}{% endif %}
{%- if m.role == 'user' %}
{%- set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' if loop.first and offset else '' %}
{{- bos_token + '[INST] ' + (first + m.content).strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

LLAMA3 = """
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA31 = """
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- set given = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- head('system') }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + today + '\n\n' + given + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.role == 'user' and loop.first and tools %}
{{- head('user') + 'You may call these functions:\n\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}
{{- m.content | trim + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' + '<|eot_id|>' }}
{%- elif m.role in ['tool', 'ipython'] %}
{{- head('ipython') }}
{%- if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}
{%- else %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

MISTRAL = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content | string + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool are known here') }}{% endif %}
{%- endfor %}"""

QWEN_TOOLS = """
{%- macro start(given) %}
{{- '<|im_start|>system\n' + given }}
{%- if tools %}
{{- '\n\n# Tools\n\nThe functions you may call:\n<tools>' }}
{%- for t in tools %}{{ '\n' + t | tojson }}{% endfor %}
{{- '\n</tools>\n' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endmacro %}
{%- macro calls(m, lead) %}
{%- for c in m.tool_calls %}
{{- '\n' if lead or not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- macro result(m, before, after) %}
{{- '<|im_start|>user' if before != 'tool' }}
{{- '\n<tool_response>\n' + m.content | string + '\n</tool_response>' }}
{{- '<|im_end|>\n' if after != 'tool' }}
{%- endmacro %}"""

QWEN25 = (
    QWEN_TOOLS
    + """
{%- set own = messages[0].role == 'system' %}
{{- start(messages[0].content if own else 'You are Qwen, a helpful assistant.') }}
{%- for m in (messages[1:] if own else messages) %}
{%- if m.role == 'tool' %}{{ result(m, loop.previtem.role, loop.nextitem.role if not loop.last else '') }}
{%- elif m.tool_calls %}
{{- '<|im_start|>assistant\n' + (m.content or '') + calls(m, m.content) + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

QWEN3 = (
    QWEN_TOOLS
    + """
{%- set own = messages[0].role == 'system' %}
{%- if own or tools %}{{ start(messages[0].content if own else '') }}{% endif %}
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set next = messages[loop.index0 + 1].role if not loop.last else '' %}
{%- if m.role == 'tool' %}{{ result(m, messages[loop.index0 - 1].role, next) }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content if m.content is string else '' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.query and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
{%- set said = said.lstrip('\n') %}
{%- endif %}
{{- said + (calls(m, said) if m.tool_calls else '') + '<|im_end|>\n' }}
{%- elif not (own and loop.first) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)

ZEPHYR = """{% for m in messages %}
{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

PHI3 = """
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

R1 = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.content is none %}
{%- for c in m.tool_calls %}
{{- '<｜Assistant｜><｜tool▁call▁begin｜>' if loop.first else '\n<｜tool▁call▁begin｜>' }}
{{- c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

MARKED = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED_SHORT = MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
)


@dataclass(frozen=True)
class Family:
    """A template and the tokens it writes; the words after them are in no vocabulary."""

    name: str
    template: str
    eos: str
    specials: tuple[str, ...]  # flagged special
    added: tuple[str, ...] = ()  # single tokens that are not special
    stops: tuple[str, ...] = ()
    bos: str | None = None
    system: bool = True
    tools: bool = False
    reasoning: str = ""  # "", "kept until the next question" or "opened by the prompt"
    trims: bool = False


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
L3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
L3_STOPS = ("<|end_of_text|>", "<|eom_id|>")
CALL = ("<tool_call>", "</tool_call>")
QWEN_STOPS = ("<|endoftext|>",)
R1_BOS, R1_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
R1_SPECIALS = (
    R1_BOS,
    R1_EOS,
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
MISTRAL_MARKS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
FAMILIES = [
    Family("chatml", CHATML, "<|im_end|>", IM),
    Family("smollm2", SMOLLM2, "<|im_end|>", IM, bos="<|im_start|>"),
    Family("llama2", LLAMA2, "</s>", ("<s>", "</s>"), bos="<s>", trims=True),
    Family("llama3", LLAMA3, "<|eot_id|>", L3, stops=L3_STOPS, bos="<|begin_of_text|>", trims=True),
    Family("llama31", LLAMA31, "<|eot_id|>", L3, stops=L3_STOPS, bos="<|begin_of_text|>", tools=True, trims=True),
    Family("mistral", MISTRAL, "</s>", ("<s>", "</s>", *MISTRAL_MARKS), bos="<s>", system=False, tools=True),
    Family("qwen25", QWEN25, "<|im_end|>", IM, added=CALL, stops=QWEN_STOPS, tools=True),
    Family(
        "qwen3", QWEN3, "<|im_end|>", IM, added=(*CALL, "<think>", "</think>"), stops=QWEN_STOPS, tools=True,
        reasoning="kept until the next question",
    ),
    Family("zephyr", ZEPHYR, "</s>", ("<s>", "</s>"), bos="<s>"),
    Family(
        "gemma", GEMMA, "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), stops=("<end_of_turn>",),
        bos="<bos>", system=False, trims=True,
    ),
    Family(
        "phi3", PHI3, "<|endoftext|>", ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        stops=("<|end|>", "<|assistant|>"), bos="<|endoftext|>",
    ),
    Family(
        "r1", R1, R1_EOS, R1_SPECIALS, added=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), bos=R1_BOS,
        reasoning="opened by the prompt",
    ),
    Family("marked", MARKED, "<|im_end|>", IM),
    Family("marked_short", MARKED_SHORT, "<|im_end|>", IM),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

WORDS = "the weather in Paris is sunny, I think 2 + 2 = 4.\n\nuser assistant system name arguments parameters"


@lru_cache(maxsize=64)
def tokenizer_of(name: str, template: str | None = None) -> Tokenizer:
    """A byte-level BPE of 400 tokens with the family's special tokens."""
    family = BY_NAME[name]
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = list(family.specials)
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([WORDS] * 4, trainer)
    inner.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in family.added])
    plain = Tokenizer(inner, eos=family.eos, bos=family.bos, stops=family.stops)
    return replace(plain, chat_template=family.template if template is None else template)


def hugging_face(tok: Tokenizer) -> Any:
    """transformers' tokenizer around the same `tokenizers` object."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tok.inner.to_str()), eos_token=tok.eos, bos_token=tok.bos
    )
    theirs.chat_template = tok.chat_template
    return theirs


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a town, now.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
Chat = list[dict[str, Any]]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(town: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", "arguments": {"town": town}}}


QUESTION, ANSWER = said("user", "What is 2 + 2?"), said("assistant", "I think 4.")
PLAIN: dict[str, Chat] = {
    "single": [QUESTION, ANSWER],
    "several turns": [QUESTION, ANSWER, said("user", "And in Paris?"), said("assistant", "sunny, the same.")],
    "empty question": [said("user", ""), ANSWER],
    "unicode": [said("user", "é 日本 🙂\u200d?"), said("assistant", "Ω🙂 e\u0301\n\nnew line")],
    "blanks": [said("user", " \n what "), said("assistant", "\n\n  4 \n")],
    "markup": [said("user", "{{ bos_token }} {% raw %} <b>&amp;</b> [INST"), said("assistant", "| < |im_end| > '\"")],
}
SYSTEM: dict[str, Chat] = {
    "system": [said("system", "Be brief."), *PLAIN["several turns"]],
    "empty system": [said("system", ""), QUESTION, ANSWER],
}
CALLS: dict[str, Chat] = {
    "call": [QUESTION, said("assistant", None, tool_calls=[call("Paris")])],
    "call, result, answer": [
        said("user", "Weather in Paris?"),
        said("assistant", None, tool_calls=[call('Päris "x" <b>')]),
        said("tool", '{"sky": "clear"}', name="get_weather"),
        said("assistant", "It is sunny."),
        said("user", "thanks"),
        said("assistant", "the pleasure is mine"),
    ],
}
THOUGHTS: dict[str, Chat] = {
    "thought": [QUESTION, said("assistant", "4", reasoning_content="2 and 2.\nSo it is 4.")],
    "thoughts": [
        QUESTION,
        said("assistant", "4", reasoning_content="2 and 2"),
        said("user", "sure?"),
        said("assistant", "yes", reasoning_content="I think so"),
    ],
    "thought in the content": [QUESTION, said("assistant", "<think>\n2 and 2\n</think>\n\n4")],
}


def chats_of(family: Family) -> dict[str, tuple[Chat, Sequence[dict[str, Any]] | None]]:
    """The conversations that a family's format has words for, each with its tools."""
    if family.reasoning == "opened by the prompt":
        return {name: (chat, None) for name, chat in THOUGHTS.items()}
    plain = PLAIN | (SYSTEM if family.system else {}) | (THOUGHTS if family.reasoning else {})
    found: dict[str, Any] = {name: (chat, None) for name, chat in plain.items()}
    return found | ({name: (chat, TOOLS) for name, chat in CALLS.items()} if family.tools else {})


def cases() -> list[tuple[str, str]]:
    """Every family with every conversation, by name."""
    return [(family.name, chat) for family in FAMILIES for chat in chats_of(family)]
