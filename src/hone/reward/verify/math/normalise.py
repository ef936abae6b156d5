r"""Rewrites LaTeX in one spelling that the other modules read: `\dfrac12`, fonts, spaces, `2√3`, `½` and `1 000`.

Only text is replaced, in time linear in its length. Two numbers are never joined, except at a space for thousands.
"""

import re
import unicodedata

_REPLACEMENTS = (
    *((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"), (r"\left", ""), (r"\right", "")),
    *((r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\langle", "("), (r"\rangle", ")"), (r"\displaystyle", "")),
    *((r"\leqslant", r"\le "), (r"\geqslant", r"\ge "), (r"\leqq", r"\le "), (r"\geqq", r"\ge ")),
    *(
        (r"\leq", r"\le "),
        (r"\geq", r"\ge "),
        (r"\neq", r"\ne "),
        ("!=", r"\ne "),
        (r"\not=", r"\ne "),
        ("<>", r"\ne "),
    ),
    *((r"\lvert", "|"), (r"\rvert", "|"), (r"\vert", "|"), (r"\lt", "<"), (r"\gt", ">"), (r"\colon", ":")),
    *((r"\%", "%"), (r"\$", "$"), ("**", "^"), (r"\ast", "*"), (r"\textdollar", "$"), (r"\euro", "\u20ac")),
    *((r"\pounds", "\u00a3"), (r"\textstyle", ""), (r"\limits", ""), (r"\nonumber", ""), (r"\qquad", r"\quad")),
    *(("~", " "), (r"\varnothing", r"\emptyset"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\infinity", r"\infty")),
    *(("bmatrix", "pmatrix"), ("\\dots", r"\ldots"), (r"\cdots", r"\ldots")),
    *(("...", r"\ldots "), (r"\backslash", r"\setminus"), (r"\thickapprox", r"\approx"), (r"\doteq", r"\approx")),
    *((r"\lor", " or "), (r"\vee", " or "), (r"\land", " and "), (r"\wedge", " and ")),
    *((r"\simeq", r"\approx"), (r"\degree", "\u00b0"), (r"\cdotp", r"\cdot"), (r"\bigcup", r"\cup")),
    *((r"\nicefrac", r"\frac"), (r"\sfrac", r"\frac"), (r"\dbinom", r"\binom"), (r"\tbinom", r"\binom")),
    *((r"\lbrack", "["), (r"\rbrack", "]"), ("smallmatrix", "matrix"), (r"\surd", "\u221a")),
)
_REPLACEABLE = re.compile(r"[\\~!*]|<>|\.\.\.")  # every text that is replaced contains one of these
# Unicode characters for a command or a character of LaTeX.
_CHARACTERS = {
    **{
        "\u2212": "-",
        "\u2013": "-",
        "\u2010": "-",
        "\u2011": "-",
        "\ufe63": "-",
        "\u00d7": r"\times ",
        "\u2715": r"\times ",
    },
    **{"\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u2217": "*", "\u00f7": r"\div ", "\u2044": "/"},
    **{
        "\u2215": "/",
        "\u221e": r"\infty ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
    },
    **{
        "\u2a7d": r"\le ",
        "\u2a7e": r"\ge ",
        "\u2266": r"\le ",
        "\u2267": r"\ge ",
        "\u2260": r"\ne ",
        "\u2248": r"\approx ",
    },
    **{"\u2208": r"\in ", "\u00b1": r"\pm ", "\u2205": r"\emptyset ", "\u211d": r"(-\infty,\infty)", "\u2236": ":"},
    **{"\u27e8": "(", "\u27e9": ")", "\u2329": "(", "\u232a": ")", "\u2026": "...", "\u2032": "'", "\u2019": "'"},
    **{"\uff0c": ", ", "\uff1b": "; ", "\uff1a": ":", "\uff08": "(", "\uff09": ")", "\uff05": "%", "\uff1d": "="},
    **{"\uff0b": "+", "\uff0d": "-", "\u3002": ".", "\u3001": ", ", "\u00a0": " ", "\u202f": " ", "\u2009": " "},
    **{"\u2103": "\u00b0C", "\u2109": "\u00b0F", "\u00ba": "\u00b0", "\u02da": "\u00b0", "\u2220": r"\angle "},
    **{"\U0001d70b": r"\pi ", "\U0001d6d1": r"\pi ", "\U0001d745": r"\pi "},
    **{"\u2216": r"\setminus ", "\u2261": r"\equiv ", "\u2223": "|", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]"},
}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
_CHARACTERS |= {
    unicodedata.lookup(f"GREEK SMALL LETTER {'LAMDA' if name == 'lambda' else name.upper()}"): rf"\{name} "
    for name in _GREEK.split()
}
_CHARACTERS |= {unicodedata.lookup(f"GREEK CAPITAL LETTER {n.upper()}"): rf"\{n} " for n in ("Delta", "Omega", "Phi")}
_FRACTIONS = {
    c: unicodedata.normalize("NFKC", c).split("\u2044")
    for c in map(chr, [*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189])
}
_SUPERSCRIPTS = dict(
    zip(
        "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207d\u207e\u207f\u2071",
        "0123456789+-()ni",
        strict=True,
    )
)
_SUBSCRIPTS = dict(
    zip(
        "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u208a\u208b\u2099\u1d62",
        "0123456789+-ni",
        strict=True,
    )
)
_TABLE = str.maketrans(_CHARACTERS | {c: rf"\frac{{{top}}}{{{bottom}}}" for c, (top, bottom) in _FRACTIONS.items()})
_SUPERSCRIPTS_AND_SUBSCRIPTS = re.compile(
    f"(?P<up>[{''.join(_SUPERSCRIPTS)}]+)(?:[/\u2044](?P<under>[{''.join(_SUBSCRIPTS)}]+))?|(?P<down>[{''.join(_SUBSCRIPTS)}]+)"
)

_FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt|cal|scr|frak|bb|normal|ord|bin|rel)|(?:[mhf]|frame)box"
    r"|operatorname\*?|emph|underline|bm|boldsymbol|pmb|ensuremath|vec|hat|tilde|overrightarrow|textcolor\{[a-z]+\}"
    r"|color\{[a-z]+\}|colorbox\{[a-z]+\}|unit|num)\s?\{\s*((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*?)\s*\}(\^\{?[23]\}?)?"
)
_UNITS = {"m": "meter", "g": "gram", "s": "second", "h": "hour", "L": "liter", "N": "newton", "J": "joule", "V": "volt"}
_UNIT = re.compile(
    r"(?<=[0-9})\]i\s])\s*\\(?:text(?:rm|normal)?|mathrm|mbox)\s?\{[~\s]*([mgshLNJV])\s*\}(\^\{?[23]\}?)?(?=[\s$.]*$)"
)
_SWITCHES = re.compile(
    r"\\(?:rm|bf|it|sf|tt|cal|tiny|small|large|Large|huge|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|biggl|biggr|color\{[a-z]+\})"
    r"(?![A-Za-z])"
)
_HIDDEN = re.compile(r"\\(?:h|v)space\*?\{[^{}]*\}|\\(?:h|v)?phantom\{[^{}]*\}|\\(?:label|tag)\{[^{}]*\}")
_ARRAY = re.compile(
    r"[(\[]\s*\\begin\{(?:array\}\s?\{[clr| ]*\}|matrix\})(.*?)\\end\{(?:array|matrix)\}\s*[)\]]", re.DOTALL
)
MARK = r"\\(?:blacksquare|square|Box|checkmark|qed)(?![A-Za-z])|[\u25a0\u25a1\u220e\u2713\u2714\u2705\u2611]\ufe0f?"
_FINAL_MARK = re.compile(rf"(?:\\[,;: ]|\\q?quad|[\s$])*(?:{MARK})[\s$.]*$")  # the end of a proof, or a tick
_DEGREE = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|(?<=[0-9])\s?\^\s?(?:\{\s?o\s?\}|o(?![A-Za-z]))")
_GROUP = r"((?:(?!\\over|\\choose)[^{}]|\{[^{}]*\})*)"
_OVER = re.compile(rf"\{{{_GROUP}\\(over|choose)(?![a-z]){_GROUP}\}}|^{_GROUP}\\(over|choose)(?![a-z]){_GROUP}$")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]|\s?/)")
_ROOT = re.compile(
    r"\u221a\s?(?:([0-9]+|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})"
    r"|\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)|(?<![A-Za-z\\])sqrt\s?([0-9]+)"
)
_ARGUMENT = rf"[0-9A-Za-z]|\\(?:{'|'.join(_GREEK.split())})(?![a-z])"
_INVERSE = re.compile(r"\\(sin|cos|tan|cot)\s?\^\s?\{\s?-\s?1\s?\}")
_DEGREES = re.compile(r"(\\?(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9]+(?:\.[0-9]+)?)\s?\u00b0")
_INLINE = re.compile(r"(?<![\\$])\$(?!\$)([^$]+?)(?<!\\)\$(?!\$)|\\\(([^()]+?)\\\)")

_DOMAIN = re.compile(  # k\\pi where k \\in Z
    r",? ?(?:where|with|for(?: (?:all|any|some|every|each))?|\\forall) (?=[a-z] ?\\in(?![a-z]))"
)
_INTEGER_DOMAIN = re.compile(
    r",? ?(?:where|with|for)(?: (?:all|any|some|every|each))? "
    r"(?:integers? ([a-z])|([a-z]) (?:is|being) (?:an|any|some) (?:arbitrary )?integer)$"
)


def characters(text: str) -> str:
    r"""Unicode's fractions, scripts, signs and Greek letters as LaTeX: `1½` as `1\frac{1}{2}`, `x²` as `x^{2}`."""
    if text.isascii():
        return text
    text = _SUPERSCRIPTS_AND_SUBSCRIPTS.sub(_script, re.sub(r"\u215f\s?([0-9]+)", r"\\frac{1}{\1}", text))
    return text.translate(_TABLE)


def _script(match: re.Match[str]) -> str:
    up, under = match.group("up"), match.group("under") or match.group("down")
    top, bottom = ("".join(table[c] for c in text or "") for table, text in ((_SUPERSCRIPTS, up), (_SUBSCRIPTS, under)))
    if up and under:
        return rf"\frac{{{top}}}{{{bottom}}}"
    return f"^{{{top}}}" if up else f"_{{{bottom}}}"


def without_fonts(text: str) -> str:
    r"""The text without fonts, colours and invisible space: `\textnormal{ miles}` is ` miles `, `\text{ m}` a meter."""
    text = _UNIT.sub(lambda unit: f" {_UNITS[unit[1]]}{unit[2] or ''}", text)
    text = _SWITCHES.sub(" ", _HIDDEN.sub(" ", text))
    for _ in range(4):  # fonts in fonts
        text, changed = _FONTS.subn(r" \1\2 ", text)
        if not changed:
            break
    return text


def normalise(text: str) -> str:
    """The answer in one spelling of LaTeX."""
    text = re.sub(r",\\!\s*", ",", unquoted(characters(_FINAL_MARK.sub("", text))))
    text = re.sub(r"(?<=[0-9])\s?\{\s?,\s?\}\s?(?=[0-9])", "{,}", text)
    if r"\begin" not in text:  # where two of them end a row
        text = re.sub(r"\\\\(?=[A-Za-z{}()\[\]%$])", r"\\", text)  # backslashes of data that was escaped twice
    for old, new in _REPLACEMENTS if _REPLACEABLE.search(text) else ():
        text = text.replace(old, new)
    text = re.sub(r"\\\\\s?\[[0-9.]+ ?(?:pt|em|ex|mm)\]|\\cr(?![a-z])", r"\\\\ ", re.sub(r"\\[!]", "", text))
    text = re.sub(r"\\[,;: ]", " ", re.sub(r"\\\\(?!\s*$)", "\0", text)).replace("\0", r"\\")
    text = re.sub(r"\{,\}(?=[0-9]{3}(?![0-9]))", ",", text).replace(
        "{,}", "."
    )  # a comma that TeX sets as part of a number
    text = re.sub(r"\\overline\s?\{\s?([A-Z]{2,3})\s?\}", r"\1", without_fonts(text))  # of a line through two points
    text = degrees(_ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text))
    text = unquoted(_INLINE.sub(r" \1\2 ", text).strip())
    text = _DEGREES.sub(r"\1\\frac{\2\\pi}{180}", _INVERSE.sub(r"\\arc\1 ", text))
    text = re.sub(r"(?:(?<=^)|(?<=[\[(,=\s]))\+\s?(?=\\infty)", "", " ".join(_with_braces(text).split()))
    text = re.sub(r"\\\{ ?\\\}", r"\\emptyset", text)
    text = re.sub(r"^\]([^\[\]()]+[,;][^\[\]()]+[\[\])])$", r"(\1", text)  # ]0,1[ is the open interval
    text = re.sub(r"^([\[(][^\[\]()]+[,;][^\[\]()]+)\[$", r"\1)", text)
    text = re.sub(
        r"(?:the )?(?:set of )?all real(?: number)?s|(?:the )?real numbers", r"(-\\infty,\\infty)", text, flags=re.I
    )
    text = re.sub(r"(?<=[0-9]) x (?=[$0-9])", r" \\times ", text) if "=" in text else text  # 9 x 2 = 18
    text = re.sub(r"(?<![A-Za-z\\])(gcd|lcm|GCD|LCM) ?(?=\()", lambda name: "\\" + name[1].lower(), text)
    text = re.sub(r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty ", text).strip()
    text = re.sub(r"^(?:the )?empty set$|^(?:there (?:is|are) )?no solutions?$", r"\\emptyset", text, flags=re.I)
    text = re.sub(r"(?<=[0-9]) ?([ap])\. ?m\.?$", r" \1m", text, flags=re.I)  # a time of day
    text = _move_domain_to_list(text) if r"\in" in text or "integer" in text else text
    text = re.sub(r"^(?:negative|minus) (?=[0-9\\(])", "-", text, flags=re.I)
    return _SPACED_THOUSANDS.sub(lambda thousands: thousands.group().replace(" ", ""), text)


def _move_domain_to_list(text: str) -> str:
    r"""`k\pi where k is an integer` and `k\pi (k \in Z)` as `k\pi, k \in Z`."""
    text = _INTEGER_DOMAIN.sub(r", \1\2 \\in Z", _DOMAIN.sub(", ", text))
    return re.sub(r" ?\(([a-z] ?\\in [^()]{1,20})\)$", r", \1", text)


def degrees(text: str) -> str:
    r"""`90^\circ` and `90^o` with Unicode's degree sign."""
    return _DEGREE.sub("\u00b0", text) if "^" in text else text


def unquoted(text: str) -> str:
    """The text without dollars, stars, backticks and a full stop around it."""
    for _ in range(3):
        text = text.strip()
        if text[:1].isalnum() and text[-1:].isalnum():
            break
        text = (text if text.endswith("..") else text.removesuffix(".")).strip("*`").strip()
        text = without_delimiters(text)
    return text


def without_delimiters(text: str) -> str:
    """The text without the dollars or TeX brackets around it."""
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(left) : -len(right)]
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and left not in inside:
            text = inside.strip()
    return text


def _with_braces(text: str) -> str:
    r"""`\frac12`, `\frac 59`, `\frac{270}7`, `{1 \over 2}`, `\sqrt2`, `sqrt(2)` and `√12` with all their braces."""
    text = re.sub(r"(?<!\\)\}\s+\{", "}{", re.sub(r"\\(frac|binom|sqrt)\s+(?=[{\[])", r"\\\1", text))
    for _ in range(3 if "sqrt" in text or "\u221a" in text else 0):  # roots in roots
        text = _ROOT.sub(r"\\sqrt{\1\2\3\4\5}", re.sub(r"(?<![A-Za-z\\])sqrt(?=\s?\{)", r"\\sqrt", text))
    text = re.sub(r"\\sqrt\s?(\[[0-9a-z]\])?\s*([0-9A-Za-z])", r"\\sqrt\1{\2}", text)
    text = re.sub(r"(?<![\\A-Za-z])abs\(([^()]*)\)", r"|\1|", text)
    text = re.sub(rf"\\frac\s*({_ARGUMENT})", r"\\frac{\1}", text)
    text = re.sub(rf"(\\frac\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*({_ARGUMENT})", r"\1{\2}", text)
    return _OVER.sub(_fraction_or_binomial, text) if r"\over" in text or r"\choose" in text else text


def _fraction_or_binomial(match: re.Match[str]) -> str:
    top, command, bottom = (match.group(i) or match.group(i + 3) or "" for i in (1, 2, 3))
    return rf"\{'frac' if command == 'over' else 'binom'}{{{top.strip()}}}{{{bottom.strip()}}}"
