"""Chat templates in the bounded worker against the same templates in this process, and how soon the worker is up.

10,000 rows are converted as a run converts them, and 10,000 prompts are rendered as a sampler asks for them. Both ways
take turns, after a round of each that warms both. `python -m benchmarks.templates [--quick]`
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.form import Row, main, note, row
from benchmarks.side_by_side import in_turns
from hone.data.text import rendering
from hone.data.text.chat import render, render_prompts
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.launch import feeds

SPECIALS = ("<|im_start|>", "<|im_end|>")
# As SmolLM2 and Qwen write a chat: a system message unless there is one, tools, then turns.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ['user', 'system'] or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' + ('\n' if m.role != 'assistant' else '') }}
{%- else %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QUESTION = "A baker sells {} loaves in the morning and twice as many in the afternoon. How many are sold on that day?"
START = """
import time
begun = time.perf_counter()
from hone.data.text.worker import WORKER
ready = time.perf_counter()
WORKER.ask("match", ([], []), seconds=1, memory=1 << 28)
print(time.perf_counter() - ready)
"""


def tokenizer() -> Tokenizer:
    made = train_bpe([QUESTION] * 3, vocab_size=400, specials=SPECIALS)
    return replace(made, eos="<|im_end|>", chat_template=TEMPLATE)


@contextmanager
def in_process() -> Iterator[None]:
    """Templates are rendered here, as if each were Hone's own."""
    apart = rendering._render_in_worker
    rendering._render_in_worker = lambda chats: [rendering._render_own(chat) for chat in chats]
    try:
        yield
    finally:
        rendering._render_in_worker = apart


def side_by_side(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds in the worker and here."""

    def here() -> None:
        with in_process():
            call()

    took = in_turns({"ours": call, "peer": here}, repeats=repeats, warm=1)
    return took["ours"], took["peer"]


def measure(quick: bool) -> Iterator[Row]:
    """Rows as they are converted for training, prompts as they are rendered for sampling, and the start."""
    number, repeats = (2_000, 5) if quick else (10_000, 7)
    words, asked = tokenizer(), [[{"role": "user", "content": QUESTION.format(i)}] for i in range(number)]
    chats = [
        {"messages": [*talk, {"role": "assistant", "content": f"{3 * i} loaves."}]} for i, talk in enumerate(asked)
    ]
    starts = [float(subprocess.check_output([sys.executable, "-c", START])) for _ in range(3 if quick else 9)]
    took = statistics.median(starts)
    yield row("the worker's start", took, unit="s", goal="<= 0.3", ok=took <= 0.3)
    for name, call in {
        f"{number} chats to tokens": lambda: feeds.groups(chats, words, context=0),
        f"{number} prompts to tokens": lambda: render_prompts(words, [(talk, None) for talk in asked]),
        f"{number} prompts to text": lambda: rendered(words, asked),
    }.items():
        ours, peer = side_by_side(call, repeats)
        yield row(name, ours, unit="s", goal="<= 1.2 x in process", ok=ours <= 1.2 * peer, peer=peer)
    ours, peer = side_by_side(lambda: [render(words, talk) for talk in asked], repeats)
    yield note(f"{number} prompts to text, one request each", ours, unit="s", peer=peer)


def rendered(words: Tokenizer, asked: list[Any]) -> list[str]:
    from hone.data.text.dialogue import Dialogue, prompt_texts

    return prompt_texts([Dialogue(words, talk) for talk in asked])


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
