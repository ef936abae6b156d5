"""A real model of 260 thousand parameters: it writes stories, and learns a simple reward in seconds."""

import json
import os
from pathlib import Path

import pytest
import torch

import hone
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.model.formats.cache import resolve
from hone.model.formats.fetch import fetch
from hone.model.formats.folder import load_decoder
from hone.model.formats.llama2c import load_llama2c
from hone.rollout.local import LocalSampler

torch.set_num_threads(1)
SHARED = Path(__file__).parents[3] / "shared" / "data"
FILES = [Path(os.environ.get("HONE_DATA", SHARED)) / "stories260K" / name for name in ("stories260K.bin", "tok512.bin")]
pytestmark = pytest.mark.skipif(not FILES[0].is_file(), reason="stories260K is not here: set HONE_DATA to its folder")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HONE_DATA", str(FILES[0].parents[1]))
        patch.setenv("HONE_HOME", str(tmp_path_factory.mktemp("home")))
        yield fetch("stories260k", note=lambda text: None)


def test_it_tells_a_story(fetched: Path):
    decoder, tokenizer = load_decoder(fetched), Tokenizer.load(fetched)
    assert sum(p.numel() for p in decoder.parameters()) == 260_032
    params = SampleParams(max_tokens=60, temperature=0.0, stop_ids=tokenizer.stop_ids)
    prompt = [*tokenizer.start_ids, *tokenizer.encode("Once upon a time")]
    ((rollout,),) = LocalSampler(decoder).sample([prompt], n=1, params=params)
    text = tokenizer.decode(rollout.tokens)
    assert "Once upon a time, there was a little girl named Lily. She loved to play" in text
    assert prompt[0] == tokenizer.bos_id


def test_transformers_reads_what_was_fetched(fetched: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    decoder, tokenizer = load_decoder(fetched), Tokenizer.load(fetched)
    for text in ("Once upon a time", "Tom's dog, big and  red!", "née 漢 \n"):
        assert AutoTokenizer.from_pretrained(fetched)(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(
            text
        )
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = torch.tensor([tokenizer.encode("One day, a girl saw a cat.")])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(fetched)(ids).logits
        torch.testing.assert_close(decoder.logits(decoder(ids)), theirs, rtol=1e-4, atol=1e-4)


def test_it_learns_a_simple_reward_in_seconds(fetched: Path, tmp_path: Path):
    def about_her(completion: str) -> float:
        words = [word.strip('.,!"').lower() for word in completion.split()]
        return sum(word in ("she", "her", "lily") for word in words) / max(len(words), 1)

    hone.run(
        hone.Recipe(
            model=hone.ModelSpec(path=str(fetched)),
            data=[{"prompt": text} for text in ("Once upon a time", "One day", "Tom and", "There was")],
            reward=about_her,
            algo=hone.algo.grpo(beta=0.0),
            sample=hone.SampleSpec(group=16, max_tokens=30),
            train=hone.TrainSpec(steps=7, prompts=4, threads=1),
            optim=hone.OptimSpec(lr=1e-3),
            out=str(tmp_path),
        )
    )
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rewards[-1] > 2 * rewards[0]


@pytest.mark.parametrize("size", [0, 20, 28, 5000])
def test_a_file_that_ends_early_is_named(size: int, tmp_path: Path):
    short = tmp_path / "short.bin"
    short.write_bytes(FILES[0].read_bytes()[:size])
    with pytest.raises(HoneError, match=r"llama2\.c|ends before"):
        load_llama2c(short, FILES[1])


def test_a_vocabulary_that_does_not_fit_is_named(tmp_path: Path):
    short = tmp_path / "short.bin"
    short.write_bytes(FILES[1].read_bytes()[:3000])
    with pytest.raises(HoneError, match="vocabulary"):
        load_llama2c(FILES[0], short)


def test_without_the_folder_of_datasets_it_says_where_to_find_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("HONE_DATA", raising=False)
    monkeypatch.setenv("HONE_HOME", str(tmp_path))
    with pytest.raises(HoneError, match="hone fetch stories260k"):
        resolve("stories260k")
    with pytest.raises(HoneError, match="HONE_DATA"):
        fetch("stories260k")
