"""From files to a clean corpus: what was planted is dropped under its own name, and nothing is lost on the way."""

import json
from pathlib import Path

import pytest
from prose import changed, drops, files, kept, prose, write

from hone.data.corpus import filters, language
from hone.data.corpus.pipeline import clean
from hone.data.corpus.report import show
from hone.data.corpus.settings import CorpusSettings
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError

GERMAN = """Der alte Mann ging am frühen Morgen langsam durch den stillen Garten, und niemand aus dem Dorf hatte ihn
dort jemals gesehen, obwohl er seit vielen Jahren in dem kleinen Haus am Fluss wohnte und jeden Abend seine Lampe
anzündete, damit die Fischer den Weg zurück in den Hafen finden konnten, wenn der Nebel über dem Wasser lag. """
FRENCH = """Le vieil homme traversait lentement le jardin silencieux au petit matin, et personne dans le village ne
l'avait jamais vu là, bien qu'il habitât depuis de longues années la petite maison au bord de la rivière et qu'il
allumât chaque soir sa lampe afin que les pêcheurs retrouvent le chemin du port quand le brouillard couvrait l'eau. """
INSULTS = ("stupid", "idiot", "shit", "fuck", "bitch", "asshole", "damn", "crap")
FOUL = " ".join(f"{w} {INSULTS[i * i % 8]}" if i % 3 == 0 else w for i, w in enumerate(prose(77).split()))
SHORT = " ".join(prose(50).split()[:30])
FEW = CorpusSettings(shard_bytes=5_000)
LOOSE = dict.fromkeys(CorpusSettings().rules)


def planted(tmp_path) -> list[str]:
    """Two sources; every planted fault is known."""
    good = [prose(k) for k in range(40)]
    first = [*good[:20], GERMAN, FRENCH, good[3].upper(), SHORT, changed(good[5], 0.004, 1)]
    second = [*good[20:], good[7], FOUL, f"{good[21]} {good[21]}", good[7].replace(" ", "  ")]
    return [write(tmp_path / "first.jsonl", first), write(tmp_path / "second.jsonl", second)]


def test_what_was_planted_is_dropped_under_its_name(tmp_path):
    sources = planted(tmp_path)
    settings = CorpusSettings(shard_bytes=5_000, rules={"max_repeated_10_grams": 0.1})
    report = clean(sources, tmp_path / "out", settings)
    found = drops(report)
    assert found["language"] == 2
    assert found["duplicate:exact"] == 3
    assert found["duplicate:near"] == 1
    assert found["quality:min_words"] == 1
    assert sum(n for rule, n in found.items() if rule.startswith("quality:max_copied")) == 1
    assert found["toxicity"] == 1
    assert sum(found.values()) == 9
    assert kept(tmp_path / "out") == [prose(k) for k in range(40)]


def test_documents_and_bytes_add_up(tmp_path):
    sources = planted(tmp_path)
    report = clean(sources, tmp_path / "out", FEW)
    assert report["documents"] == 25 + 24
    assert report["bytes"] == sum(Path(s).stat().st_size for s in sources)
    assert report["documents"] == report["kept_documents"] + sum(drops(report).values())
    assert report["bytes"] == report["kept_bytes"] + sum(d["bytes"] for d in report["dropped"])
    assert [s["documents"] for s in report["sources"]] == [25, 24]
    assert sum(s["kept_documents"] for s in report["sources"]) == report["kept_documents"] == 40
    assert all(d["share"] == d["documents"] / 49 for d in report["dropped"])


def test_an_example_shows_where_what_and_how_much(tmp_path):
    sources = planted(tmp_path)
    report = clean(sources, tmp_path / "out", FEW)
    rows = {row["rule"]: row for row in report["dropped"]}
    (short,) = rows["quality:min_words"]["examples"]
    assert (short["text"], short["measured"], short["file"]) == (SHORT[:160], "30", sources[0])
    with open(sources[0], "rb") as file:
        file.seek(short["at"])
        assert json.loads(file.readline())["text"] == SHORT
    copy = rows["duplicate:exact"]["examples"][0]
    at = int(copy["measured"].rpartition(" ")[2])
    with open(sources[0], "rb") as file:
        file.seek(at)
        assert json.loads(file.readline())["text"] == prose(3)
    assert rows["language"]["examples"][0]["measured"].startswith("de ")
    shown = show(report)
    assert shown == (tmp_path / "out" / "report.txt").read_text()
    assert "MB/s a core" in shown
    assert " ".join(SHORT[:160].split()) in shown


def test_the_result_is_the_same_for_any_number_of_workers_and_any_cut(tmp_path):
    sources = planted(tmp_path)
    evals = (write(tmp_path / "e.jsonl", [prose(2), prose(900)]),)
    settings = CorpusSettings(shard_bytes=3_000, evals=evals, vocab=300)
    for workers in (1, 3):  # two are killed and started again in test_corpus_restart.py
        clean(sources, tmp_path / f"w{workers}", settings, workers=workers)
    assert files(tmp_path / "w1") == files(tmp_path / "w3")
    clean(sources, tmp_path / "whole", CorpusSettings(evals=evals, vocab=300))
    assert kept(tmp_path / "whole") == kept(tmp_path / "w1")


def test_every_step_can_be_switched_off(tmp_path):
    sources = planted(tmp_path)
    off = CorpusSettings(languages=(), rules=LOOSE, toxicity=None, exact=False, near=None)
    report = clean(sources, tmp_path / "out", off)
    assert report["kept_documents"] == report["documents"] == 49
    assert report["speed"].keys() == {"read"}
    rows = [json.loads(line) for source in sources for line in Path(source).read_text().splitlines()]
    assert kept(tmp_path / "out") == [row["text"] for row in rows]


def test_documents_that_overlap_are_reported_and_dropped_if_asked(tmp_path):
    questions = [prose(9000 + k, 24).replace("\n", " ") for k in range(6)]
    texts = [prose(k) + (f" {questions[k // 5]}" if k % 5 == 0 else "") for k in range(25)]
    source, evals = write(tmp_path / "a.jsonl", texts), write(tmp_path / "e.jsonl", questions)
    kept_all = clean([source], tmp_path / "kept", CorpusSettings(evals=(evals,), shard_bytes=4000))
    pair = kept_all["overlap"]["pairs"][0]
    assert (pair["overlap"], pair["items"], kept_all["overlap"]["documents"]) == (5, 6, 5)
    assert kept_all["kept_documents"] == 25
    dropped = clean([source], tmp_path / "dropped", CorpusSettings(evals=(evals,), drop_overlap=True))
    assert drops(dropped) == {"overlap": 5}
    assert kept(tmp_path / "dropped") == [text for k, text in enumerate(texts) if k % 5]
    again = clean([str(tmp_path / "dropped" / "data")], tmp_path / "again", CorpusSettings(evals=(evals,)))
    assert again["overlap"]["pairs"][0]["overlap"] == 0


def test_bad_records_are_counted_listed_and_passed_by(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": prose(0)}).encode()
    path.write_bytes(good + b'\n{"text": "\xff"}\nnot json\n{"text": 3}\n{"text": ""}\n')
    report = clean([str(path)], tmp_path / "out")
    bad = ("not_utf8", "not_json", "no_text", "empty")
    assert drops(report) == {f"unreadable:{name}": 1 for name in bad}
    assert kept(tmp_path / "out") == [prose(0)]
    with pytest.raises(HoneError, match=f"byte {len(good) + 1}: the record is not utf8"):
        clean([str(path)], tmp_path / "strict", CorpusSettings(strict=True))


def test_a_source_of_which_nothing_can_be_read_is_an_error(tmp_path):
    source = write(tmp_path / "a.jsonl", [prose(0)])
    with pytest.raises(HoneError, match=r"no text.*--column"):
        clean([source], tmp_path / "out", CorpusSettings(column="body"))


def test_empty_files_give_an_empty_corpus(tmp_path):
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_bytes(b"")
    report = clean([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], tmp_path / "out", workers=2)
    assert (report["documents"], report["kept_documents"], report["dropped"]) == (0, 0, [])
    assert show(report)


def test_a_document_of_ten_megabytes_goes_through(tmp_path):
    text = "\n\n".join(prose(k, 120) for k in range(14_000))
    assert len(text) > 9_500_000
    source = write(tmp_path / "a.jsonl", [text, prose(1)])
    loose = CorpusSettings(rules={**LOOSE, "max_words": 10_000_000}, toxicity=None)
    assert clean([source], tmp_path / "out", loose)["kept_documents"] == 2
    short = CorpusSettings(max_document=1_000_000)
    assert drops(clean([source], tmp_path / "limit", short)) == {"unreadable:too_long": 1}


def test_the_tokenizer_is_trained_on_what_is_kept(tmp_path):
    texts = [prose(k) for k in range(30)]
    source = write(tmp_path / "a.jsonl", [*texts, "qqqq zzzz " * 30])
    clean([source], tmp_path / "out", CorpusSettings(vocab=400))
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer")
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert len(tokenizer.encode("qqqq")) == 4
    clean([source], tmp_path / "sample", CorpusSettings(vocab=400, bpe_bytes=4_000))
    sample = Tokenizer.load(tmp_path / "sample" / "tokenizer")
    assert sample.inner.get_vocab() != tokenizer.inner.get_vocab()


@pytest.mark.parametrize(("text", "code"), [(GERMAN, "de"), (FRENCH, "fr"), (prose(0), "en")])
def test_languages_are_told_apart(text, code):
    found, probability = language.identify(text)
    assert found == code
    assert probability > 0.9


def test_a_kept_language_is_chosen(tmp_path):
    source = write(tmp_path / "a.jsonl", [GERMAN, FRENCH, prose(0)])
    clean([source], tmp_path / "out", CorpusSettings(languages=("de", "fr"), rules=LOOSE, toxicity=None))
    assert kept(tmp_path / "out") == [GERMAN, FRENCH]


def test_foul_text_scores_high_and_a_long_text_by_its_windows():
    foul, clean_text = filters.toxicity([FOUL, prose(0)])
    assert foul > 0.9
    assert clean_text < 0.3
    text = " ".join(prose(k, 100) for k in range(3))
    parts = [filters.toxicity([window])[0] for window in filters.windows(text)]
    assert filters.toxicity([text]) == [pytest.approx(sum(parts) / 3)]
    assert filters.toxicity([]) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"languages": ("xx",)}, "no language 'xx'"),
        ({"rules": {"min_word": 3}}, "no rule 'min_word'"),
        ({"split": "page"}, "split 'page'"),
        ({"near": 0.0}, "near is 0"),
        ({"toxicity": 1.5}, "toxicity is 1.5"),
        ({"ngram": 0}, "ngram is 0"),
        ({"vocab": 257}, "vocab_size 257: need at least 258"),
        ({"rules": {"min_words": float("nan")}}, "limit of min_words is nan"),
        ({"drop_overlap": True}, "--eval"),
        ({"evals": ("nowhere.jsonl",)}, "no evaluation"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_written(tmp_path, settings, message):
    source = write(tmp_path / "a.jsonl", [prose(0)])
    with pytest.raises(HoneError, match=message):
        clean([source], tmp_path / "out", CorpusSettings(**settings))
    assert not (tmp_path / "out").exists()
    for sources, workers in (([], 1), ([source], 0)):
        with pytest.raises(HoneError):
            clean(sources, tmp_path / "out", workers=workers)
