"""Programs in any language of the machine, by a file of settings: what is right passes, all else is 0, in its time."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from patience import patience

from hone.cli import main
from hone.config.overrides import from_plain
from hone.errors import HoneError
from hone.launch.rewards import function_to_isolate
from hone.reward.sandbox.sandbox import Program, SandboxLimits
from hone.reward.verify import make_verifier
from hone.reward.verify.code.settings import CodeSettings, reward_arguments
from hone.reward.verify.code.verdict import code_reward, sandboxes
from hone.types import Outcome, Task

Write = Callable[[str], Callable[[str, Task], Outcome]]  # settings to a reward
SUM = Task(prompt="sum", extra={"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]})
CALLS = Task(prompt="add", extra={"test_list": ["assert add(1, 2) == 3"]})
JAVA = "java -XX:-UsePerfData -XX:+UseSerialGC"
JAVAC = "javac -J-XX:-UsePerfData -J-XX:+UseSerialGC Main.java"
ETC = sorted(map(str, Path("/etc").glob("java-*-openjdk")))  # where Debian keeps what a Java needs to start
SETTINGS = {
    "c": "file: main.c\nbuild: gcc -o main main.c\nrun: ./main\nfence: c\n",
    "c++": "file: main.cc\nbuild: [g++ -o main main.cc]\nrun: ./main\nfence: [c++, cpp]\n",
    "bash": "file: main.sh\nrun: bash main.sh\nfence: [sh, bash]\n",
    "perl": "file: main.pl\nrun: perl main.pl\nfence: perl\n",
    "awk": "file: main.awk\nrun: awk -f main.awk\nfence: awk\n",
    "tcl": "file: main.tcl\nrun: tclsh main.tcl\nfence: tcl\nfolders: [/usr/share/tcltk]\n",
    "node": "file: main.js\nrun: node main.js\nfence: [js, javascript]\naddresses: 16384\n",
    "java": f"file: Main.java\nbuild: {JAVAC}\nrun: {JAVA} Main\nfence: java\naddresses: 16384\nprocesses: 64\n"
    f"seconds: 20\nfolders: [{', '.join(ETC)}]\n",
}
TOOLS = {"c": "gcc", "c++": "g++", "tcl": "tclsh", "java": "javac"}  # where the language is not called as its tool
TAGS = {"node": "js"}
QUICK = [name for name in SETTINGS if name != "java"]  # whose builds take no seconds
MAIN = "public class Main { public static void main(String[] a) throws Exception {"
RIGHT = {
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "c++": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "bash": "read a b\necho $((a + b))",
    "perl": 'use strict; my ($x, $y) = split " ", <STDIN>; print $x + $y, "\\n";',
    "awk": "{ print $1 + $2 }",
    "tcl": "gets stdin line\nputs [expr [lindex $line 0] + [lindex $line 1]]",
    "node": 'const [a, b] = require("fs").readFileSync(0, "utf8").split(" ").map(Number)\nconsole.log(a + b)',
    "java": f"{MAIN} var s = new java.util.Scanner(System.in); System.out.println(s.nextInt() + s.nextInt()); }} }}",
}
FLOOD = {
    "c": '#include <stdio.h>\nint main() { for (;;) puts("3"); }',
    "c++": "#include <iostream>\nint main() { for (;;) std::cout << 3 << std::endl; }",
    "bash": "while true; do echo 3; done",
    "perl": 'print "3\\n" while 1;',
    "awk": "BEGIN { while (1) print 3 }",
    "tcl": "while 1 { puts 3 }",
    "node": 'for (;;) require("fs").writeSync(1, "3\\n")',
    "java": f"{MAIN} for (;;) System.out.println(3); }} }}",
}
GREEDY = {
    "c": "#include <stdlib.h>\n#include <string.h>\nint main() { for (;;) memset(malloc(1 << 24), 1, 1 << 24); }",
    "perl": "my @x; push @x, 'x' x (1 << 24) while 1;",
    "node": "const x = []; for (;;) x.push(Buffer.alloc(1 << 24, 1))",
    "java": f"{MAIN} var x = new java.util.ArrayList<byte[]>(); for (;;) x.add(new byte[1 << 24]); }} }}",
}
pytestmark = pytest.mark.usefixtures("needs_sandbox")


@pytest.fixture
def reward(tmp_path: Path) -> Write:
    def write(text: str) -> Callable[[str, Task], Outcome]:
        path = tmp_path / "code.yaml"
        path.write_text(text)
        found = function_to_isolate(f"code:{path}", asked=True)
        assert found is not None
        return found

    return write


def needs(name: str) -> None:
    if not shutil.which(tool := TOOLS.get(name, name), path="/usr/bin"):
        pytest.skip(f"this machine has no {tool} in /usr/bin")


def fenced(code: str, tag: str = "") -> str:
    return f"```{tag}\n{code}\n```\n"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_program_passes(name: str, reward: Write):
    needs(name)
    assert reward(SETTINGS[name])(fenced(RIGHT[name], TAGS.get(name, name)), SUM).value == 1.0


@pytest.mark.parametrize("name", [*QUICK, pytest.param("java", marks=pytest.mark.slow)])
def test_a_program_that_is_wrong_or_none_does_not(name: str, reward: Write):
    needs(name)
    judge = reward(SETTINGS[name] + "mode: fraction\n")
    assert judge(fenced("print(3)", "python") + fenced(RIGHT[name].replace("+ ", "- ")), SUM).value == 0.0
    assert judge(fenced("this is } not ( a program"), SUM).value == 0.0
    assert judge(fenced(RIGHT[name]), CALLS).reason.startswith("functions can be called in Python only")


@pytest.mark.parametrize("name", [*QUICK, pytest.param("java", marks=pytest.mark.slow)])
def test_output_without_end_ends(name: str, reward: Write):
    needs(name)
    start = time.monotonic()
    assert reward(SETTINGS[name])(fenced(FLOOD[name]), SUM).value == 0.0
    assert time.monotonic() - start < patience(30)


@pytest.mark.parametrize("name", ["c", "perl", "node", pytest.param("java", marks=pytest.mark.slow)])
def test_memory_without_end_ends_whatever_addresses_there_are(name: str):
    needs(name)
    settings = from_plain(yaml.safe_load(SETTINGS[name]), CodeSettings(memory=256, addresses=16384), where="settings")
    how = reward_arguments(settings, "settings")
    programs, _ = sandboxes(how["limits"], how["folders"])
    done = programs.run(Program(source=GREEDY[name], stdin="", language=how["language"]))
    assert done.limit == "memory" or b"OutOfMemoryError" in done.stderr


def test_a_build_that_does_not_end_is_ended_with_what_it_started(reward: Write):
    needs("c")
    judge = reward(SETTINGS["c"] + "seconds: 0.5\n")
    endless = '#include "/dev/zero"\nint main() { return 0; }'
    bomb = "\n".join(["#define X0 1+1+1+1", *(f"#define X{i} {'+'.join([f'X{i - 1}'] * 9)}" for i in range(1, 12))])
    start = time.monotonic()
    assert judge(fenced(endless), SUM).value == 0.0
    assert judge(fenced(f"{bomb}\nint main() {{ return X11; }}"), SUM).value == 0.0
    assert time.monotonic() - start < patience(15)


def test_what_a_compiler_says_is_not_output_and_cannot_name_files_of_the_machine(reward: Write, tmp_path: Path):
    needs("c")
    secret = tmp_path / "answers.txt"
    secret.write_text("3\n")
    judge = reward(SETTINGS["c"] + "mode: fraction\n")
    assert judge(fenced('#pragma message "3"\nint main() { return 0; }'), SUM).value == 0.0
    peek = f'#include <unistd.h>\nint main() {{ write(1, (char[]){{\n#embed "{secret}"\n}}, 2); }}'
    link = f'__asm__(".section .rodata\\ns: .incbin \\"{secret}\\"\\n.text"); extern char s[];'
    assert judge(fenced(peek), SUM).value == 0.0
    assert judge(fenced(f"#include <unistd.h>\n{link}\nint main() {{ write(1, s, 2); }}"), SUM).value == 0.0


def test_more_seconds_than_the_usual_are_had_by_the_program_and_its_tests():
    waits = Task(prompt="", extra={"test_list": ["for x in add(1, 2): assert x == 3"]})
    slow = fenced("import time\ndef add(a, b):\n    time.sleep(5.5)\n    return [a + b]")
    assert code_reward(slow, waits, limits=SandboxLimits(seconds=8)).value == 1.0


def test_memory_and_processes_are_settings(reward: Write):
    large = fenced("x = bytearray(200 << 20)\na, b = map(int, input().split())\nprint(a + b)")
    assert code_reward(large, SUM).value == 1.0
    assert reward("memory: 128\n")(large, SUM).value == 0.0
    start = "import threading\nthreading.stack_size(1 << 18)\nall_there = threading.Event()\n"
    start += "for _ in range(50): threading.Thread(target=all_there.wait, args=[2]).start()\nall_there.set()\n"
    many = fenced(start + "a, b = map(int, input().split())\nprint(a + b)")
    assert [reward(f"processes: {n}\n")(many, SUM).value for n in (32, 64)] == [0.0, 1.0]


def test_a_share_is_a_setting():
    share, hangs = make_verifier("code:fraction")
    assert share(fenced("print(3)", "python"), SUM).value == 0.5
    assert not hangs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: some", "mode: expected one of all, fraction, got 'some'"),
        ("seconds: 0", "seconds is 0.0: give a number above 0"),
        ("seconds: .inf", "seconds: expected a number"),
        ("memory: 1", "an interpreter needs"),
        ("memory: -5", "give a number above 0"),
        ("memory: 1.5", "memory: expected a whole number, got 1.5"),
        ("addresses: -1", "give a number above 0"),
        ("seconds: true", "seconds: expected a number, got True"),
        ("run: ./main", "needs both file and run"),
        ("file: main.c", "needs both file and run"),
        ("build: gcc main.c", "needs both file and run"),
        ("build: [1]", "build: expected text or a list, each text"),
        ("file: ../main.sh\nrun: sh main.sh", "a name without folders"),
        ("file: main.sh\nrun: sh 'main.sh", "is not a command"),
        ("file: main.sh\nrun: ./x\nbuild: ['']", "a command is empty"),
        ("file: main.sh\nrun: no-such-shell main.sh", "programs find no no-such-shell on this machine"),
        ("file: main.sh\nrun: ./x\nbuild: /no/cc main.sh", "programs find no /no/cc on this machine"),
        ("folders: [lib]", "there is no folder lib: give the whole path"),
        ("folders: [/no/such]", "there is no folder /no/such"),
        ("folders: [/etc/]", "programs would see all of /etc/"),
        ("second: 1", "no setting 'second'; did you mean 'seconds'"),
        ("- mode", r"expected settings \(name: value\)"),
        (": [", "is not valid YAML"),
    ],
)
def test_a_file_of_settings_that_is_wrong_says_what_to_do(reward: Write, text: str, says: str):
    with pytest.raises(HoneError, match=says) as error:
        reward(text)
    assert "code.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_folder_of_the_run_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inside = tmp_path / "run"
    inside.mkdir()
    assert reward_arguments(CodeSettings(folders=(str(inside),)), "x")["folders"] == (str(inside),)
    monkeypatch.chdir(inside)
    with pytest.raises(HoneError, match="programs would see all of"):
        reward_arguments(CodeSettings(folders=(str(tmp_path),)), "x")


@pytest.mark.parametrize(("setting", "says"), [("some", "write code:fraction"), ("nothing.yaml", "no file nothing")])
def test_a_setting_that_is_none_says_what_to_do(setting: str, says: str):
    with pytest.raises(HoneError, match=says):
        function_to_isolate(f"code:{setting}")


def test_a_right_program_that_does_not_build_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    build = "echo 'main.x:3: \x1b[31mno such header' >&2; exit 1"
    (tmp_path / "code.yaml").write_text(json.dumps({"file": "main.x", "build": f'sh -c "{build}"', "run": "sh main.x"}))
    row = {"prompt": "q", "x": "echo 1", "inputs": [""], "outputs": ["1"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = [str(tmp_path / "rows.jsonl"), "--reward", f"code:{tmp_path / 'code.yaml'}", "--gold", "x"]
    why = "sh ended with 1: main.x:3: [31mno such header"
    assert main(["rewards", "test", *asked, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [(m["kind"], m["reason"]) for m in found["misses"]] == [("gold", why)]
    assert main(["rewards", "test", *asked]) == 2
    assert f"scores 0 in every form; it said: {why}" in capsys.readouterr().out
