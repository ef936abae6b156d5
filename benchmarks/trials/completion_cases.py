"""Completions as models write them around a program, with the verdict each deserves."""

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
SUMS = "a, b = map(int, input().split())\nprint(a + b)\n"
F = "```"
TAGS = (
    "python", "py", "py3", "python3", "Python", "PYTHON3", "python3.11", "py310", "", "ipython", 'python title="x.py"',
    "python # solution.py", "{.python}", "{python}", "python:add.py", "python, linenos", "  python",
)  # fmt: skip
DOC = 'def add(a, b):\n    """Adds.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
HELPED = "import operator\ndef helper(a, b):\n    return operator.add(a, b)\n"
CALLS = "def add(a, b):\n    return helper(a, b)\n"
FUNCTIONS = (  # for tests of add
    *((f"{F}{tag}\n{ADD}{F}", 1.0) for tag in TAGS),
    (f"<answer>{F}python\n{ADD}{F}</answer>", 1.0),
    (f"<answer>\n{F}python\n{ADD}{F}\n</answer>", 1.0),
    (f"<answer>{ADD}</answer>", 1.0),
    (f"<think>{F}python\n{WRONG}{F}</think><answer>\n{F}\n{ADD}{F}\n</answer>", 1.0),
    (f"<think>{F}python\n{ADD}{F}</think>I give up.", 0.0),
    (f"{F}python\n{ADD}{F}\nOutput:\n{F}\n3\n{F}", 1.0),
    (f"{F}\n{ADD}{F}\nOutput:\n{F}\n3\n{F}", 1.0),
    (f"{F}python\n{ADD}{F}\nUsage:\n{F}python\nprint(add(1, 2))\n{F}", 1.0),
    (f"{F}python\n{ADD}{F}\n{F}output\n3\n{F}\n{F}bash\npython add.py\n{F}", 1.0),
    (f"{F}python\n{ADD}{F}\n{F}pycon\n>>> add(1, 2)\n3\n{F}", 1.0),
    (f"{F}python\n>>> add(1, 2)\n3\n{F}\n{F}python\n{ADD}{F}", 1.0),
    (f"~~~python\n{ADD}~~~", 1.0),
    (f"````python\n{ADD}````", 1.0),
    (f"Here is the code: {F}python\n{ADD}{F}", 1.0),
    (f"Sure! {F}python\n{ADD}{F} Done.", 1.0),
    (f"1. First\n\n   {F}python\n   def add(a, b):\n       return a + b\n   {F}\n", 1.0),
    (f"- item\n    {F}python\n    def add(a, b):\n        return a + b\n    {F}\n", 1.0),
    (f"- {F}python\n  def add(a, b):\n      return a + b\n  {F}\n", 1.0),
    (f"{F}python\n    def add(a, b):\n        return a + b\n{F}\n", 1.0),
    (f"> {F}python\n> def add(a, b):\n>     return a + b\n> {F}", 1.0),
    (f"{F}python\n{ADD}{F}\n".replace("\n", "\r\n"), 1.0),
    (f"{F}python\n{ADD}", 1.0),
    (f"{F}python\n{ADD}{F}\n{F}python\n", 1.0),
    (f"{F}python\n{HELPED}{F}\nThen:\n{F}python\n{CALLS}{F}", 1.0),
    (f"{F}python\n{CALLS}{F}\nwith\n{F}python\n{HELPED}print(undefined)\n{F}", 1.0),
    (f"{F}python\nfrom typing import List\n{F}\n{F}python\ndef add(a: List, b):\n    return a + b\n{F}", 1.0),
    (f"{F}python\n{WRONG}{F}\nWait.\n{F}python\n{ADD}{F}", 1.0),
    (f"{F}python\n{ADD}{F}\nOr:\n{F}python\n{WRONG}{F}", 0.0),
    (f"{F}python\ndef add(a, b)\n    return a + b\n{F}\nFixed:\n{F}python\n{ADD}{F}", 1.0),
    (f"{F}python\n{DOC}{F}", 1.0),
    (f"{F}python\ndef add(a, b):\n    return a + b{F}", 1.0),
    (f"{F}python def add(a, b): return a + b{F}", 1.0),
    (f"{F}python def add(a, b):\n    return a + b\n{F}", 1.0),
    (f"{F}python\nadd = lambda a, b: a + b\n{F}", 1.0),
    (f"{F}python\n{ADD}\nif __name__ == '__main__':\n    print(add(int(input()), 1))\n{F}", 1.0),
    (f"{F}python\n{ADD}\nThis adds the numbers.", 1.0),
    (f"{F}python\n{ADD}\nprint(add(1,", 1.0),
    (f"{F}python\n{WRONG}\nprint(add(1,", 0.0),
    (f"{F}python\n{ADD}\nThis adds the numbers.\n{F}", 0.0),  # it is said to be the program
    (f"{F}python\n{ADD}\n>>> add(1, 2)\n3\n{F}", 1.0),
    (f"{F}pycon\n>>> def add(a, b):\n...     return a + b\n...\n>>> add(1, 2)\n3\n{F}", 1.0),
    (f"{F}Python 3\n{ADD}{F}", 1.0),
    (f"{F}\npython\n{ADD}{F}", 1.0),
    (f"[BEGIN]\n{ADD}[DONE]", 1.0),
    (f"[PYTHON]\n{ADD}[/PYTHON]", 1.0),
    (f"{ADD}{F}\n\nThis adds the numbers.", 1.0),  # the prompt has opened the fence
    (f"{WRONG}{F}\n\nThis adds the numbers.", 0.0),
    ("Here it is:\n\n    def add(a, b):\n        return a + b\n\nDone.", 1.0),
    ("Use `add = lambda a, b: a + b` for that.", 1.0),
    ("Use `add = lambda a, b: a - b` for that.", 0.0),
    (f"{F}python\nimport operator\n{F}\n{F}python\nfrom __future__ import annotations\nadd = operator.add\n{F}", 1.0),
    (f"{F}python\nfrom typing import *\n{F}\n{F}python\ndef add(a: Union[int, str], b):\n    return a + b\n{F}", 1.0),
    (
        f"{F}python\nt = {{}}\nfor i in range(9):\n    t[i] = i\nprint(t)\n{F}\n{F}python\n"
        f"def add(a, b):\n    return t[a] + t[b]\n{F}",
        1.0,
    ),
    (f"{F}python\nfor add in [lambda a, b: a + b]:\n    pass\n{F}\n{F}python\nprint(add(1, 2))\n{F}", 1.0),
    (ADD, 1.0),
    (f"Here it is:\n\n{ADD}\nThis adds the two numbers.\n", 1.0),
    ("I cannot do this.", 0.0),
    ("", 0.0),
    (f"{F}js\nfunction add(a, b) {{ return a + b }}\n{F}", 0.0),
)
PROGRAMS = (  # for scripts that read two numbers and print their sum
    (f"{F}python\n{SUMS}{F}", 1.0),
    (SUMS, 1.0),
    (f"<answer>{F}py3\n{SUMS}{F}</answer>", 1.0),
    (f"{F}python\n{SUMS}{F}\nOutput:\n{F}\n3\n{F}", 1.0),
    (f"{F}\n{SUMS}{F}\nOutput:\n{F}\n3\n{F}", 1.0),
    (f"{F}\n{SUMS}{F}\nOutput:\n{F}\nhello world\n{F}", 1.0),
    (f"{F}python\n{SUMS}{F}\n{F}input\n1 2\n{F}", 1.0),
    (f"{F}python\n{SUMS}{F}\nExample:\n{F}python\nprint('example')\n{F}", 1.0),
    (
        f"{F}python\n{ADD}{F}\nThen:\n{F}python\na, b = map(int, input().split())\nprint(add(a, b))\n{F}",
        1.0,
    ),
    (f"{F}python\nprint(0)\n{F}\nNo:\n{F}python\n{SUMS}{F}", 1.0),
    (f"Here:\nimport sys\n{SUMS}\nExplanation: it adds.", 1.0),
    (f"{F}python\n{SUMS}{F}\nOr:\n{F}python\n{SUMS.replace('+', '-')}{F}", 0.0),
    (f"{SUMS}{F}\nIt adds.", 1.0),
    (f"[BEGIN]\n{SUMS}[DONE]", 1.0),
    (f"{F}python\n{SUMS}\nIt reads two numbers.", 1.0),
    ("The sum is 3.", 0.0),
)
PROMPT = 'from typing import List\n\ndef scale(xs: List[int], k: int):\n    """x k"""\n'
BODY = "    return [x * k for x in xs]\n"
CONTINUED = (  # for a prompt that the completion goes on from, or writes again
    (BODY, 1.0),
    (f"{F}python\n{BODY}{F}", 1.0),
    (f"{F}python\n{BODY.strip()}\n{F}", 1.0),
    (f"{F}python\ndef scale(xs: List[int], k):\n{BODY}{F}", 1.0),
    (f"{F}python\n{PROMPT}{BODY}{F}\nThis works.\n{F}python\nprint(scale([1], 2))\n{F}", 1.0),
    (f"{PROMPT}{BODY}", 1.0),
    (f"{BODY}\nThis multiplies each number.\n", 1.0),
    (f"<answer>\n{BODY}</answer>", 1.0),
    (f"{BODY}{F}\n\nThe function multiplies.", 1.0),
    (f"{BODY}{F}\n\nOr:\n{F}python\ndef scale(xs, k):\n    return xs\n{F}", 0.0),
    (f"{F}python\nfrom __future__ import annotations\n{PROMPT}{BODY}{F}", 1.0),
    ("    return xs\n```\nThe function", 0.0),
    (f"{F}python\ndef scale(xs, k):\n    return xs\n{F}", 0.0),
)
