"""English that passes every filter, made from a seed: no two texts alike, no run of words repeated."""

import json
import random
from pathlib import Path

WORDS = [
    "time", "people", "water", "house", "river", "morning", "garden", "letter", "mountain", "city", "winter",
    "summer", "window", "music", "story", "answer", "question", "father", "mother", "brother", "sister",
    "teacher", "student", "village", "market", "harbour", "engine", "bridge", "forest", "animal", "doctor",
    "kitchen", "silver", "yellow", "gentle", "simple", "heavy", "early", "quiet", "bright", "narrow",
    "distant", "ordinary", "careful", "second", "another", "small", "walked", "opened", "carried", "followed",
    "remembered", "believed", "wanted", "started", "finished", "returned", "noticed", "explained", "gathered",
    "slowly", "quickly", "together", "always", "never", "sometimes", "almost", "perhaps", "again", "before",
    "after", "under", "over", "near", "beyond",
]  # fmt: skip
GLUE = [
    "the", "of", "and", "to", "in", "that", "with", "have", "a", "for", "on", "at", "by", "from", "as", "it",
    "was", "his", "her", "their", "this", "which",
]  # fmt: skip


def prose(seed: int, words: int = 120) -> str:
    draw = random.Random(seed)
    said = [draw.choice(GLUE if i % 2 else WORDS) for i in range(words)]
    lines = [" ".join(said[i : i + 12]).capitalize() + "." for i in range(0, words, 12)]
    return "\n".join(lines)


def changed(text: str, share: float, seed: int) -> str:
    """The same text with a share of its words replaced by new ones."""
    draw = random.Random(seed)
    return " ".join(f"word{draw.random():.9f}"[:9] if draw.random() < share else w for w in text.split())


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def kept(out: Path) -> list[str]:
    lines = [line for part in sorted((out / "data").glob("*")) for line in part.read_bytes().split(b"\n") if line]
    return [json.loads(line)["text"] for line in lines]


def files(out: Path) -> dict[str, bytes]:
    """What must not depend on workers or interruptions: everything but the speed."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    report = json.loads(found.pop("report.json"))
    del report["speed"], found["report.txt"], found[".lock"]
    return {**found, "report": json.dumps(report).encode()}


def drops(report: dict) -> dict[str, int]:
    return {row["rule"]: row["documents"] for row in report["dropped"]}
