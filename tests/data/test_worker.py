"""The worker that handles what comes from outside: it keeps its limits, ends with its parent, and is reused."""

import marshal
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from grouped import to_groups
from template_zoo import QUESTION, said, tokenizer_of

from hone.data.text import template as limits
from hone.data.text.chat import encode_turns, render, render_prompts
from hone.data.text.worker import WORKER, Failed, OverLimit, Worker, first_matches
from hone.errors import HoneError

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
NS = "{% set ns = namespace(s='xx', l=[1], n=9) %}"
GROWING = {
    "replace": "{% set s = 'a' * 9000 %}{{ s | replace('a', s) | replace('a', s) }}",
    "the method": "{% set s = 'a' * 90000 %}{{ s.replace('a', s) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "indent": "{{ ('x\\n' * 99999) | indent('y' * 99999) }}",
    "a wide number": "{{ '%999999999d' % 1 }}",
    "a wide field": "{{ '{:>999999999}'.format(1) }}",
    "a nested width": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format": "{{ '%999999999s' | format('x') }}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "zfill": "{{ 'x'.zfill(2000000000) }}",
    "expandtabs": "{{ ('\\t' * 99).expandtabs(99999999) }}",
    "center": "{{ 'x'.center(2000000000) }}",
    "repetition": "{{ 'ab' * 999999999 }}",
    "lists": "{{ [1] * 999999999 }}",
    "tuples in a filter": "{{ ((1,) * 9999999) | map('string') | list | length }}" * 9,
    "a doubled text": NS + "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled list": NS + "{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "tojson": "{{ ([messages] * 9999999) | tojson(indent=999) }}",
    "xmlattr": "{{ {'a': 'x' * 400000000} | xmlattr }}",
    "upper": "{{ ('x' * 300000000) | upper | lower | title }}",
    "urlize": "{{ ('http://a.b ' * 19999999) | urlize }}",
    "wordwrap": "{{ ('x' * 99999999) | wordwrap(1) }}",
    "text that is written": LOOP + "{{ 'x' * 99999 }}" + END,
    "translate": "{{ ('a' * 99999999).translate({97: 'b' * 99}) }}",
}
ENDLESS = {
    "loops": LOOP * 3 + END * 3,
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a power of a power": "{% set n = 9 ** 9999 %}" + LOOP + "{% set m = n * n * n * n % 7 %}" + END,
    "products": NS + "{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "sort": LOOP + "{% set x = range(99999) | map('string') | sort(reverse=true) | list %}" + END,
    "unique": LOOP + "{% set x = range(99999) | map('string') | unique | list %}" + END,
    "finding": "{% set s = 'a' * 9999999 %}{{ s.count('a' * 99999 + 'b') }}{{ (s ~ 'b').find('a' * 5000000 ~ 'c') }}"
    * 99,
    "splitting": "{% for i in range(99999) %}{% set x = ('a ' * 99999).split() | groupby(0) | list %}{% endfor %}",
}


def outcome(template: str) -> str:
    """The error, or "" where there is none."""
    try:
        render(tokenizer_of("chatml", template), [QUESTION])
    except HoneError as error:
        return str(error)
    return ""


def own_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_templates_that_grow_are_stopped_and_this_process_never_holds_what_they_made(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    monkeypatch.setattr(limits, "MEMORY", 128 << 20)
    render(tokenizer_of("chatml"), [QUESTION])
    before = own_memory()
    for name, template in GROWING.items():
        said = outcome(template)
        assert "its limit" in said or "more than" in said or "OverflowError" in said, f"{name}: {said}"
        assert "\n" not in said, name
    assert own_memory() - before < 300_000, "kilobytes"


def test_templates_that_do_not_end_are_stopped(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    for name, template in ENDLESS.items():
        said = outcome(template)
        assert any(word in said for word in ("0.2 s of processor time", "bits", "memory", "recursion")), (
            f"{name}: {said}"
        )


def test_the_error_names_the_folder_and_the_limit(tmp_path, monkeypatch):
    from hone.data.text.tokenizer import Tokenizer

    monkeypatch.setattr(limits, "SECONDS", 0.2)
    tokenizer_of("chatml", LOOP * 3 + END * 3).save(tmp_path)
    with pytest.raises(HoneError, match=r"0\.2 s of processor time") as caught:
        render(Tokenizer.load(tmp_path), [QUESTION])
    assert f"the chat template of {tmp_path}" in str(caught.value)


def test_after_a_limit_the_next_rendering_is_right():
    for template in (GROWING["repetition"], "{{ 1 / 0 }}", GROWING["a doubled list"]):
        assert outcome(template)
        assert render(tokenizer_of("chatml"), [said("user", "hi")]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_one_process_is_reused():
    render(tokenizer_of("chatml"), [QUESTION])
    assert WORKER._process is not None
    first = WORKER._process.pid
    for _ in range(20):
        render(tokenizer_of("llama31"), [QUESTION])
    assert WORKER._process.pid == first


def test_many_prompts_come_back_in_their_order_and_a_bad_one_is_the_one_that_is_named():
    tok = tokenizer_of("chatml", "{{ messages[0].content ~ messages[0].n // messages[0].k }}")
    rows = [([{"role": "user", "content": f"word {i} ", "n": i, "k": 1}], None) for i in range(700)]
    found = render_prompts(tok, rows)
    assert [tok.decode(ids) for ids in found] == [f"word {i} {i}" for i in range(700)]
    rows[555] = ([{"role": "user", "content": "x", "n": 1, "k": 0}], None)
    with pytest.raises(HoneError, match="zero"):
        render_prompts(tok, rows)


def test_megabytes_go_both_ways_without_a_standstill():
    tok = tokenizer_of("chatml", "{{ messages[0].content }}")
    rows = [([said("user", chr(97 + i) * 3_000_000)], None) for i in range(4)]
    assert [len(render(tok, row[0])) for row in rows] == [3_000_000] * 4
    from hone.data.text.dialogue import Dialogue, prompt_texts

    texts = prompt_texts([Dialogue(tok, row[0]) for row in rows])
    assert [(text[0], len(text)) for text in texts] == [(chr(97 + i), 3_000_000) for i in range(4)]


def test_threads_get_their_own_answers():
    tok, wrong = tokenizer_of("chatml", "{{ messages[0].content }}"), list[str]()

    def work(name: int) -> None:
        for i in range(40):
            text = f"{name} {i} " * (name + 1)
            if render(tok, [said("user", text)]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_a_worker_of_its_own():
    tok = tokenizer_of("chatml", "{{ messages[0].content }}")
    render(tok, [QUESTION])
    assert WORKER._process is not None
    ours, child = WORKER._process.pid, os.fork()
    if not child:
        good = render(tok, [said("user", "child")]) == "child" and WORKER._process.pid != ours
        WORKER.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render(tok, [said("user", "parent")]) == "parent"
    assert WORKER._process.pid == ours


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """Whether it ends; waits as long as the test may take."""
    while alive(pid):
        time.sleep(0.02)
    return True


def test_it_ends_with_its_parent_however_that_ends():
    program = (
        "import sys, os, signal\nfrom hone.data.text.worker import WORKER\n"
        "WORKER.ask('match', ([], []), seconds=1, memory=1 << 28)\nprint(WORKER._process.pid, flush=True)\n"
    )
    for end in ("", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"):
        run = subprocess.run([sys.executable, "-c", program + end], capture_output=True, text=True)
        assert gone(int(run.stdout)), end


def test_closing_leaves_no_process_behind():
    worker = Worker()
    worker.ask("match", ([], []), seconds=1, memory=1 << 28)
    assert worker._process is not None
    pid = worker._process.pid
    worker.close()
    assert not Path(f"/proc/{pid}").exists(), "not even a zombie"


def test_ctrl_c_and_a_kill_from_outside_do_no_harm():
    worker = Worker()
    ask = lambda: worker.ask("match", (["a+"], ["aa", "b"]), seconds=1, memory=1 << 28)  # noqa: E731
    assert ask() == [0, -1]
    assert worker._process is not None
    first = worker._process.pid
    os.kill(first, signal.SIGINT)
    assert ask() == [0, -1]
    assert worker._process.pid == first
    os.kill(first, signal.SIGKILL)
    assert ask() == [0, -1]
    worker.close()


def test_an_interrupted_request_leaves_no_answer_for_the_next():
    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    def soon() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        worker.ask("match", (["(a+)+b"], ["a" * 60]), seconds=20, memory=1 << 28)

    worker = Worker()
    worker.ask("match", ([], []), seconds=1, memory=1 << 28)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stop):
            soon()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert worker.ask("match", (["a"], ["a"]), seconds=1, memory=1 << 28) == [0]
    worker.close()


def test_patterns_have_limits():
    assert first_matches(["b", "a.*"], ["abc", "b", "c"], where="x") == [1, 0, -1]
    with pytest.raises(HoneError, match="x: matching its patterns: it takes more than 2 s of processor time"):
        first_matches(["(a|a)*b"], ["a" * 40], where="x")
    with pytest.raises(HoneError, match="no regular expression"):
        first_matches(["("], ["a"], where="x")


def test_what_a_worker_refuses_is_told():
    with pytest.raises(Failed, match="nothing"):
        WORKER.ask("nothing", None, seconds=1, memory=1 << 28)
    chat = marshal.dumps(("", [], [(None, False)]))
    with pytest.raises(OverLimit, match="64 MiB of memory"):
        WORKER.ask("render", ("{{ 'x' * 999999999 }}", {}, 9, [chat]), seconds=9, memory=64 << 20)


def test_values_that_are_no_json_become_text():
    row = {"role": "user", "content": "hi", "when": datetime(2026, 1, 2, tzinfo=UTC), "of": frozenset({1})}
    assert render(tokenizer_of("chatml", "{{ messages[0].when }}"), [row]) == "2026-01-02 00:00:00+00:00"


def test_the_worker_imports_no_torch():
    program = "import hone.data.text.worker_process, sys; print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "False"]


def test_rows_are_rendered_together_and_come_out_as_one_by_one(monkeypatch):
    tok, asked = tokenizer_of("qwen25"), list[str]()
    chats = [
        [said("user", f"word {i}"), said("assistant", "a b"), said("user", "and?"), said("assistant", "c")]
        for i in range(150)
    ]
    rows = [{"messages": chat} for chat in chats]
    alone = [encode_turns(tok, chat)[0] for chat in chats]
    exchange = Worker._exchange
    monkeypatch.setattr(Worker, "_exchange", lambda self, request: asked.append("one") or exchange(self, request))
    together = to_groups(rows, tok)[0]
    assert [(list(g[0].tokens), list(g[0].mask)) for g in together] == [(list(t), list(m)) for t, m in alone]
    assert len(asked) == 0, "every chat was rendered in a batch"


def test_a_bad_row_among_those_rendered_together_is_told_as_if_it_were_alone():
    rows = [{"messages": [said("user", f"word {i}"), said("assistant", "yes")]} for i in range(80)]
    rows[70] = {"messages": [said("user", "x"), {"role": "assistant", "content": ""}]}
    with pytest.raises(HoneError, match="x row 71: message 2 is an empty assistant turn"):
        to_groups(rows, tokenizer_of("chatml"))
