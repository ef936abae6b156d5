"""Units of measure and money, so that 5 km is 5000 m and not 5 m, and the one rule of the percent sign."""

import re
from fractions import Fraction

PERCENT = "%"  # of an amount whose value is already divided by 100
# What is measured, then names with their size in the first unit of the kind. A name may be in several lines.
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


def sizes(unit: str) -> dict[str, Fraction]:
    """What a unit such as `km/h` or `cm^2` may measure, and its size in the first unit of that kind; {} if unknown."""
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


def same(value: Fraction, unit: str, other: Fraction, other_unit: str) -> bool:
    """Whether the answer, the second amount, is the gold one.

    A unit that only one of them has is set aside. The percent sign is not: 5% is 0.05, and never 5. Only the answer may
    leave it out where the gold one has it. Units that are not known must be the same word.
    """
    if PERCENT in (unit, other_unit):
        if unit != PERCENT:
            return not unit and value == other
        return value == other if other_unit else other in (value, 100 * value)
    if not unit or not other_unit:
        return value == other
    first, second = sizes(unit), sizes(other_unit)
    if not first or not second:
        return not first and not second and value == other and singular(unit) == singular(other_unit)
    return any(value * first[kind] == other * second[kind] for kind in first.keys() & second.keys())


def ratio(unit: str, other: str) -> Fraction:
    """How many of the first unit the other one is; 0 where they measure different things, or are different words."""
    first, second = sizes(unit), sizes(other)
    if not first and not second:
        return Fraction(singular(unit) == singular(other))
    return next((second[kind] / first[kind] for kind in first.keys() & second.keys()), Fraction(0))
