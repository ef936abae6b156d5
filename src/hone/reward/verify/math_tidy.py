r"""One spelling of LaTeX for answers: `\dfrac12`, fonts, spaces, `2√3` and `1 000` as the other modules read them.

Only text is replaced here, in time linear in its length; nothing joins two numbers into one but a space for thousands.
"""

import re

_SAME = (
    *((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"), (r"\left", ""), (r"\right", "")),
    *((r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\langle", "("), (r"\rangle", ")"), (r"\displaystyle", "")),
    *((r"\leqslant", r"\le "), (r"\geqslant", r"\ge "), (r"\leq", r"\le "), (r"\geq", r"\ge "), (r"\vert", "|")),
    *((r"\lt", "<"), (r"\gt", ">"), ("{,}", ","), (r"\%", "%"), (r"\$", "$"), ("**", "^"), (r"\ast", "*")),
    *(("\u2212", "-"), ("\u2013", "-"), ("\u00d7", r"\times "), ("\u00b7", r"\cdot "), ("\u00f7", r"\div ")),
    *(("\u03c0", r"\pi "), ("\u221e", r"\infty "), ("\u222a", r"\cup "), ("\u2264", r"\le "), ("\u2265", r"\ge ")),
    *(("\u2208", r"\in "), ("\u00b1", r"\pm "), ("\u00b2", "^2"), ("\u00b3", "^3"), ("~", " ")),
    *(("\u2205", r"\emptyset "), (r"\varnothing", r"\emptyset"), (r"\mathbb{R}", r"(-\infty,\infty)")),
    *(("bmatrix", "pmatrix"), ("\\dots", r"\ldots"), (r"\cdots", r"\ldots"), ("...", r"\ldots ")),
    (r"\infinity", r"\infty"),
)
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|textrm|mathbb)\s?\{\s*([^{}]*?)\s*\}(\^\{?[23]\}?)?"
)
_ARRAY = re.compile(r"[(\[]\s?\\begin\{array\}\s?\{[clr| ]*\}(.*?)\\end\{array\}\s?[)\]]", re.DOTALL)
_SPACED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]|\s?/)")


def tidy(text: str) -> str:
    """The same answer in one spelling of LaTeX."""
    text = re.sub(r",\\!\s*", ",", _unquoted(text))
    for old, new in _SAME:
        text = text.replace(old, new)
    text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", re.sub(r"\\[!]", "", text))
    text = re.sub(r"\\[,;: ]", " ", re.sub(r"\\\\(?!\s*$)", "\0", text)).replace("\0", r"\\")
    text = re.sub(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)", "\u00b0", _WORDS.sub(r" \1\2 ", text))
    text = " ".join(_braced(_unquoted(text.strip())).split())
    text = re.sub(r"\\\{ ?\\\}", r"\\emptyset", text)
    return _SPACED.sub(lambda thousands: thousands.group().replace(" ", ""), text)


def _unquoted(text: str) -> str:
    """Without the dollars, stars, backticks and full stop around it."""
    for _ in range(3):
        text = text.strip()
        text = (text if text.endswith("..") else text.removesuffix(".")).strip("*`").strip()
        text = undelimited(text)
    return text


def undelimited(text: str) -> str:
    """Without the dollars or brackets of TeX that make it a formula."""
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    return text


def _braced(text: str) -> str:
    r"""`\frac12`, `\frac 59`, `\frac{270}7`, `\sqrt2`, `sqrt(2)` and `√12` with all their braces."""
    text = re.sub(r"\u221a\s?(?:([0-9]+|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})", r"\\sqrt{\1\2\3}", text)
    text = re.sub(r"\\sqrt\s?(\[[0-9a-z]\])?\s*([0-9A-Za-z])", r"\\sqrt\1{\2}", text)
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}", text)
