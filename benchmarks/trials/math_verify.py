"""Math-Verify's own test cases, judged by Hone: where the verdicts differ, and who is right.

The cases are the pairs of gold answer and answer in the tests of Math-Verify, with the verdict that those expect;
source and licence are in math_verify.json. Many of its answers are formulas that nothing marks as an answer. Hone reads
an answer only where one is stated, so the last formula of such a text, or the whole text, is put into a box.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hone.reward.verify.math.extract import places
from hone.reward.verify.math.verdict import math_reward
from hone.types import Task

PATH = Path(__file__).with_suffix(".json")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)

_UNSTATED = "nothing marks an answer: Hone takes a number from prose only where a sentence states it as the answer"
_FALSE = "the equation chain is false, and Hone's policy is that a chain counts only if it is true"
_EXACT = "Hone's policy: a rounded decimal is not the exact value (numeric:TOLERANCE compares with a tolerance)"
_WORK = "Hone's policy: a sum or product that is left to be worked out may be the question, and is no answer"
_TWICE = "the answer names one solution twice, and Hone's policy is that a list names each entry once"
_COMMA = "Hone's policy: a comma in a gold answer that can separate two entries does"
_BREAK = "Math-Verify does not read a formula over several lines in single dollars; the answer is right"
_SUM = "Hone does not read sums: it says that the gold answer is unusable, which is no 0"
_QUOTED = "the gold answer is damaged (a lost backslash or brace): Hone says so, which is no 0"
DISAGREEMENTS = {  # case: who is right, and why
    "number_extraction[6]": ("policy", _COMMA),
    "number_extraction[7]": ("policy", _UNSTATED),
    "number_extraction[13]": ("policy", _UNSTATED),
    "number_extraction[14]": ("policy", _UNSTATED),
    "number_extraction[15]": ("policy", _UNSTATED),
    "number_extraction[16]": ("policy", _UNSTATED),
    "number_extraction[17]": ("policy", _COMMA),
    "latex_notation[4]": ("policy", _WORK),
    "latex_notation[5]": ("Hone", _BREAK),
    "latex_notation[6]": ("Hone", _BREAK),
    "latex_notation[9]": ("Hone", f"one half is not 10/9: {_FALSE}"),
    "relations_math[10]": ("Hone", f"11 = 7: {_FALSE}"),
    "relations_math[12]": ("Hone", f"11 = 7: {_FALSE}"),
    "relations_math[13]": ("Hone", f"11 = 1/3: {_FALSE}"),
    "relations_math[16]": ("Hone", "1/3 is not about 1.3: a rounding that is stated beside a value must be one"),
    "relations_math[21]": ("Hone", "the gold answer says 1 = 0: Hone says that it is unusable, which is no 0"),
    "relations_math[26]": ("Hone", f"3 + 3 = 2: {_FALSE}"),
    "relations_math[27]": ("Hone", f"3 + 3 = 2: {_FALSE}"),
    "matrix_extraction[5]": ("policy", _WORK),
    "matrix_extraction[6]": ("policy", _WORK),
    "complex_math_expressions[0]": ("policy", _EXACT),
    "complex_math_expressions[4]": ("policy", _QUOTED),
    "complex_math_expressions[7]": ("policy", _EXACT),
    "complex_math_expressions[13]": ("policy", _EXACT),
    "math_extraction_edge_cases[0]": ("policy", _UNSTATED),
    "math_extraction_edge_cases[1]": ("policy", _UNSTATED),
    "math_extraction_additional_cases[7]": ("Hone", "a list of 1 and 3 is not the point (1, 3)"),
    "math_extraction_additional_cases[8]": ("policy", _UNSTATED),
    "math_extraction_additional_cases[17]": (
        "policy",
        "the completion boxes two results of its steps before it: Hone's policy is that every box is an answer",
    ),
    "set_rel_assymetry[3]": ("Hone", "-2 <= x <= 7 and the interval [-2, 7] say the same"),
    "float_precision[0]": ("policy", _EXACT),
    "numina_cases: numina_cases[0]": ("policy", _TWICE),
    "numina_cases: numina_cases[3]": ("Hone", "the gold answer is a ring of complex numbers, the answer two intervals"),
    "numina_cases: numina_cases[19]": ("policy", _TWICE),
    "numina_cases: numina_cases[24]": ("policy", _QUOTED),
    "strict: strict_variable_comparison[1]": (
        "Hone",
        "f(x) and f(y) differ; the test asks Math-Verify to ignore names",
    ),
    "yujianll: string_extraction[4]": ("Math-Verify", _SUM),
    "yujianll: string_extraction[5]": ("Math-Verify", _SUM),
    "yujianll: string_extraction[9]": ("Hone", "1 - 1/e is not 1 + 1/e; Math-Verify could not read the e"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold answer, an answer, and the verdict that Math-Verify's tests expect."""

    name: str
    gold: str
    answer: str
    expected: int


def pairs() -> list[Pair]:
    """All of them."""
    return [Pair(**case) for case in json.loads(PATH.read_text(encoding="utf-8"))["cases"]]


def completion(answer: str) -> str:
    """The text itself where Hone finds an answer stated in it, else a box with its last formula or all of it."""
    if places(answer):
        return answer
    found = [next(group for group in match.groups() if group is not None) for match in _FORMULA.finditer(answer)]
    return f"\\boxed{{{found[-1] if found else answer}}}"


def verdict(pair: Pair) -> float | None:
    """Hone's."""
    return math_reward(completion(pair.answer), Task(prompt="q", answer=pair.gold)).value


def disagreements() -> Iterator[Pair]:
    """The pairs on which the verdicts differ; an invalid one agrees with nothing."""
    return (pair for pair in pairs() if verdict(pair) != pair.expected)


def section() -> list[str]:
    """Of the page: how many agree, and a line for each that does not."""
    found, names = pairs(), {pair.name for pair in disagreements()}
    lines = [
        "### Math-Verify's own test cases",
        "",
        f"Of the {len(found)} pairs in the tests of Math-Verify, Hone's verdict is the expected one on "
        f"{len(found) - len(names)}. The others, with who is right; *policy* is a rule of docs/verifiers.md that Hone "
        "applies and Math-Verify does not:",
        "",
        "| case | gold | answer | expected | right | why |",
        "|---|---|---|---|---|---|",
    ]
    for pair in found:
        if pair.name in names:
            who, why = DISAGREEMENTS.get(pair.name, ("?", "not explained"))
            cells = [pair.name, _shown(pair.gold), _shown(pair.answer), str(pair.expected), who, why]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(text: str) -> str:
    """The end of a text in one cell."""
    plain = " ".join(text.split())
    return f"`{('..' if len(plain) > 40 else '') + plain[-40:]}`".replace("|", r"\|")
