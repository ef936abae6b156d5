"""Faults of the sandbox and of the maths verifier: rewards that a policy could get without earning them."""

from benchmarks.catalogue.fault import Edit, fault

WALL, GROUPS = "reward/sandbox/namespaces.py", "reward/sandbox/cgroups.py"
HOSTILE = "reward/test_sandbox.py::test_a_hostile_program_gets_nothing"

SANDBOX = (
    fault(
        "programs may open sockets of any family", "contract", "reward", "reward/sandbox/seccomp.py",
        old='    "socket": (0, UNIX, EAFNOSUPPORT),\n', new="",
        tests="reward/test_sandbox_parts.py::test_the_filter_judges_by_arguments",
    ),
    fault(
        "the filter of system calls is not installed", "contract", "reward", WALL,
        old='    drop_rights()\n    install(bytes.fromhex(wanted["filter"]))\n', new="    drop_rights()\n",
        tests=HOSTILE,
    ),
    fault(
        "folders of the machine are mounted writable", "contract", "reward", WALL,
        old="    _set_attributes(target, RDONLY | NOSUID | NODEV, RECURSIVE)",
        new="    _set_attributes(target, NOSUID | NODEV, RECURSIVE)",
        tests=HOSTILE,
    ),
    fault(
        "every job of a slot has the same /tmp", "contract", "reward", WALL,
        old='    proc = _own_proc("")\n',
        new='    mount("tmp", "/tmp", "tmpfs", NOSUID | NODEV, "mode=1777")\n    proc = _own_proc("")\n',
        more=(Edit(file=WALL, old='    mount("tmp", "/tmp", "tmpfs", NOSUID | NODEV, f"size=', new='    str(f"size='),),
        tests="reward/test_sandbox.py::test_a_job_finds_nothing_of_an_earlier_one_in_its_slot",
    ),
    fault(
        "a cgroup without its memory limit", "contract", "reward", GROUPS,
        old='            "memory.limit_in_bytes": memory,\n', new="",
        tests="reward/test_sandbox_parts.py::test_version_1_needs_a_folder_for_each_controller",
    ),
    fault(
        "values count although the program wrote to their channel", "contract", "reward", "reward/sandbox/sandbox.py",
        old=' and limit != "result"\n', new="\n",
        tests="reward/test_sandbox.py::test_a_stray_byte_on_the_channel_voids_every_value",
    ),
    fault(
        "a verdict that the program prints is believed", "contract", "reward", "reward/verify/code/tests.py",
        old="    found = [isinstance(r, Returned) and is_met(case, r.value) for",
        new='    found = [b"passed" in done.stdout or isinstance(r, Returned) and is_met(case, r.value) for',
        tests="reward/test_verify_code.py::test_spoofed_verdicts_score_zero",
    ),
    fault(
        "a slot that dies is a wrong answer", "pain 21", "reward", "reward/sandbox/native.py",
        old='            raise SandboxError("a slot of the sandbox died: no verdict on its program; try again")',
        new='            job_output.limit = "processes"',
        tests="reward/test_sandbox.py::test_a_slot_that_dies_under_a_program_is_no_verdict",
    ),
)  # fmt: skip

MATHS = (
    fault(
        "of several boxes the first counts", "contract", "reward", "reward/verify/math/extract.py",
        old="    return kept\n", new="    return kept[:1]\n",
        tests="reward/test_verify_math.py::test_a_near_miss_scores_zero",
    ),
    fault(
        "one right answer among several is enough", "contract", "reward", "reward/verify/math/verdict.py",
        old="all(is_right(gold, answer) for answer in answers)",
        new="any(is_right(gold, answer) for answer in answers)",
        tests="reward/test_verify_math.py::test_a_near_miss_scores_zero",
    ),
    fault(
        "a percentage is the number before its sign", "contract", "reward", "reward/verify/math/amount.py",
        old=' / (100 if "percent" in part else 1)', new="",
        tests="reward/test_verify_math.py::test_a_number_in_any_usual_dress_is_read_exactly",
    ),
    fault(
        "a gold answer that cannot be read makes every answer wrong", "pain 12", "reward", "",
        old="        return invalid(f\"the gold answer {(task.answer or '')[:60]!r} is unusable: {unusable}\")",
        new="        return Outcome(value=0.0 if unusable else None)",
        tests="reward/test_verify_math.py::test_a_gold_answer_that_cannot_be_read_is_invalid_not_wrong",
    ),
)  # fmt: skip

TRUST = (*SANDBOX, *MATHS)
