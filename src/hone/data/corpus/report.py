"""The report: documents dropped by each rule, with examples; documents kept; speed; overlap with evaluation sets."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hone.data.corpus import overlap
from hone.data.corpus.atomic import read_json
from hone.data.corpus.run import CorpusRun
from hone.data.corpus.shards import index_of
from hone.data.corpus.tally import SHOWN, Tally, merge


def build_report(run: CorpusRun) -> dict[str, Any]:
    """The report as JSON. Only `speed` depends on the workers. In documents and in bytes, read = kept + dropped."""
    total = Tally()
    kept: dict[str, list[int]] = {source: [0, 0, 0, 0] for source in run.sources}
    for i, shard in enumerate(run.shards):
        first, second = read_json(run.file(i, ".json")), read_json(run.file(i, ".kept.json"))
        for counts in (first, second):
            merge(total, counts)
        own = (first["documents"], first["bytes"], *second["kept"])
        kept[shard.source] = [a + b for a, b in zip(kept[shard.source], own, strict=True)]
    merge(total, read_json(run.work / "copies.json"))
    sums = [sum(column) for column in zip(*kept.values(), strict=True)]
    names = ("documents", "bytes", "kept_documents", "kept_bytes")
    return {
        **dict(zip(names, sums, strict=True)),
        "sources": [{"source": s, **dict(zip(names, counts, strict=True))} for s, counts in kept.items()],
        "dropped": _dropped(run, total),
        "overlap": _overlap(run),
        "tokenizer": None if run.settings.vocab is None else {"folder": "tokenizer", "vocab": run.settings.vocab},
        "settings": run.settings.plain(),
        "speed": {step: _speed(size, seconds) for step, (size, seconds) in total.steps.items() if size},
    }


def _speed(size: float, seconds: float) -> dict[str, float]:
    return {"bytes": size, "seconds": seconds, "mb_per_second": size / 1e6 / seconds if seconds else 0.0}


def _dropped(run: CorpusRun, total: Tally) -> list[dict[str, Any]]:
    limits = {f"quality:{name}": limit for name, limit in run.settings.plain()["rules"].items()}
    limits |= {"language": run.settings.confidence, "toxicity": run.settings.toxicity}
    limits |= {"duplicate:near": run.settings.near, "overlap": run.settings.ngram}
    return [
        {
            "rule": rule,
            "limit": limits.get(rule),
            "documents": documents,
            "share": documents / total.documents if total.documents else 0.0,
            "bytes": size,
            "examples": total.examples[rule],
        }
        for rule, (documents, size) in sorted(total.dropped.items(), key=lambda pair: (-pair[1][0], pair[0]))
    ]


def _overlap(run: CorpusRun) -> dict[str, Any] | None:
    settings = run.settings
    if not settings.evals:
        return None
    index = index_of(settings.evals, settings.eval_fields, settings.ngram, settings.short)
    hits = {source: np.zeros(index.size, dtype=bool) for source in run.sources}
    examples: dict[str, list[dict[str, Any]]] = {}
    documents = 0
    for i, shard in enumerate(run.shards):
        hits[shard.source] |= np.unpackbits(np.load(run.file(i, ".hits.npy")), count=index.size).astype(bool)
        counts = read_json(run.file(i, ".kept.json"))["overlap"]
        documents += counts["documents"]
        for name, shown in counts["examples"].items():
            examples[name] = [*examples.get(name, []), *shown][:SHOWN]
    return {
        "ngram": settings.ngram,
        "documents": documents,
        "dropped": settings.drop_overlap,
        "pairs": overlap.summary(index, hits),
        "examples": examples,
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def show(report: Mapping[str, Any]) -> str:
    """The report as text."""
    documents, size = report["documents"], report["bytes"]
    rows = [["", "documents", "share", "MB", "limit"], _row("read", documents, documents, size)]
    rows += [_row(f"- {d['rule']}", d["documents"], documents, d["bytes"], d["limit"]) for d in report["dropped"]]
    rows.append(_row("kept", report["kept_documents"], documents, report["kept_bytes"]))
    parts = [table(rows)]
    speeds = [[step, f"{s['bytes'] / 1e6:.2f}", f"{s['mb_per_second']:.2f}"] for step, s in report["speed"].items()]
    parts.append(table([["step", "MB", "MB/s a core"], *speeds]))
    if report["overlap"]:
        parts.append(show_overlap(report["overlap"]))
    for drop in report["dropped"]:
        parts.append(f"{drop['rule']}\n" + "".join(_example(example) for example in drop["examples"]))
    return "\n".join(parts)


def show_overlap(report: Mapping[str, Any]) -> str:
    """One line for every source and evaluation set, then the examples."""
    head = ["source and evaluation set", "items", "tested", "overlap", "share", "mostly"]
    rows = [
        [
            f"{p['source']} : {p['eval']}",
            *(str(p[k]) for k in ("items", "tested", "overlap")),
            f"{p['share']:.2%}",
            str(p["mostly"]),
        ]
        for p in report["pairs"]
    ]
    lines = [
        f"  {name} row {e['row']}: {e['file']} byte {e['at']}: {e['words']}\n"
        for name, shown in report["examples"].items()
        for e in shown
    ]
    return table([head, *rows]) + "".join(lines)


def _row(name: str, documents: int, total: int, size: int, limit: float | None = None) -> list[str]:
    share = documents / total if total else 0.0
    return [name, str(documents), f"{share:.2%}", f"{size / 1e6:.2f}", "" if limit is None else f"{limit:g}"]


def _example(example: Mapping[str, Any]) -> str:
    measured = f" ({example['measured']})" if example.get("measured") else ""
    return f"  {example['file']} byte {example['at']}{measured}: {' '.join(example['text'].split())}\n"
