r"""Amounts: numbers with units, read and compared exactly. 5 km is 5000 m, and 5% is 0.05 and never 5."""

import re
from fractions import Fraction
from functools import lru_cache

from hone.reward.verify.answers import NUMERAL
from hone.reward.verify.math.normalise import characters, degrees, without_delimiters, without_fonts

MAX_ANSWER, MAX_DIGITS, MAX_EXPONENT = 200, 100, 100

_INT = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"(?:[eE](?P<e>[+-]?[0-9]+)|\s*(?:\\times|\\cdot|\*)\s*10\^(?:\{(?P<p>[+-]?[0-9]+)\}|(?P<q>[+-]?[0-9]+)))"
_FRAC = rf"\\frac(?:\{{(?P<ft>[+-]?{_DECIMAL})\}}\{{(?P<fb>[+-]?{_DECIMAL})\}}|(?P<st>[0-9])(?P<sb>[0-9]))"
_SLASH = rf"(?P<top>\([+-]?{_DECIMAL}\)|{_DECIMAL})\s?/\s?(?P<bottom>\([+-]?{_DECIMAL}\)|[+-]?{_DECIMAL})"
_SIGNS = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd"  # of currencies
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?P<currency>(?:US(?=\$))?[{_SIGNS}]?)(?:(?P<whole>[0-9]+)(?:\s(?=[0-9]+/)(?P<wt>[0-9]+)/(?P<wb>[0-9]+)"
    rf"|\s?\\frac\{{(?P<lt>[0-9]+)\}}\{{(?P<lb>[0-9]+)\}})"
    rf"|{_FRAC}|{_SLASH}|(?P<plain>{_DECIMAL}){_POWER}?)(?:(?P<percent>\s?%)|\s?(?P<after>[{_SIGNS}\u00a2]))?"
)
_PLAIN = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*")  # most answers are plain numbers
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})"
    r"(?:\\(?:overline|bar)\{([0-9]{1,20})\}|\\dot\{([0-9])\}|\(([0-9]{1,20})\))"
)
_SCALE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALE |= {"trillion": 10**12, "dozen": 12}
_UNITS = {"mm", "cm", "dm", "km", "kg", "mg", "ml", "mph", "kph", "hr", "hrs", "min", "sec", "ft", "lb", "lbs", "oz"}
_UNITS |= {"deg", "rad", "kmph", "kmh"}
_LETTERS = {"m", "g", "s", "h", "L", "N", "J", "W", "V", "K"}  # units of one letter, only after a space
_WORDS_BEFORE = """the a final answer is equals equal to total result value sum of it so thus therefore hence there are
    he she they has have had"""
_CODES = "usd eur gbp jpy cny rmb inr rs krw rub chf cad aud"  # of currencies, before the number: USD 5
_PREPOSITIONS = "in of for per at on from to left each altogether total by with"  # a unit ends before these words
# Words that change, multiply or deny the number before them, so that it is not the answer stated.
_CHANGING = """or and not nor but is was are negative minus plus times over sqrt root pi log ln sin cos tan exp squared
    cubed factorial divided multiplied mod power half halves third thirds quarter quarters fifth fifths double twice
    triple pairs pair score gross fewer less more below above except either neither between around almost nearly
    roughly about approximately least most wrong incorrect zero one two three four five six seven eight nine ten
    eleven twelve twenty thirty forty fifty sixty seventy eighty ninety infinity millions billions thousands hundreds
    dozens tens th st nd rd base binary hex octal kilo mega giga milli micro nano lakh crore bn mn tn permille ppm
    bps fold no none nope maybe perhaps possibly probably unless otherwise versus vs false untrue invalid wait instead
    rather mistaken wrongly incorrectly reciprocal inverse inverted opposite excluded rejected impossible unknown unsure
    to until through upto"""
_MULTIPLES = re.compile(
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|\w+teen|\w+ie|thousand|\w+illion)ths?|\w+(?:illions?|fold)"
)
_LEADING, CHANGING, _MAX_WORDS = frozenset(_WORDS_BEFORE.split()), frozenset(_CHANGING.split()), 4
_CURRENCIES, _ENDS = frozenset(_CODES.split()), frozenset(_PREPOSITIONS.split())
_WORD = re.compile(r"(?P<word>[A-Za-z]+(?:-[A-Za-z]+)*)(?:\^\{?[23]\}?)?(?:/[A-Za-z]+(?:\^\{?[23]\}?)?)?")
_POWER_OF_UNIT = re.compile(r"\b(square|sq\.?|cubic|cu\.?) ([a-z]{2,})\b")
_PER_UNIT = re.compile(  # a unit over another
    r"(?<=[0-9}\s])\s*(?:\\frac\{\s*([A-Za-z]+)\s*\}\{\s*([A-Za-z]+(?:\^\{?2\}?)?)\s*\}"
    r"|\b([A-Za-z]+)\s*(?:\\cdot)?\s+([A-Za-z]+)\s*\^\s?\{\s?-\s?([12])\s?\})$"
)
_PERCENT = re.compile(r"(?<=[0-9})\s])\s?(?:per\s?cent|percentage|pct\b\.?)(?!\s*points?)(?![a-z])", re.IGNORECASE)
_COMPOUND = re.compile(r"([0-9]+) ?([a-z]{1,8})\.?(?:,| and|, and)? ([0-9]+) ?([a-z]{1,8})\.?", re.IGNORECASE)
# 3,5 and 1.234,5 with what may stand around a number; 1,234 is none, for there a comma separates thousands
_DECIMAL_COMMA = re.compile(
    rf"(?P<before>[+-]?\s?(?:[{_SIGNS}]|[A-Z]{{3}} )?\s?)(?P<whole>[0-9]{{1,3}}(?:[. ][0-9]{{3}})+|[0-9]+),"
    rf"(?P<rest>[0-9]+)(?P<after>\s?[%{_SIGNS}\u00b0].*|\s.*|)"
)
_INDIAN = re.compile(rf"([+-]?[{_SIGNS}]?\s?)([1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}(?:\.[0-9]+)?)(\D*)")
Amount = tuple[Fraction, str]  # the number, and its unit or ""


@lru_cache(4096)
def amount(text: str) -> Amount | None:
    """The one number of a short text, and its unit or ""; None for any other text."""
    if len(text) > MAX_ANSWER:
        return None
    plain = _PLAIN.fullmatch(text)
    if plain is not None and len(text) < MAX_DIGITS:
        return Fraction(plain.group(1)), ""
    text = _simplify(text)
    if compound := _COMPOUND.fullmatch(text):
        return _compound_amount(compound)
    position, value, words = 0, None, list[str]()
    while 0 <= position < len(text):
        match = _NUMBER.match(text, position)
        if text[position].isspace():
            position += 1
        elif match is None:
            start, position = position, _skip_word(text, position, leading=value is None)
            word = text[start:position].strip(" .,;:?\n")
            words += [word] if value is not None or word.lower() in _CURRENCIES else []
        elif value is not None or (value := _value(match)) is None:
            return None
        else:
            words += [unit for name in ("currency", "percent", "after") if (unit := (match.group(name) or "").strip())]
            position, value = _skip_number(text, match.end(), value)
    if value is None or position < 0 or len(words) > _MAX_WORDS or _is_price_of_measure(words):
        return None
    return value, _unit(words)


def decimal_comma(text: str) -> str | None:
    """`3,5 cm` and `1.234,5` with a decimal point, India's `1,00,000` without commas; None for anything else.

    A comma that can separate thousands does so, as in 1,234. A leading zero rules that out, and so do more or fewer
    than three digits after the comma.
    """
    if (indian := _INDIAN.fullmatch(text)) is not None:
        return indian.group(1) + indian.group(2).replace(",", "") + indian.group(3)
    found = _DECIMAL_COMMA.fullmatch(text)
    if found is None or "," in found.group("after"):
        return None
    whole, rest = found.group("whole"), found.group("rest")
    if len(rest) == 3 and re.fullmatch(r"[1-9][0-9]{0,2}", whole):
        return None
    return f"{found.group('before')}{re.sub('[. ]', '', whole)}.{rest}{found.group('after')}"


def _compound_amount(found: re.Match[str]) -> Amount | None:
    """`2 hours 30 minutes` and `5 ft 6 in` as an amount of the first unit."""
    large, first, small, second = found.groups()
    left, right = unit_sizes(first), unit_sizes(second)
    for kind in left.keys() & right.keys():
        if left[kind] > int(small) * right[kind]:
            return int(large) + int(small) * right[kind] / left[kind], first
    return None


def _is_price_of_measure(words: list[str]) -> bool:
    """Whether another unit follows a currency's sign directly, as in `$5cm`."""
    sign, word = (*words, "", "")[:2]
    other = unit_sizes(word) if sign and sign[-1] in _SIGNS and word != "in" else {}
    return bool(other) and not other.keys() & unit_sizes(sign).keys()


def _unit(words: list[str]) -> str:
    """The first known unit among the words, else the last word of what is counted."""
    if PERCENT in words:
        return PERCENT
    known = [word for word in words if unit_sizes(word) and (word != "in" or word == words[-1])]
    end = next((i for i, word in enumerate(words) if word.lower() in _ENDS), len(words))
    return known[0] if known else words[end - 1] if end else ""


def _simplify(text: str) -> str:
    """The text with LaTeX and typography as characters that the patterns know. Two numbers are never joined."""
    text = re.sub(r"\{,\}(?=[0-9]{3}(?![0-9]))", ",", characters(text)).replace("{,}", ".")
    for old, new in ((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\%", "%"), (r"\$", "$"), (r"\!", "")):
        text = text.replace(old, new)
    text = without_fonts(text) if "\\" in text else text
    text = degrees(text)
    text = re.sub(
        r"\u00b0\s?(?:C\b|[Cc]elsius)", " celsius ", re.sub(r"\u00b0\s?(?:F\b|[Ff]ahrenheit)", " fahrenheit ", text)
    )
    text = re.sub(r"\bdegrees? (?=celsius|fahrenheit)", "", text.replace("\u00b0", " degrees "), flags=re.IGNORECASE)
    text = _PER_UNIT.sub(_unit_quotient, _PERCENT.sub("%", text).rstrip()) if "{" in text else _PERCENT.sub("%", text)
    text = re.sub(r"(?:\\q?quad\s*|\s)\(([A-Za-z ]+)\)\s*$|\\q?quad\s*(?=[A-Za-z]|$)", r" \1", text)  # 5 (apples)
    text = re.sub(r"\b([A-Za-z]{2,}) per ([a-z]{2,})\b", r"\1/\2", _POWER_OF_UNIT.sub(_unit_power, text))
    text = re.sub(r"\s*\\div\s*", "/", _REPEATING.sub(_repeating_decimal, re.sub(r"\\[,;: ]", " ", text)))
    text = text.strip().strip("*").strip()
    text = re.sub(r"^[A-Za-z]\s?=\s?", "", without_delimiters(text))
    text = re.sub(r"\{\s?\(([^(){}]*)\)\s?\}", r"{\1}", re.sub(r"^([+-])\s", r"\1", text))
    text = re.sub(r"^([+-])\(([0-9.][^()]*)\)", r"\1\2", text)  # -(3/4)
    return re.sub(rf"^([+-]?[{_SIGNS}])\s", r"\1", re.sub(rf"^([{_SIGNS}])([+-])", r"\2\1", text))


def _unit_quotient(match: re.Match[str]) -> str:
    r"""`\frac{km}{h}` and `km h^{-1}` as `km/h`, if both units are known."""
    top, bottom, first, second, power = match.groups()
    unit = f"{top}/{bottom}" if top else f"{first}/{second}{'^2' if power == '2' else ''}"
    return f" {unit}" if unit_sizes(unit) else match.group()


def _unit_power(match: re.Match[str]) -> str:
    """`square feet` as `feet^2`, if the unit is known."""
    power = 2 if match.group(1)[0] == "s" else 3
    return f"{match.group(2)}^{power}" if unit_sizes(match.group(2)) else match.group()


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a quotient."""
    whole, start, *ways = (match.group(i) or "" for i in range(1, 6))
    again = "".join(ways)
    digits, nines = int(f"0{whole}{start}"), 10 ** len(again) - 1
    return f"{digits * nines + int(again)}/{nines * 10 ** len(start)}"


def _skip_number(text: str, end: int, value: Fraction) -> tuple[int, Fraction]:
    """The position after a number, and its value scaled by a word such as "million"; position -1: not a number."""
    unit = re.compile(r"[A-Za-z]+").match(text, end)
    if unit is not None and unit.group() not in _UNITS:
        return -1, value  # "2x", "3i", "5e": algebra, not a unit
    if unit is None and not re.compile(r"[.,;:?]?(?:\s|$)").match(text, end):
        return -1, value
    scale = re.compile(r"\s([a-z]+)\b").match(text, end)
    if scale is not None and scale.group(1) in _SCALE:
        return scale.end(), value * _SCALE[scale.group(1)]
    return (end + 1 if unit is None and text[end : end + 1].strip() else end), value


def _skip_word(text: str, position: int, *, leading: bool) -> int:
    """The position after a word before the number, or a unit after it; -1 if the word could change the number."""
    match = _WORD.match(text, position)
    if match is None:
        return -1
    word = match.group("word")
    lower = word.lower()
    unit = word in _LETTERS if len(word) == 1 else not any(map(_changes_number, lower.split("-")))
    if not (lower in _LEADING or lower in _CURRENCIES if leading else unit):
        return -1
    tail = re.compile(r"[.,;:?]?(?:\s|$)").match(text, match.end())
    return -1 if tail is None else tail.end()


def _changes_number(word: str) -> bool:
    """Whether the word changes the number before it, or denies it."""
    if word in CHANGING or word in _SCALE:
        return True
    return _MULTIPLES.fullmatch(word) is not None or NUMERAL.fullmatch(word) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    """The matched number; None for too many digits, too large an exponent or a zero denominator."""
    part = {name: text.replace(",", "").strip("()") for name, text in match.groupdict().items() if text is not None}
    if sum(c.isdigit() for c in match.group()) > MAX_DIGITS:
        return None
    top = part.get("wt") or part.get("lt") or part.get("ft") or part.get("st") or part.get("top") or part.get("plain")
    bottom = part.get("wb") or part.get("lb") or part.get("fb") or part.get("sb") or part.get("bottom") or "1"
    power = int(part.get("e") or part.get("p") or part.get("q") or 0)
    if top is None or Fraction(bottom) == 0 or abs(power) > MAX_EXPONENT:
        return None
    value = Fraction(part.get("whole", 0)) + Fraction(top) / Fraction(bottom) * Fraction(10) ** power
    return value * (-1 if part["sign"] == "-" else 1) / (100 if "percent" in part else 1)


PERCENT = "%"  # the unit of a percentage, whose value is divided by 100 already
# Each line: the kind of quantity, then names of units with their size. A name may be in several lines.
_TABLE = """
    length mm 1/1000 millimeter 1/1000 cm 1/100 centimeter 1/100 dm 1/10 m 1 meter 1 km 1000 kilometer 1000
    length in 127/5000 inch 127/5000 ft 381/1250 foot 381/1250 yd 1143/1250 yard 1143/1250 mi 201168/125 mile 201168/125
    mass mg 1/1000 milligram 1/1000 g 1 gram 1 kg 1000 kilogram 1000 lb 45359237/100000 pound 45359237/100000
    mass oz 45359237/1600000 ounce 45359237/1600000 tonne 1000000
    time ms 1/1000 s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800
    months month 1 year 12 yr 12
    volume ml 1/1000 milliliter 1/1000 cl 1/100 l 1 liter 1
    dollars cent 1/100 \u00a2 1/100 $ 1 dollar 1 usd 1 us$ 1 buck 1
    euros cent 1/100 \u20ac 1 euro 1 eur 1
    sterling pence 1/100 penny 1/100 \u00a3 1 pound 1 gbp 1
    yen \u00a5 1 yen 1 jpy 1
    yuan \u00a5 1 yuan 1 rmb 1 cny 1
    rupees paisa 1/100 \u20b9 1 rupee 1 inr 1 rs 1
    won \u20a9 1 krw 1
    rubles \u20bd 1 ruble 1 rouble 1 rub 1
    francs chf 1 franc 1
    angle \u00b0 1 degree 1 deg 1
    radians radian 1 rad 1
    celsius \u00b0c 1 celsius 1
    fahrenheit \u00b0f 1 fahrenheit 1
    power w 1 watt 1 kw 1000 kilowatt 1000
    energy j 1 joule 1 kj 1000
    force n 1 newton 1
    voltage v 1 volt 1
    speed mph 201168/450000 kph 5/18 kmph 5/18 kmh 5/18
"""
_IRREGULAR = {"feet": "foot", "inches": "inch", "cents": "cent", "metre": "meter", "litre": "liter", "people": "person"}
_KNOWN = dict[str, dict[str, Fraction]]()
for _line in _TABLE.split("\n"):
    _kind, *_pairs = _line.split() or [""]
    for _name, _size in zip(_pairs[::2], _pairs[1::2], strict=True):
        _KNOWN.setdefault(_name, {})[_kind] = Fraction(_size)


def singular(word: str) -> str:
    """The word in the singular, in lower case, spelt one way."""
    word = word.lower()
    word = _IRREGULAR.get(word, word)
    plural = len(word) > 3 or word[:-1] in _KNOWN  # apples, hrs
    if len(word) > 2 and plural and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    word = _IRREGULAR.get(word, word)
    return re.sub(r"(met|lit)re$", r"\1er", word)


def unit_sizes(unit: str) -> dict[str, Fraction]:
    """The kinds of quantity that a unit such as `km/h` may measure, with its size in each; {} if unknown."""
    found = {"": Fraction(1)}
    for i, part in enumerate(unit.split("/")):
        name, _, power = part.partition("^")
        power = power.strip("{}")
        known = _KNOWN.get(singular(name), {}) if power in ("", "2", "3") else {}
        times = int(power or 1) if known else 1
        found = {
            f"{kind}{'/' if i else ''}{each}{power}": size * amount ** (-times if i else times)
            for kind, size in found.items()
            for each, amount in known.items()
        }
    return {("length/time" if kind == "speed" else kind): size for kind, size in found.items()}


def same_amount(value: Fraction, unit: str, other: Fraction, other_unit: str) -> bool:
    """Whether the answer, the second amount, is the gold one.

    A unit that only one of them has is ignored. The percent sign is not: 5% is 0.05, and never 5. Only the answer may
    leave it out. Unknown units must be the same word.
    """
    if PERCENT in (unit, other_unit):
        if unit != PERCENT:
            return not unit and value == other
        return value == other if other_unit else other in (value, 100 * value)
    if not unit or not other_unit:
        return value == other
    first, second = unit_sizes(unit), unit_sizes(other_unit)
    if not first or not second:
        return not first and not second and value == other and singular(unit) == singular(other_unit)
    return any(value * first[kind] == other * second[kind] for kind in first.keys() & second.keys())


def unit_ratio(unit: str, other: str) -> Fraction:
    """The size of the other unit in the first one; 0 for units of different kinds or different unknown words."""
    first, second = unit_sizes(unit), unit_sizes(other)
    if not first and not second:
        return Fraction(singular(unit) == singular(other))
    return next((second[kind] / first[kind] for kind in first.keys() & second.keys()), Fraction(0))
