"""Requests through an engine to the end."""

from hone.engine.engine import Engine
from hone.engine.requests import Request, RequestOutput
from hone.engine.runner import Runner


def write(runner: Runner, asked: list[Request], budget: int, *, vocab: int) -> dict[int, RequestOutput]:
    """What each wrote, of prompts read `budget` tokens at a time; nothing is left in memory."""
    runner.prefill_tokens = budget
    return go(Engine(runner, vocab_size=vocab), asked)


def go(engine: Engine, asked: list[Request]) -> dict[int, RequestOutput]:
    """The same on an engine that may have written before."""
    engine.submit(asked)
    news: dict[int, RequestOutput] = {}
    while engine.busy:
        news |= {item.id: item for item in engine.step()}
    assert engine.counts.free_blocks == engine.runner.num_blocks
    return news
