"""A template that rewrites history, and tools of a row: through the recipe's settings down to the tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import World, recipe

import hone
from hone.launch import build
from hone.launch.job import prepare

REWRITES = (  # as reasoning models do: only the last answer keeps its thought
    "{%- for m in messages -%}{{ m.role[0] }}:{%- set end = m.content.split('!')[-1] -%}"
    "{{ end if m.role == 'assistant' and not loop.last else m.content }}"
    "{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}a:{%- endif -%}"
)
TOOLS = "{%- if tools -%}{{ tools[0].function.name }}{%- endif -%}" + REWRITES
CHAT = [
    {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "12!2"},
    {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "22!4"},
]  # fmt: skip


def model_with(template: str, world: World, folder: Path) -> str:
    """The world's model with another chat template."""
    import shutil

    source = build.resolve(recipe(world, "sft", folder).model.path)
    shutil.copytree(source, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    return str(folder / "model")


def test_a_chat_is_trained_in_rows_where_its_template_rewrites_it(world: World, tmp_path: Path):
    rows = [{"messages": CHAT}]
    made = replace(
        recipe(world, "sft", tmp_path / "run", f"model.path={model_with(REWRITES, world, tmp_path)}"), data=rows
    )
    with pytest.raises(hone.HoneError, match=r"read\.turns=split"):
        prepare(made)
    ready = prepare(replace(made, read=replace(made.read, turns="split")))
    (group,) = ready.source.take(1)
    texts = [ready.tokenizer.decode([t for t, m in zip(r.tokens, r.mask, strict=True) if m]) for r in group]
    assert [text.removesuffix(ready.tokenizer.eos) for text in texts] == ["12!2", "22!4"]
    seen = [ready.tokenizer.decode([t for t, m in zip(r.tokens, r.mask, strict=True) if not m]) for r in group]
    assert "12!" not in seen[1]
    assert hone.run(replace(made, read=replace(made.read, turns="split"))).is_dir()


def test_the_tools_of_a_problem_are_in_its_prompt(world: World, tmp_path: Path):
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    rows = [{"prompt": CHAT[:1], "answer": "2", "tools": [tool]}]
    made = recipe(world, "grpo", tmp_path / "run", f"model.path={model_with(TOOLS, world, tmp_path)}")
    ready = prepare(replace(made, data=rows))
    assert ready.roller is not None
    (group,) = ready.roller(ready.source.take(1))
    assert ready.tokenizer.decode(group[0].tokens).startswith("add")
