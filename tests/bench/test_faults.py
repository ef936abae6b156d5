"""The catalogue of seeded faults: it fits the source, says who must notice, and the program tells caught from not."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import faults as program
from benchmarks.catalogue import FAULTS, Edit, Fault, Sight
from benchmarks.catalogue.fault import fault as made
from benchmarks.catalogue.world import make_world
from benchmarks.faults import Result, examine, file_of, page, seen_in
from benchmarks.patched import ROOT, Bench

OURS = [f for f in FAULTS if f.source]
USERS = [f for f in FAULTS if not f.source]
HERE = Bench(ROOT, [])
HERE.root = ROOT


def wrong_with(fault: Fault) -> str:
    """Why a fault of the source cannot be injected, "" where it can."""
    try:
        patched = program.patch_of(HERE, fault)
        for path, text in patched.items():
            if path.endswith(".py"):  # others are compiled where the fault is injected
                compile(text, path, "exec")
    except (ValueError, SyntaxError) as error:
        return str(error)
    if any(text == HERE.source(path) for path, text in patched.items()):
        return "changes nothing"
    for test in fault.tests:
        file, _, name = test.partition("::")
        if f"def {name}" not in (ROOT / "tests" / file).read_text():  # one case of a test may be in a loop
            return f"there is no test {test}"
    return "" if fault.tests else "names no test"


def test_every_fault_of_the_source_fits_and_compiles() -> None:
    assert {fault.name: wrong for fault in OURS if (wrong := wrong_with(fault))} == {}


def test_a_fault_that_does_not_fit_is_found() -> None:
    fits = made("fits", "contract", "algorithm", "algo/terms.py", old="expm1() + d", new="expm1() - d", tests="tiny.py")
    edits = ("no such text", "new"), ("expm1() + d", "expm1() - "), ("expm1() + d", "expm1() + d")
    spoiled = [replace(fits, source=(Edit(file="", old=old, new=new),)) for old, new in edits]
    spoiled += [replace(fits, tests=()), replace(fits, tests=("tiny.py::test_nothing",))]
    assert not wrong_with(fits)
    assert all(wrong_with(each) for each in spoiled)


def test_every_fault_of_the_user_fits_the_project(project: Path) -> None:
    for fault in USERS:
        assert fault.sight, fault.name
        assert fault.sight.finding or fault.sight.refusal, fault.name
        assert bool(fault.project) != bool(fault.settings), fault.name
        for edit in fault.project:
            before = (project / edit.file).read_text()
            assert edit.apply(before) != before, fault.name


def test_the_catalogue_is_large_and_says_what_it_mimics() -> None:
    assert len(OURS) >= 45
    assert len(USERS) >= 20
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert all(re.fullmatch(r"pain (1?\d|2[0-7])|contract", f.mimics) for f in FAULTS)


def test_a_patch_that_no_longer_fits_is_loud() -> None:
    for old in ("no such text", "import"):
        with pytest.raises(ValueError, match="not once"):
            Edit(file="algo/terms.py", old=old, new="").apply("import a\nimport b\n")
    with pytest.raises(ValueError, match="0 files"):
        file_of(HERE, Edit(file="algo", old="no such text", new=""))
    with pytest.raises(ValueError, match=r"\d\d+ files"):
        file_of(HERE, Edit(file="algo", old="import", new=""))


def test_a_patch_finds_the_file_that_has_its_text() -> None:
    for place in ("algo/terms.py", "algo", "", "model"):  # the last: where it was once
        assert file_of(HERE, Edit(file=place, old="(-d).expm1() + d", new="")) == "hone/algo/terms.py"
    assert file_of(HERE, Edit(file="algo/terms.py", old="import", new="")) == "hone/algo/terms.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_world(folder)
    return folder


def look(fault: Fault, project: Path, place: Path) -> program.Report:
    (place / "src").symlink_to(ROOT / "src")
    return examine(fault, project=project, place=place)


def test_a_refusal_and_a_finding_are_seen_and_a_sound_project_is_not(project: Path, tmp_path: Path) -> None:
    named = {f.name: f for f in USERS}
    refused, found = named["a group of one"], named["two beginnings of the text, by template"]
    sound = Fault(name="none", mimics="", where="recipe", sight=Sight())
    reports = {}
    for name, fault in (("refused", refused), ("found", found), ("sound", sound)):
        (tmp_path / name).mkdir()
        reports[name] = look(fault, project, tmp_path / name)
    assert refused.sight
    assert found.sight
    assert seen_in(reports["refused"], refused.sight) == "hone check: refused"
    assert seen_in(reports["found"], found.sight) == "hone check: first token"
    for sight in (refused.sight, found.sight):
        assert seen_in(reports["sound"], sight) == ""
    loud = [f for f in reports["sound"]["findings"] if f["verdict"] in ("warn", "fail")]
    assert not loud


def test_only_a_warning_or_a_failure_of_the_named_finding_counts() -> None:
    def report(name: str, verdict: str) -> program.Report:
        return {"findings": [{"name": name, "verdict": verdict}], "error": None}

    sight = Sight(finding="mask", refusal="")
    assert seen_in(report("mask", "warn"), sight)
    assert seen_in(report("mask", "fail"), sight)
    assert not seen_in(report("mask", "pass"), sight)
    assert not seen_in(report("mask", "skip"), sight)
    assert not seen_in(report("signal", "fail"), sight)
    assert not seen_in({"findings": [], "error": "anything"}, sight)


def test_the_page_says_what_was_not_caught() -> None:
    text = page([Result(FAULTS[0], True, "algo/x.py::test", 1.0), Result(FAULTS[1], False, "", 2.0)], 60.0)
    assert "2 faults, 1 caught" in text
    assert f"| {FAULTS[1].name} | {FAULTS[1].mimics} | {FAULTS[1].where} | **not caught** | 2.0 |" in text
    assert json.dumps(FAULTS[0].name)[1:-1] in text
