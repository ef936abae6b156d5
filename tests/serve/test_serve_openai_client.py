"""The real `openai` client against a real server: its answers are the model's, whatever else is being served."""

import json
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from little import Server
from openai import OpenAI

from hone.data.text.chat import render_prompt
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder
from hone.model.formats.peft import load_peft
from hone.model.lora import use_adapter
from hone.rollout.local import LocalSampler

HELLO = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(folders: Path) -> Tokenizer:
    return Tokenizer.load(folders / "chatty")


@pytest.fixture(scope="module")
def decoder(folders: Path) -> Decoder:
    made = load_decoder(folders / "chatty")
    load_peft(made, folders / "tuned", name="tuned", train=False)
    return made


def chat(client: OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(**{"model": "chatty", "messages": HELLO, "max_tokens": 24, **settings})


def complete(client: OpenAI, **settings: Any) -> Any:
    return client.completions.create(**{"model": "chatty", "prompt": "the cat", "max_tokens": 24, **settings})


def expected(decoder: Decoder, tokenizer: Tokenizer, prompt: list[int], *, n: int = 1, **settings: Any) -> list[str]:
    """What LocalSampler writes, without the stop token."""
    adapter = settings.pop("adapter", None)
    params = SampleParams(**{"max_tokens": 24, "stop_ids": tokenizer.stop_ids, **settings})
    with use_adapter(decoder, adapter):
        group = LocalSampler(decoder).sample([prompt], n=n, params=params)[0]
    written = [[t for t in r.tokens[len(prompt) :] if t not in tokenizer.stop_ids] for r in group]
    return [tokenizer.decode(tokens, specials=False) for tokens in written]


def test_the_models_are_the_base_and_its_adapters(client: OpenAI):
    listed = list(client.models.list())
    assert [model.id for model in listed] == ["chatty", "tuned"]
    assert [client.models.retrieve(model.id) for model in listed] == listed
    with pytest.raises(openai.NotFoundError, match="this server has chatty, tuned") as caught:
        client.models.retrieve("someone/nothing")
    assert caught.value.code == "model_not_found"


def test_greedy_is_the_samplers(client: OpenAI, decoder: Decoder, tokenizer: Tokenizer):
    (text,) = expected(decoder, tokenizer, render_prompt(tokenizer, HELLO), temperature=0.0)
    answer = chat(client, temperature=0)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    (plain,) = expected(decoder, tokenizer, tokenizer.encode("the cat"), temperature=0.0)
    assert complete(client, temperature=0).choices[0].text == plain


def test_four_choices_are_the_samplers_four(client: OpenAI, decoder: Decoder, tokenizer: Tokenizer):
    texts = expected(decoder, tokenizer, render_prompt(tokenizer, HELLO), n=4, seed=7, temperature=0.8, top_p=0.9)
    answer = chat(client, n=4, seed=7, temperature=0.8, top_p=0.9)
    assert [choice.message.content for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4


def test_an_adapter_answers_under_its_name(client: OpenAI, decoder: Decoder, tokenizer: Tokenizer):
    prompt = render_prompt(tokenizer, HELLO)
    base, tuned = (expected(decoder, tokenizer, prompt, temperature=0.0, adapter=name)[0] for name in (None, "tuned"))
    assert base != tuned
    for model, text in (("chatty", base), ("tuned", tuned), ("chatty", base)):
        answer = chat(client, model=model, temperature=0)
        assert (answer.model, answer.choices[0].message.content) == (model, text)


def test_adapters_asked_for_at_the_same_time_do_not_mix(client: OpenAI):
    alone = {model: chat(client, model=model, seed=3).choices[0].message.content for model in ("chatty", "tuned")}
    with ThreadPoolExecutor(16) as pool:
        names = ["chatty", "tuned"] * 12
        answers = list(pool.map(lambda model: chat(client, model=model, seed=3).choices[0].message.content, names))
    assert answers == [alone[name] for name in names]


def test_fifty_clients_get_what_each_would_get_alone(server: Server):
    def ask(i: int) -> str:  # over a connection of its own
        body = {"model": "chatty", "prompt": "the cat", "seed": i, "max_tokens": 10 + i}
        return server.ask("POST", "/v1/completions", body)[2]["choices"][0]["text"]

    alone = [ask(i) for i in range(50)]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(ask, range(50))) == alone
    assert server.idle()["free_blocks"] == 8


def test_the_same_seed_at_the_same_time_gives_the_same_text(client: OpenAI):
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda _: complete(client, seed=-5).choices[0].text, range(12)))
    assert len(set(texts)) == 1
    others = {complete(client).choices[0].text for _ in range(5)}
    assert len(others) == 5  # without a seed, each time another


def streamed(parts: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Text and finish reason by choice, and all chunks."""
    texts, finish, chunks = defaultdict[int, str](str), dict[int, str](), list(parts)
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] += piece or ""
            if choice.finish_reason:
                assert choice.index not in finish
                finish[choice.index] = choice.finish_reason
    return dict(texts), finish, chunks


@pytest.mark.parametrize("settings", [{"n": 3, "seed": 1}, {"temperature": 0}, {"seed": 4, "stop": ["e", "a"]}])
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, settings: dict[str, Any]):
    for ask in (chat, complete):
        whole = ask(client, max_tokens=200, **settings)
        texts, finish, chunks = streamed(ask(client, max_tokens=200, stream=True, **settings))
        said = [c.message.content if ask is chat else c.text for c in whole.choices]
        assert [texts[i] for i in range(len(said))] == said
        assert [finish[i] for i in range(len(said))] == [c.finish_reason for c in whole.choices]
        assert len({chunk.id for chunk in chunks}) == 1
        assert len(chunks) > len(said)


def test_a_chat_stream_begins_with_the_role_and_may_end_with_the_usage(client: OpenAI):
    whole = chat(client, seed=1, n=2)
    _, _, chunks = streamed(chat(client, seed=1, n=2, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_counts_the_tokens(client: OpenAI, tokenizer: Tokenizer):
    usage = chat(client, n=3, logit_bias={str(tokenizer.eos_id): -100}).usage
    prompt = len(render_prompt(tokenizer, HELLO))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 72, prompt + 72)


def test_the_stop_token_ends_an_answer_at_once(client: OpenAI, tokenizer: Tokenizer):
    answer = chat(client, logit_bias={str(tokenizer.eos_id): 100}, logprobs=True)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, answer.usage.completion_tokens) == ("", "stop", 1)
    assert choice.logprobs.content == []
    assert chat(client, logit_bias={str(tokenizer.eos_id): -100}).choices[0].finish_reason == "length"


def test_no_part_of_a_stop_string_is_told(client: OpenAI, tokenizer: Tokenizer):
    free = complete(client, seed=2, max_tokens=120, logit_bias={str(tokenizer.eos_id): -100}).choices[0].text
    clean = [i for i in range(20, len(free) - 3) if "\ufffd" not in free[i : i + 3]]
    for i in clean[:: max(1, len(clean) // 4)]:
        stop = free[i : i + 3]
        settings = {"seed": 2, "max_tokens": 120, "stop": [stop], "logit_bias": {str(tokenizer.eos_id): -100}}
        want = free[: free.index(stop)]
        whole = complete(client, **settings).choices[0]
        texts, finish, _ = streamed(complete(client, stream=True, **settings))
        assert (whole.text, whole.finish_reason, texts[0], finish[0]) == (want, "stop", want, "stop")


def test_no_piece_of_a_stream_ends_inside_a_character(client: OpenAI, tokenizer: Tokenizer):
    ids = tokenizer.encode("日😀€")
    bias = {str(i): 100.0 - 5 * k for k, i in enumerate(ids)}
    _, _, chunks = streamed(complete(client, stream=True, logit_bias=bias, max_tokens=200, temperature=2, seed=0))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert any(ord(c) > 127 for c in text)
    assert json.loads(json.dumps(text)) == text
    whole = complete(client, logit_bias=bias, max_tokens=200, temperature=2, seed=0).choices[0].text
    assert text == whole


def test_log_probs_are_those_of_the_model(client: OpenAI, decoder: Decoder, tokenizer: Tokenizer):
    prompt = tokenizer.encode("the cat")
    settings = {"seed": 3, "temperature": 0.5, "top_k": 50, "repetition_penalty": 1.3}
    extra = {name: settings.pop(name) for name in ("top_k", "repetition_penalty")}
    got = (
        complete(client, logprobs=4, logit_bias={str(tokenizer.eos_id): -100}, **settings, extra_body=extra)
        .choices[0]
        .logprobs
    )
    bias = {tokenizer.eos_id: -100.0}
    params = SampleParams(max_tokens=24, stop_ids=tokenizer.stop_ids, bias=bias, **settings, **extra)
    with use_adapter(decoder, None):
        tokens = list(LocalSampler(decoder).sample([prompt], n=1, params=params)[0][0].tokens)
        with torch.inference_mode():
            logits = decoder.logits(decoder(torch.tensor([tokens])))[0]
    logp = logits.float().log_softmax(-1)
    written = [t for t in tokens[len(prompt) :] if t not in tokenizer.stop_ids]
    assert len(got.tokens) == len(written) == 24
    for k, token in enumerate(written):
        at = logp[len(prompt) + k - 1]
        assert math.isclose(got.token_logprobs[k], at[token].item(), abs_tol=1e-4)
        best = sorted(got.top_logprobs[k].values(), reverse=True)[:4]
        torch.testing.assert_close(torch.tensor(best), at.topk(4).values, atol=1e-4, rtol=0)
    assert got.text_offset[0] == 0


def test_log_probs_of_a_chat_have_bytes_that_make_up_the_text(client: OpenAI):
    choice = chat(client, seed=5, logprobs=True, top_logprobs=3).choices[0]
    entries = [e for e in choice.logprobs.content if not e.token.startswith("<|")]
    assert b"".join(bytes(e.bytes) for e in entries).decode(errors="replace") == choice.message.content
    assert all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in entries)


def test_log_probs_of_a_stream_are_those_of_the_whole(client: OpenAI):
    whole = chat(client, seed=5, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    parts = list(chat(client, seed=5, logprobs=True, top_logprobs=2, stream=True))
    found = [e for part in parts for c in part.choices if c.logprobs for e in c.logprobs.content]
    assert [e.token for e in found] == [e.token for e in whole]
    for a, b in zip(found, whole, strict=True):
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4)


def test_prompts_in_a_list_are_answered_in_order(client: OpenAI, tokenizer: Tokenizer):
    texts = ["the cat", "one two", "€5"]
    one = [complete(client, prompt=text, temperature=0).choices[0].text for text in texts]
    many = complete(client, prompt=texts, temperature=0)
    assert [choice.text for choice in many.choices] == one
    ids = complete(client, prompt=[tokenizer.encode(text) for text in texts], temperature=0)
    assert [choice.text for choice in ids.choices] == one
    assert complete(client, prompt=tokenizer.encode(texts[2]), temperature=0).choices[0].text == one[2]
    twice = complete(client, prompt=texts[:2], n=2, seed=1)
    assert [choice.index for choice in twice.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in twice.choices}) == 4


def test_the_default_length_is_openais(client: OpenAI, tokenizer: Tokenizer):
    bias = {str(tokenizer.eos_id): -100}
    assert client.completions.create(model="chatty", prompt="a", logit_bias=bias).usage.completion_tokens == 16
    short = chat(client, max_tokens=openai.omit, max_completion_tokens=5, logit_bias=bias)
    assert short.usage.completion_tokens == 5


def test_the_next_turn_of_a_chat_finds_the_answer_before_it_in_memory(
    server: Server, client: OpenAI, tokenizer: Tokenizer
):
    (word,) = tokenizer.encode("the")
    said = {"temperature": 0, "max_tokens": 70, "logit_bias": {str(word): 100}}
    answer = chat(client, **said).choices[0].message.content
    assert tokenizer.encode(answer) == [word] * 70
    talk = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    before, first = server.idle(), len(render_prompt(tokenizer, HELLO))
    chat(client, messages=talk, **said)
    assert server.idle()["saved"] - before["saved"] == (first + 69) // 32 * 32


def test_the_developer_is_the_system(client: OpenAI):
    developer = [{"role": "developer", "content": "be kind"}, HELLO[1]]
    assert chat(client, messages=developer, temperature=0).choices == chat(client, temperature=0).choices


def test_errors_are_the_clients_own(server: Server, client: OpenAI):
    wrong = OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="token"):
        chat(wrong)
    with pytest.raises(openai.NotFoundError, match="chatty, tuned"):
        chat(client, model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        chat(client, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, messages=[{"role": "user", "content": "x" * 5000}], stream=True)
