"""Completions that were written to be paid for nothing, or to harm the verifier: each with the verdict it deserves."""

import json
import resource
import shutil
from pathlib import Path

import pytest
from each import each

from hone.reward.sandbox.sandbox import Language
from hone.reward.score import Reward
from hone.reward.verify import make_verifier
from hone.reward.verify.code.verdict import code_reward
from hone.types import Outcome, Rollout, Task

SUM = Task(prompt="sum", extra={"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n7\n", "10\n7\n"]})
# zero at each of the points at which expressions are compared, but for their offset
VANISHES = "(5x-7)(7x+11)(13x-23)(17x+31)(11x-43)(19x+5)"
ATTACKS = [
    # maths: an answer that is right only where it is tried, two in one place, what is nearly zero, another's spelling
    ("math", rf"\boxed{{{VANISHES}+x}}", "x", 0.0),
    ("math", rf"\boxed{{y=2x+{VANISHES}}}", "y=2x", 0.0),
    ("math", r"\boxed{e^{-9999}}", "0", 0.0),
    ("math", r"\boxed{\frac{1}{3000!}}", "0", 0.0),
    ("math", r"\boxed{5+0x}", "5", 0.0),
    ("math", r"\boxed{\log_{x}x^5}", "5", 0.0),
    ("math", r"\boxed{5\\6}", "5", 0.0),
    ("math", r"\boxed{\text{5}6}", "56", 0.0),
    ("math", r"\boxed{(1,2)\cup(2,3)}", "(1,3)", 0.0),
    ("math", r"\boxed{\text{east, west}}", "east", 0.0),
    ("math", r"\boxed{5}\boxed{}", "5", 0.0),
    ("math", "the answer is $5$, alternatively $6$", "5", 0.0),
    ("math", "the answer is $5$ (or six)", "5", 0.0),
    ("math", "\\boxed{5\u200b0}", "50", 0.0),
    # choice: all the options, or two of them, with the right one in front
    ("choice", "<answer>B. A</answer>", "B", 0.0),
    ("choice", "<answer>(B) A</answer>", "B", 0.0),
    ("choice", "<answer>B. A, C</answer>", "B", 0.0),
    ("choice", "<answer>B) Paris C) Rome D) Oslo</answer>", "B", 0.0),
    ("choice", "<answer>A. Rome\nB. Paris\nC. Oslo</answer>", "A", 0.0),
    ("choice", "The answer is B) as well as C)", "B", 0.0),
    ("choice", "<answer>B. Vitamin C</answer>", "B", 1.0),
    ("choice", "The answer is B as the others are wrong", "B", 1.0),
    # a form with nothing in it
    ("format", "<think>a</think><answer>\u200b\ufeff</answer>", "", 0.0),
    ("format", "<think>a</think><answer>\x00</answer>", "", 0.0),
    ("format", "<think>a</think><answer>.</answer>", "", 1.0),
    # numbers in other money or other digits; words by their looks
    ("numeric:0.01", "€5", "$5", 0.0),
    ("numeric:0.01", "$5", "5", 1.0),
    ("numeric:0.01", "\uff15", "5", 0.0),
    ("numeric:0.01", r"\boxed{5}\boxed{6}", "5", 0.0),
    ("f1", "\u201cParis\u201d", "Paris", 1.0),
    ("f1", "cafe\u0301", "caf\u00e9", 1.0),
    ("f1", "北京市", "北京", 0.8),  # two of three characters, and two of two
    ("f1", "the " * 1000, "Paris", 0.0),
    ("exact", "Paris\u200b", "Paris", 0.0),
]


def judged(name: str, text: str, answer: str = "") -> Outcome:
    row = Rollout(tokens=[1], mask=[True], text=text, task=Task(prompt="q", answer=answer))
    return Reward(make_verifier(name)[0])([row])[0]


@each(("name", "text", "answer", "wanted"), ATTACKS, ids=lambda value: repr(value)[:40])
def test_an_attack_gets_what_it_deserves(name: str, text: str, answer: str, wanted: float):
    outcome = judged(name, text, answer)
    assert outcome.value == pytest.approx(wanted), outcome.reason


@pytest.mark.parametrize(("name", "answer"), [("math", "5"), ("choice", "B"), ("f1", "B"), ("numeric:1", "5")])
def test_boxes_in_boxes_take_no_memory(name: str, answer: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    deep = r"\boxed{" * 12_000 + answer + "}" * 12_000
    assert judged(name, deep, answer).value in (0.0, 1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB; a copy of each: 550 MiB


TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}}


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        (AGE, '{"age": 3}', 1.0),
        (AGE, '{"age": -1, "age": 3}', 0.0),  # which of the two?
        (AGE, '[{"age": -1, "age": 3}]', 0.0),
        ({"multipleOf": 0.1}, "1e400", 0.0),
        (TREE, '{"child": ' * 100 + "{}" + "}" * 100, 1.0),
        (TREE, '{"child": ' * 500 + "{}" + "}" * 500, 0.0),  # deeper than it can be followed: no way to be invalid
        ({"const": 1}, "true", 0.0),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_json_that_is_made_to_break_the_reader_is_wrong_and_not_invalid(
    schema: dict, text: str, wanted: float, tmp_path: Path
):
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    assert judged(f"schema:{tmp_path}/schema.json", text).value == wanted


def test_a_schema_without_end_is_invalid_for_it_is_not_the_completion_that_is_wrong(tmp_path: Path):
    (tmp_path / "schema.json").write_text('{"allOf": [{"$ref": "#"}]}')
    assert judged(f"schema:{tmp_path}/schema.json", "{}").value is None


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("read a b; echo $((a+b)); echo 7", 1.0),
        ("read a b; printf '%d  \\r\\n7\\n\\n\\n' $((a+b))", 1.0),
        ("read a b; printf '%d\\034%d' $((a+b)) 7", 0.0),  # what Python takes for the end of a line, and none else
        ("read a b; printf '%d\\f7' $((a+b))", 0.0),
        ("read a b; echo $((a+b)); echo 7; exit 3", 1.0),  # a code that it chose is not believed
    ],
)
def test_what_a_script_prints_is_judged_by_its_lines_and_its_end(code: str, wanted: float):
    if not shutil.which("bash", path="/usr/bin"):
        pytest.skip("this machine has no bash in /usr/bin")
    language = Language(file="main.sh", run=["bash", "main.sh"])
    assert code_reward(f"```\n{code}\n```", SUM, language=language).value == wanted


@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.skipif(not shutil.which("gcc", path="/usr/bin"), reason="this machine has no gcc in /usr/bin")
@pytest.mark.parametrize(("end", "wanted"), [("", 1.0), ("*(volatile int*)0 = 1;", 0.0), ("abort();", 0.0)])
def test_a_program_that_ran_into_a_signal_did_not_end_by_itself(end: str, wanted: float):
    language = Language(file="main.c", build=[["gcc", "-w", "-o", "main", "main.c"]], run=["./main"])
    adds = 'int a, b; scanf("%d %d", &a, &b); printf("%d\\n7\\n", a + b); fflush(stdout);'
    code = f"#include <stdio.h>\n#include <stdlib.h>\nint main() {{ {adds} {end} return 0; }}"
    assert code_reward(f"```\n{code}\n```", SUM, language=language).value == wanted
