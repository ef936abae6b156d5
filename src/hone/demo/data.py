"""The demo's files: what each stage trains on, written down so that anybody can look for a leak."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.demo import world
from hone.demo.sizes import Sizes

FILES = {
    "corpus": "corpus.jsonl",
    "answers": "answers.jsonl",
    "problems": "problems.jsonl",
    "preferences": "preferences.jsonl",
    "held_out": "held_out.jsonl",
}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problem_row(problem: world.Sum) -> dict[str, Any]:
    """A row for a verifier."""
    return {"prompt": problem.prompt, "answer": problem.answer, "problem": problem.key}


def make_data(folder: Path, sizes: Sizes, *, seed: int) -> None:
    """Corpus, worked answers, problems to practise on, and problems to be examined on."""
    rng = random.Random(seed)
    write_rows(folder / FILES["corpus"], ({"text": text} for text in world.corpus(rng, sizes.documents)))
    stream = world.problems(rng)
    answers = (next(stream) for _ in range(sizes.answers))
    rows = ({"prompt": p.prompt, "completion": world.written_answer(p, rng)} for p in answers)
    write_rows(folder / FILES["answers"], rows)
    write_rows(folder / FILES["problems"], map(problem_row, world.distinct(stream, sizes.problems)))
    # the examination is the same for every seed, so that seeds can be compared
    examined = world.distinct(world.problems(random.Random(0), evaluation=True), sizes.held_out)
    write_rows(folder / FILES["held_out"], map(problem_row, examined))


def make_tokenizer(folder: Path, sizes: Sizes) -> Tokenizer:
    """Byte-pair encoding of the corpus and the answers; the four tags are tokens of their own."""
    texts = [
        json.loads(line).get(column, "")
        for name, column in (("corpus", "text"), ("answers", "completion"))
        for line in (folder / FILES[name]).read_text().splitlines()
    ]
    tokenizer = train_bpe(texts, vocab_size=sizes.vocabulary)
    tokenizer.inner.add_tokens(list(world.TAGS))
    tokenizer = Tokenizer(tokenizer.inner, eos=tokenizer.eos, pad=tokenizer.pad)
    tokenizer.save(folder.parent / "tokenizer")
    return tokenizer
