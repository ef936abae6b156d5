"""Python in the pages for readers, run on a small model in place of the demo's."""

import re
from pathlib import Path

import pytest
from small import World, metrics

from hone.data.text.chat import render_prompt
from hone.engine.params import SampleParams
from hone.model.formats.folder import load_decoder
from hone.rollout.local import LocalSampler
from hone.types import Stop

ROOT = Path(__file__).parents[2]
DEMO = "runs/demo/sft/model"


def example(page: str, world: World) -> str:
    """The page's first example."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[0]
    assert DEMO in found
    return found.replace(DEMO, world / "model")


def test_the_readme_trains_from_python(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(example("README.md", world), {})
    assert [row["step"] for row in metrics(tmp_path / "runs/mine")] == [1, 2, 3]


def test_the_sampler_from_python(world: World, capsys: pytest.CaptureFixture[str]):
    names = dict[str, object]()
    exec(example("docs/sampler.md", world), names)
    shown = capsys.readouterr().out
    streamed = sorted(re.findall(r"prompt (\d), sample (\d): \d+ tokens", shown))
    assert streamed == [(str(i), str(j)) for i in range(2) for j in range(4)]


def test_what_the_page_says_of_rollouts(world: World):
    tokenizer, decoder = world.tokenizer, load_decoder(world / "model")
    context, prompt = decoder.config.max_position_embeddings, render_prompt(tokenizer, "1+1=")
    sampler = LocalSampler(decoder, decode=tokenizer.decode)

    def written(**settings: object):
        params = SampleParams(**({"max_tokens": 10 * context, "stop_ids": frozenset()} | settings))  # type: ignore[arg-type]
        return sampler.sample([prompt], n=1, params=params)[0][0]

    capped = written()
    assert (capped.stop, capped.limit, len(capped.tokens)) == (Stop.LENGTH, context - len(prompt), context)
    assert capped.text == ""
    text = tokenizer.decode(capped.written())
    [mark, *_] = re.findall(r"[!-~]{2}", text)
    ended = written(stop=(mark,))
    assert ended.stop == Stop.STRING
    assert ended.text == text[: text.index(mark)]
    stopped = written(stop_ids=frozenset({capped.written()[4]}))
    assert (stopped.stop, stopped.text) == (Stop.TOKEN, "")
    assert stopped.written()[-1] == capped.written()[4]
