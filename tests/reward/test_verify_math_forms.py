"""Equality of mathematical answers: what is the same in another form scores 1, what only looks like it 0."""

import os
import threading

import pytest
from each import each

from hone.errors import HoneError
from hone.reward.score import Reward
from hone.reward.verify.math import workers
from hone.reward.verify.math.verdict import math_reward
from hone.types import Rollout, Task


def reward(answer: str, gold: str) -> float | None:
    return math_reward(f"so \\boxed{{{answer}}}", Task(prompt="q", answer=gold)).value


# These need no library.
PLAIN = [
    (r"\dfrac{2}{4}", r"\frac{1}{2}"),
    ("(1, 2)", "(1,2)"),
    ("1{,}000", "1000"),
    (r"11,\! 111", "11111"),
    ("5,3,7", "3, 5, 7"),
    (r"3 \text{ and } 5", "5, 3"),
    (r"\{3, 5\}", "3 or 5"),
    ("1,000, 2,000", "2000, 1000"),
    ("[0,5)", r"0 \le x < 5"),
    ("x > 5", r"(5,\infty)"),
    ("5 < x", r"x\in (5,\infty)"),
    (r"x\leq 5", r"(-\infty,5]"),
    (r"5 \ge x > 2", "(2, 5]"),
    (r"(9,36) \cup (0,9)", r"(0,9)\cup(9,36)"),
    (r"\begin{bmatrix} -1/3 \\ 0.5 \end{bmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac12 \end{pmatrix}"),
    (r"\left\{ 1, 2 \right\}", "2,1"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("n=4,3,2", "n=2,3,4"),
    ("y=2, x=1", "x=1,y=2"),
    ("5000 m", r"5\text{ km}"),
    ("50 cents", r"\$0.50"),
    ("36 km/h", "10 m/s"),
    ("10000 cm^2", r"1 \text{ m}^2"),
    ("15", r"15\mbox{ cm}^2"),
    ("15 cm^2", r"15\mbox{ cm}^2"),
    (r"90^{\circ}", "90"),
    (r"\frac{270}{7}^\circ", r"\frac{270}7\text{ degrees}"),
    ("52_{8}", "52_8"),
    ("52", "52_8"),
    ("0.5", r"50\%"),
    ("C", r"\text{(C)}"),
    (r"\text{East}", "east"),
    ("1.8", r"1\frac{4}{5}"),
    (r"\infty", r"\infty"),
    (r"3\sqrt{13}", r"3 \sqrt{13}"),
    (r"1, 2, \ldots, n", r"1,2,\dots,n"),
    (r"2.\bar{3}", r"\frac{7}{3}"),
    (r"0.\dot{3}", "0.(3)"),
    ("{5}", "5"),
    ("{1, 2}", r"\{1,2\}"),
    (r"\theta = 5", "5"),
    ("f(2)=5", "5"),
    ("AB=5", "5"),
    (r"|AB| = 5", "5"),
    (r"m\angle ABC = 30^\circ", "30"),
    (r"\sin A = \frac{3}{5}", r"\frac35"),
    ("(x,y)=(1,2)", "(1,2)"),
    (r"(x, y) = (1, 2), (3, 4)", "(3,4),(1,2)"),
    (r"(r,\theta) = (3, 0)", "(3,0)"),
    (r"\{x \mid 0 \le x < 5\}", "[0,5)"),
    (r"\{x \in \mathbb{R} : x > 5\}", "x>5"),
    (r"x<1\text{ or }x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\varnothing", r"\emptyset"),
    (r"\{\}", "\u2205"),
    (r"25 \text{ square centimeters}", r"25\text{ cm}^2"),
    ("60 miles per hour", "60 mph"),
    ("2 apples per box", "2 apples/box"),
    ("3 : 4", "3:4"),
    ("2\u221a3", r"2\sqrt3"),
    (r"12\,345", "12,345"),
    ("1 234 567", "1234567"),
    ("2 345/346", r"2\frac{345}{346}"),
    ("5 months", "5"),
]
# These do.
SYMBOLIC = [
    (r"3\sqrt{13}", r"\sqrt{117}"),
    (r"11\sqrt2", r"\sqrt{242}"),
    ("-q+p", "p - q"),
    ("-5i+6", "6 - 5i"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt3}{3}"),
    ("2^{10}", "1024"),
    (r"\sqrt{4}", "2"),
    (r"1-\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\{-2, 1+\sqrt5, 1-\sqrt5\}", r"\{1\pm\sqrt{5},-2\}"),
    ("2x-y+3=0", "y = 2x + 3"),
    ("5x-7y+11z=-4", "5x - 7y + 11z + 4 = 0"),
    ("pi/2", r"\frac{\pi}{2}"),
    ("3*sqrt(13)", r"3\sqrt{13}"),
    ("(3, pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    ("0.5x", r"\frac{x}{2}"),
    ("1/2x", "0.5x"),
    (r"e^{i\pi}", "-1"),
    (r"\log_2 8", "3"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    ("|x|", r"\sqrt{x^2}"),
    ("2(3+x)", "6+2x"),
    (r"\frac{\cos x}{\sin x}", r"\cot x"),
    ("(x^n)^2", "x^{2n}"),
    (r"12\pi\text{ cm}", r"12\pi"),
    (r"\sin^2(x)", r"1 - \cos^2(x)"),
    (r"\log_{10}100000", "5"),
    (r"\frac{(-1)}{2}", r"-\frac12"),
    (r"\sqrt[3]8", "2"),
    (r"2{\sqrt{3}}", r"2\sqrt3"),
    ("[x+1]^2", "(x+1)^2"),
    (r"\sin{x}+\log_{2}{y}", r"\sin x + \log_2 y"),
    ("\u221a(12)", r"2\sqrt3"),
    (r"\begin{pmatrix} \sqrt{8} & 1 \end{pmatrix}", r"\begin{pmatrix} 2\sqrt2 & 1 \end{pmatrix}"),
]
WRONG = [
    ("0.3333", r"\frac{1}{3}"),
    (r"50\%", "50"),
    (r"5\text{ km}", r"5\text{ m}"),
    (r"5\text{ kg}", r"5\text{ m}"),
    (r"5 \text{ apples}", "5 oranges"),
    ("€5", r"\$5"),
    (r"4 \text{ or } 5", "5"),
    ("1,2,3,4,5,6,7,8,9", "5"),
    ("5", "5,6"),
    ("5,5", "5"),
    ("n=1,2,3", "n=2,3,4"),
    ("x = 4 = 5", "5"),
    ("y=4", "x=4"),
    ("x=x", "x=5"),
    ("0=0", "2x-y+3=0"),
    ("3x-1y+13=0", "3x+4y+14=0"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("1,2", "(1,2)"),
    ("x>=5", "x>5"),
    ("x<5", "x>5"),
    (r"(0,9)", r"(0,9) \cup (9,36)"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    ("53_8", "52_8"),
    ("52_7", "52_8"),
    ("x", "5"),
    ("", "5"),
    ("3 4", "7"),
    ("3(2)", "5"),
    (r"6 \times 7", "42"),
    ("x'", "x"),
    ("R^2", "r^2"),
    ("east and west", "east"),
    ("D", r"\text{(C)}"),
    (r"3\times 10^{6}", r"3\times 10^{5}"),
    (r"1, 3, 5, \ldots, 2n-1", r"1, 2, \ldots, n"),
    ("3.14159265358979323846", r"\pi"),
    (r"2\sqrt{13}", r"3\sqrt{13}"),
    ("x^2+2x+2", "(x+1)^2"),
    ("x", r"\sqrt{x^2}"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    ("e^{-1000}", "0"),
    ("i", "1"),
    (r"-\infty", r"\infty"),
    (r"12\pi\text{ cm}", r"12\pi\text{ m}"),
    ("1 2", "12"),
    (r"12\,3", "123"),
    (r"1\quad 000", "1000"),
    ("5...", "5"),
    (r"\frac{1}{2}+0", r"\frac12"),
    (r"1-\frac12", r"\frac12"),
    (r"\frac{1}{2}\frac{1}{1}", r"\frac12"),
    (r"\frac{1+0}{2}", r"\frac12"),
    ("(y,x)=(1,2)", "(1,2)"),
    ("(x,y,z)=(1,2)", "(1,2)"),
    *((text, gold) for text in ("5{6}", "{5}{6}", "{5}6", "5[6]", "[5][6]") for gold in ("11", "30")),
    ("2.5 3 x", "7.5x"),
    (r"\pi = 5", "5"),
    (r"\{\emptyset\}", r"\emptyset"),
    (r"\{0\}", r"\emptyset"),
    (r"\{y \mid 0 \le x < 5\}", "[0,5)"),
    (r"x<1\text{ or }y>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"x<1\text{ and }x>2", r"(-\infty,1)\cup(2,\infty)"),
    ("4:3", "3:4"),
    ("3/4", "3:4"),
    ("\u221a11", r"\sqrt{12}"),
    (r"\sin^2(x)", r"\sin(x^2)"),
    ("5 cubic feet", "5 square feet"),
    *((f"5 {word}", "5") for word in ("eighths", "quadrillion", "tenfold", "pct", "lakh", "maybe", "false", "upto")),
]


@each(("answer", "gold"), PLAIN + SYMBOLIC)
def test_the_same_in_another_form_scores_one_and_so_does_the_gold_answer_itself(answer, gold):
    assert reward(answer, gold) == reward(gold, gold) == 1.0


@each(("answer", "gold"), WRONG)
def test_what_only_looks_like_it_scores_zero(answer, gold):
    assert reward(answer, gold) == 0.0


@pytest.fixture
def bare(monkeypatch):
    """Neither the library nor any process of the verifier's."""
    monkeypatch.setattr(workers, "MODULES", ("a_library_that_nobody_has",))
    monkeypatch.setattr(workers.WORKERS, "ask", lambda *_: pytest.fail("a process was asked"))


@pytest.mark.parametrize(("answer", "gold"), PLAIN)
def test_numbers_and_what_is_made_of_them_need_no_library_and_no_process(bare, answer, gold):
    assert reward(answer, gold) == 1.0


def test_a_missing_library_is_one_line_with_the_remedy(bare):
    assert reward(r"\sqrt{9}", "3") == 0.0  # a number has to be written as one
    with pytest.raises(HoneError, match=r"pip install 'hone\[math\]'"):
        reward(r"\sqrt{12}", r"2\sqrt{3} + 1")
    row = Rollout(tokens=[1], mask=[True], text=r"\boxed{\sqrt{5}}", task=Task(prompt="q", answer=r"5^{1/2}"))
    (outcome,) = Reward(math_reward)([row])
    assert outcome.value is None
    assert "hone[math]" in outcome.reason


def test_threads_other_than_the_main_one_get_verdicts_too():
    found = dict[int, float | None]()
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: reward(rf"{i}\sqrt{{8}}", rf"{2 * i}\sqrt{{2}}")}))
        for i in range(2, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(2, 8), 1.0)


def test_a_forked_child_asks_processes_of_its_own():
    assert reward(r"\sqrt{20}", r"2\sqrt5") == 1.0
    number = os.fork()
    if not number:
        os._exit(0 if reward(r"\sqrt{28}", r"2\sqrt7") == 1.0 else 1)
    assert reward(r"\sqrt{44}", r"2\sqrt{11}") == 1.0
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
    assert reward(r"\sqrt{52}", r"2\sqrt{13}") == 1.0
