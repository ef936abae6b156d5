"""`hone chat` in a pipe and on a pseudo-terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from each import each
from little import ENVIRONMENT, hone, make_decoder, make_tokenizer
from patience import patience

from hone.cli import main
from hone.data.text.chat import render_prompt
from hone.engine.params import SampleParams
from hone.model.formats.folder import load_decoder
from hone.model.formats.save import save_model
from hone.rollout.local import LocalSampler
from hone.serve.chat import Conversation
from hone.serve.load import load

ESCAPE = re.compile(r"\x1b")


@dataclass
class Done:
    code: int
    out: str
    err: str


Chat = Callable[..., Done]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """The command with these lines as its standard input."""

    def run(folder: Path, lines: str | bytes, *options: str) -> Done:
        raw = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        code = main(["chat", str(folder), *options])
        return Done(code, *capsys.readouterr())

    return run


def test_a_line_of_a_pipe_is_a_turn_and_only_answers_come_out(folders: Path):
    tokenizer, decoder = make_tokenizer(), load_decoder(folders / "chatty")
    options = ("--temperature", "0", "--max-tokens", "12", "--system", "be kind")
    done = hone("chat", str(folders / "chatty"), *options, input="the cat?\n\n")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat?"}]
    prompt = render_prompt(tokenizer, messages)
    params = SampleParams(max_tokens=12, temperature=0.0, stop_ids=tokenizer.stop_ids)
    written = LocalSampler(decoder).sample([prompt], n=1, params=params)[0][0].tokens[len(prompt) :]
    assert done.returncode == 0
    assert done.stdout == tokenizer.decode(written, specials=False) + "\n"
    assert not ESCAPE.search(done.stderr)


def test_a_seed_gives_the_same_answers_again_and_each_turn_its_own(chat: Chat, folders: Path):
    options = ("--seed", "3", "--max-tokens", "9")
    lines = "one\n/reset\none\n"
    one, two = (chat(folders / "chatty", lines, *options) for _ in range(2))
    assert one.out == two.out
    assert chat(folders / "chatty", lines, "--seed", "4", "--max-tokens", "9").out != one.out


def test_commands(chat: Chat, folders: Path, tmp_path: Path):
    file = tmp_path / "talk.json"
    lines = f"one\n/system be brief\ntwo\n/save {file}\n/save {file}\n/save\n/nothing\n/quit\nthree\n"
    done = chat(folders / "chatty", lines, "--seed", "1", "--max-tokens", "5", "--temperature", "0.5")
    saved = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant"]
    assert [m["content"] for m in saved[:2]] == ["be brief", "two"]
    assert "a new conversation, with this system message\n" in done.err
    for words in ("is there already", "name the file", "no command /nothing", "saved in"):
        assert words in done.err
    assert done.code == 0


def test_a_model_without_a_template_goes_on_with_the_text_and_says_so_once(chat: Chat, folders: Path, tmp_path: Path):
    file = tmp_path / "text.json"
    lines = f"the cat\nsat\n/save {file}\n"
    done = chat(folders / "plain", lines, "--temperature", "0", "--max-tokens", "8")
    text = json.loads(file.read_text())["text"]
    assert done.err.count("no chat template") == 1
    assert text.startswith("the cat")
    assert "\nsat" in text
    assert done.out.replace("\n", "") in text.replace("\n", "").replace("sat", "", 1).removeprefix("the cat")


@each("said", ["the cat\n", "the cat"])
def test_a_model_without_a_template_reads_the_line_break_that_ends_a_line_and_no_other(
    chat: Chat, folders: Path, said: str
):
    tokenizer, decoder = make_tokenizer(chats=False), load_decoder(folders / "plain")
    prompt = render_prompt(tokenizer, said)
    params = SampleParams(max_tokens=12, temperature=0.0, stop_ids=tokenizer.stop_ids)
    written = LocalSampler(decoder).sample([prompt], n=1, params=params)[0][0].tokens[len(prompt) :]
    done = chat(folders / "plain", said, "--temperature", "0", "--max-tokens", "12")
    assert done.out == tokenizer.decode(written, specials=False) + "\n"


def test_on_a_terminal_a_backslash_leaves_out_the_line_break(folders: Path, tmp_path: Path):
    seat = Pty(str(folders / "plain"), "--max-tokens", "2", "--temperature", "0")
    seat.until("end a line with \\ to leave out its line break")
    for line, file in (("the cat", "whole.json"), ("the cat\\", "open.json")):
        for typed in ("/reset", line, f"/save {tmp_path / file}"):
            seat.until("> ")
            seat.type(f"{typed}\n")
    seat.until("> ")
    seat.type("/quit\n")
    assert seat.close() == 0
    whole, left_open = (json.loads((tmp_path / f).read_text())["text"] for f in ("whole.json", "open.json"))
    assert whole.startswith("the cat\n")
    assert left_open.startswith("the cat")
    assert "\\" not in left_open[:8]
    assert left_open[7] != "\n"


def test_a_system_message_without_a_template_is_the_text_that_it_begins_with(chat: Chat, folders: Path, tmp_path: Path):
    file = tmp_path / "text.jsonl"
    lines = f"/system\n/system the dog\nsat\n/save {file}\n"
    done = chat(folders / "plain", lines, "--temperature", "0", "--max-tokens", "3")
    assert "a new conversation, without system message\n" in done.err
    assert "a new conversation, which begins with this text\n" in done.err
    assert "with this system message" not in done.err
    assert json.loads(file.read_text())["text"].startswith("the dog\nsat")


def test_a_full_context_is_told_with_the_remedy_and_reset_helps(chat: Chat, folders: Path):
    done = chat(folders / "brief", "the cat\nmore\n/reset\nmore\n", "--temperature", "0")
    assert "the model's context of 64 tokens is full: begin a new conversation with /reset" in done.err
    assert re.search(r"the conversation has \d+ tokens with this line, the model's context is 64", done.err)
    assert done.out.count("\n") >= 2


def test_lines_that_are_no_text_do_not_end_the_chat(chat: Chat, folders: Path):
    done = chat(folders / "chatty", b"x<eos>y\n\xff\xfe\nhello\n", "--max-tokens", "3")
    assert done.code == 0
    assert done.out.strip()
    assert "special token <eos>" in done.err
    assert "line 2 of the input is not UTF-8" in done.err


class Pty:
    """`hone chat` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hone", "chat", *arguments], stdin=slave, stdout=slave, stderr=slave,
            env=environment, start_new_session=True, preexec_fn=lambda: os.set_blocking(0, True),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, words: str, seconds: float = 30.0) -> str:
        """What it showed up to these words, which are then forgotten."""
        end = time.monotonic() + patience(seconds)
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            self.look()
        before, _, self.seen = self.seen.partition(words)
        return before

    def look(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")

    def settle(self, seconds: float = 1.0) -> None:
        """Look until it has shown nothing new for so long."""
        quiet = time.monotonic()
        while time.monotonic() - quiet < patience(seconds):
            before = len(self.seen)
            self.look()
            if len(self.seen) > before:
                quiet = time.monotonic()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        code = self.process.wait()
        os.close(self.master)
        return code


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path: Path):
    tokenizer = make_tokenizer()
    decoder = make_decoder(tokenizer.vocab_size, context=16384)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[tokenizer.eos_id] = 0  # greedy, it never ends by itself
    save_model(decoder, tokenizer, tmp_path / "long")
    seat = Pty(str(tmp_path / "long"), "--max-tokens", "16000", "--temperature", "0", "--seed", "0")
    seat.until("Ctrl-D leaves")
    seat.until("> ")
    seat.type("the cat\n")
    seat.until("the cat\r\n")
    while len(seat.seen) < 20:
        seat.look()
    os.kill(seat.process.pid, signal.SIGINT)
    seat.until("stopped")
    seat.until("> ")
    os.kill(seat.process.pid, signal.SIGINT)  # at the prompt: a line is given up, not the program
    seat.look()
    seat.type("\n")  # readline hears of a signal that came as it began to wait with the next key
    seat.until("> ")
    seat.type("/reset\n")
    seat.until("a new conversation")
    seat.until("> ")
    for _ in range(30):  # whenever it comes
        os.kill(seat.process.pid, signal.SIGINT)
        time.sleep(0.01)
    seat.type("\n")
    seat.settle()
    seat.type("/reset\n")
    seat.until("a new conversation")
    seat.until("> ")  # only now is Ctrl-D a key: between two lines the terminal itself would take it
    seat.type("\x04")
    assert seat.close() == 0


def test_a_model_cannot_send_commands_to_the_terminal(folders: Path):
    seat = Pty(str(folders / "chatty"), "--max-tokens", "400", "--temperature", "3", "--seed", "1")
    seat.until("> ")
    seat.type("hello\n")
    seat.until("hello")
    shown = seat.until("> ", 60)
    seat.type("/quit\n")
    assert seat.close() == 0
    assert not re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]", shown)
    assert set(re.findall(r"\x1b.{3}", shown)) <= {"\x1b[2m", "\x1b[0m"}


def test_8_bits_and_an_adapter_change_the_answers_and_both_at_once_with_invariant_are_refused(
    chat: Chat, folders: Path
):
    options = ("--temperature", "0", "--max-tokens", "40")
    ways = [(), ("--int8",), ("--adapter", str(folders / "tuned")), ("--invariant",)]
    answers = [chat(folders / "chatty", "the cat\n", *options, *way).out for way in ways]
    assert all(answers)
    assert answers[0] != answers[2]
    assert answers[0] == answers[3]
    done = chat(folders / "chatty", "", "--int8", "--invariant")
    assert (done.code, "choose one of invariant and int8" in done.err) == (2, True)


@pytest.mark.parametrize("name", ["chatty", "plain"])
def test_a_turn_reads_only_what_is_new(folders: Path, name: str):
    loaded = load(str(folders / name), adapters={}, max_rows=1, device="cpu")
    params = SampleParams(max_tokens=20, temperature=0.0, stop_ids=frozenset())
    conversation, lengths = Conversation(loaded, params), list[int]()
    for line in ("the cat sat on the mat " * 30, "one two three", "and four"):
        before = loaded.engine.counts
        assert "".join(conversation.say(line, stopped=lambda: False, note=str))
        after = loaded.engine.counts
        saved, read = after.saved - before.saved, after.computed - before.computed
        assert saved == ((lengths[-1] - 1) // 32 * 32 if lengths else 0)  # its last token was never read
        lengths.append(saved + read + after.written - before.written)  # the answer is in memory too
    assert lengths[-1] > lengths[0] > 64


def test_the_tokens_of_earlier_turns_stay_as_they_were_written(folders: Path):
    loaded = load(str(folders / "chatty"), adapters={}, max_rows=1, device="cpu")
    conversation = Conversation(loaded, SampleParams(max_tokens=30, temperature=0.0, stop_ids=frozenset()))
    list(conversation.say("one", stopped=lambda: False, note=str))
    first = list(conversation.history.tokens)  # type: ignore[attr-defined]
    assert not loaded.tokenizer.special_ids & set(first[3:-1])
    asked = conversation.history.prompt("two")
    assert asked[: len(first)] == first
    assert asked[len(first) :] == loaded.tokenizer.encode("<|user|>two<|assistant|>", specials=True)
