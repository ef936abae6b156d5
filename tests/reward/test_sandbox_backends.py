"""Other walls than Hone's own: tools that are installed, and a service by URL."""

import base64
import json
import shutil
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.hostile import PROGRAMS, aimed, judge, world
from hone.errors import HoneError
from hone.reward.sandbox import Call, Limits, Program, Returned, Sandbox, SandboxError
from hone.reward.sandbox_cgroups import find
from hone.reward.sandbox_limits import INSIDE_FILES, Wanted, configuration, interpreter
from hone.reward.sandbox_pool import Pool
from hone.reward.sandbox_remote import TOKEN, service
from hone.reward.sandbox_slots import HOME
from hone.reward.sandbox_talk import frame
from hone.reward.sandbox_tools import TOOLS, gvisor, nsjail

WORD = "a secret of this test"
pytestmark = pytest.mark.usefixtures("needs_sandbox")
GOOD = Program(source="def f(x): return x + 1", calls=[Call("f", (41,))])
SOME = ("C001", "C004", "C005", "C006", "C020", "C021", "C026", "C028", "C031", "C040", "C061", "H001", "V029", "R022")


@pytest.fixture(scope="module")
def url():
    limits = Limits(seconds=3)
    pool = Pool(Wanted(limits=limits, slots=2, python=interpreter(), packages=()))
    with service(pool, limits, host="127.0.0.1", port=0, token=WORD) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
    pool.close()


def test_a_service_runs_programs_and_only_data_comes_back(url, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    with world() as places, Sandbox(backend=url) as sandbox:
        assert sandbox.run(GOOD).results == (Returned(42),)
        done = sandbox.run(Program(source="print(input())\nraise SystemExit(3)", stdin="é"))
        assert (done.stdout, done.status) == ("é\n".encode(), 0)
        assert not done.loaded
        assert sandbox.run(Program(source="while True: pass"), seconds=0.2).limit == "time"
        assert sandbox.run(Program(source="import os\nos.write(3, b'rubbish')")).limit == "result"
        for program in PROGRAMS:
            if program.id in SOME:
                verdict = judge(sandbox, aimed(program, places))
                assert (verdict.escaped, verdict.passed) == (False, "ok" in program.marks), program.id
        with pytest.raises(SandboxError, match="cannot run over the network"):
            sandbox.talk(b"", most=1, ask=lambda records: None)


def post(url, body, token=WORD):
    request = urllib.request.Request(f"{url}/run", body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_service_refuses_strangers_and_rubbish(url, monkeypatch):
    request = base64.b64encode(frame({"source": ""})).decode()
    asked = {"request": request, "most": 1, "limits": {"seconds": 1}}
    assert post(url, json.dumps(asked).encode(), token="guess") == 401
    rubbish = [b"", b"{}", b"[" * 10000, b'{"request": 1}', json.dumps(asked | {"request": "!"}).encode()]
    rubbish += [json.dumps(asked | {"most": "x"}).encode(), json.dumps(asked | {"limits": 3}).encode()]
    assert {post(url, body) for body in rubbish} <= {400, 200}
    assert post(url, b"x", token="") == 401
    monkeypatch.setenv(TOKEN, "guess")
    with Sandbox(backend=url) as sandbox, pytest.raises(SandboxError, match="does not answer"):
        sandbox.run(GOOD)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(SandboxError, match=f"wants a token: put it into the environment as {TOKEN}"):
        Sandbox(backend=url)


class Liar(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = self.server.answer
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""


@pytest.mark.parametrize(
    "answer", [b"no", b"[]", b"{}", b'{"stdout": "", "stderr": "", "records": "e30=", "limit": "", "told": {}}']
)
def test_what_is_no_sandbox_is_no_verdict(answer, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    with HTTPServer(("127.0.0.1", 0), Liar) as server:
        server.answer = answer
        threading.Thread(target=server.handle_request).start()
        with Sandbox(backend=f"http://127.0.0.1:{server.server_port}") as sandbox, pytest.raises(SandboxError):
            sandbox.run(GOOD)


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_holds_the_same_programs(name):
    if shutil.which(TOOLS[name][0]) is None:
        with pytest.raises(HoneError, match=f"is not installed: install {name}"):
            Sandbox(backend=name)
        return
    if find() is None:
        with pytest.raises(HoneError, match="bounds memory by cgroups"):
            Sandbox(backend=name)
        return
    with world() as places, Sandbox(backend=name, limits=Limits(seconds=3)) as sandbox:
        assert sandbox.run(GOOD).results == (Returned(42),)
        assert sandbox.run(Program(source="while True: pass"), seconds=0.2).limit == "time"
        for program in PROGRAMS:
            if program.id in (*SOME, "C015"):
                verdict = judge(sandbox, aimed(program, places))
                assert (verdict.escaped, verdict.passed) == (False, "ok" in program.marks), program.id


@pytest.fixture
def conf():
    wanted = Wanted(limits=Limits(disk=1 << 20), slots=1, python=interpreter(), packages=())
    return configuration(wanted, user=True, watched=False)


def after(command, flag):
    """What a command names after each such flag."""
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


def test_the_command_of_nsjail_shows_what_ours_has_and_lets_one_pipe_be_written(conf):
    command = nsjail("/place", conf, ["python", "-c", "code"])
    shown = [f"{source}:{target}" for source, target in conf["root"]["binds"]]
    shown += [f"{HOME}/{name}:/hone/{name}" for name in INSIDE_FILES]
    assert sorted(after(command, "--bindmount_ro")) == sorted(shown + [f"{n}:{n}" for n in conf["root"]["files"]])
    assert after(command, "--bindmount") == ["/place/result:/hone/result"]
    assert after(command, "--mount") == ["none:/tmp:tmpfs:size=1048576"]
    assert command[-4:] == ["--", "python", "-c", "code"]
    assert not {"--keep_caps", "--keep_env", "--rw", "-N", "--disable_no_new_privs"} & set(command)


def test_the_bundle_of_gvisor_shows_what_ours_has_and_lets_one_pipe_be_written(conf, tmp_path):
    command = gvisor(str(tmp_path), conf, ["python", "-c", "code"])
    bundle = json.loads((tmp_path / "config.json").read_text())
    mounts = {m["destination"]: m for m in bundle["mounts"]}
    written = {name for name, m in mounts.items() if "ro" not in m["options"]}
    assert written == {"/hone/result", "/tmp", "/dev/shm"}
    assert {mounts[name]["options"][0] for name in ("/tmp", "/dev/shm")} == {"size=1048576"}
    assert {(m["source"], m["destination"]) for m in mounts.values() if "ro" in m["options"]} == {
        *conf["root"]["binds"],
        *((f"{HOME}/{name}", f"/hone/{name}") for name in INSIDE_FILES),
    }
    process = bundle["process"]
    assert (process["args"], process["capabilities"]) == (["python", "-c", "code"], {})
    assert process["noNewPrivileges"]
    assert {limit["type"]: limit["hard"] for limit in process["rlimits"]} == conf["job"]["rlimits"]
    assert after(command, "--network") == ["none"]
    assert (tmp_path / "root/etc/passwd").read_text().startswith("program:")
