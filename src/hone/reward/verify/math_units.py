"""Units of measure, so that 5 km is 5000 m and not 5 m."""

import re
from fractions import Fraction

_TABLE = """
    length mm 1/1000 millimeter 1/1000 cm 1/100 centimeter 1/100 dm 1/10 m 1 meter 1 km 1000 kilometer 1000
    length in 127/5000 inch 127/5000 ft 381/1250 foot 381/1250 yd 1143/1250 yard 1143/1250 mi 201168/125 mile 201168/125
    mass mg 1/1000 milligram 1/1000 g 1 gram 1 kg 1000 kilogram 1000 lb 45359237/100000 pound 45359237/100000
    mass oz 45359237/1600000 ounce 45359237/1600000 tonne 1000000
    time ms 1/1000 s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800
    volume ml 1/1000 milliliter 1/1000 cl 1/100 l 1 liter 1
    money cent 1/100 $ 1 dollar 1 usd 1
    euro € 1 euro 1 eur 1
    sterling £ 1 gbp 1
    angle ° 1 degree 1 deg 1
    power w 1 watt 1 kw 1000 kilowatt 1000
    energy j 1 joule 1 kj 1000
    force n 1 newton 1
    voltage v 1 volt 1
    speed mph 201168/450000 kph 5/18
"""
_IRREGULAR = {"feet": "foot", "inches": "inch", "cents": "cent", "metre": "meter", "litre": "liter", "people": "person"}
_KNOWN = dict[str, tuple[str, Fraction]]()
for _line in _TABLE.split("\n"):
    _kind, *_pairs = _line.split() or [""]
    _KNOWN |= {name: (_kind, Fraction(size)) for name, size in zip(_pairs[::2], _pairs[1::2], strict=True)}


def singular(word: str) -> str:
    """The word in the singular, in lower case, spelt one way."""
    word = word.lower()
    word = _IRREGULAR.get(word, word)
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    word = _IRREGULAR.get(word, word)
    return re.sub(r"(met|lit)re$", r"\1er", word)


def size(unit: str) -> tuple[str, Fraction] | None:
    """What a unit such as `km/h` or `cm^2` measures and how many of the first unit of its kind it is, if known."""
    kind, factor = "", Fraction(1)
    for i, part in enumerate(unit.split("/")):
        name, _, power = part.partition("^")
        power = power.strip("{}")
        known = _KNOWN.get(singular(name))
        if known is None or power not in ("", "2", "3"):
            return None
        times = int(power or 1)
        kind += f"{'/' if i else ''}{known[0]}{power}"
        factor *= known[1] ** (-times if i else times)
    return ("length/time" if kind == "speed" else kind), factor


def same(value: Fraction, unit: str, other: Fraction, other_unit: str) -> bool:
    """Equal amounts; a unit that only one of them has is set aside, and unknown ones have to be the same word."""
    if not unit or not other_unit:
        return value == other
    first, second = size(unit), size(other_unit)
    if first is None or second is None:
        return first is second and value == other and singular(unit) == singular(other_unit)
    return first[0] == second[0] and value * first[1] == other * second[1]
