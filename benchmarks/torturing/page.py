"""docs/dev/reliability.md: what was tried, and what happened."""

from collections.abc import Sequence

from benchmarks.torturing.case import Case
from benchmarks.torturing.kills import ANY, Campaign
from benchmarks.torturing.points import KINDS, SAVES

WORDS = {
    "starting": "settings and the starting model are written",
    "resuming": "everything is built, or a checkpoint is read",
    "sampling": "before or after a step of the sampler",
    "scoring": "before or after rewards are computed",
    "updating": "before or after a backward pass or an optimiser step",
    "logging": "a line of the log is written",
    "writing": "a checkpoint's file or folder is opened, made or removed",
    "torn": "half of a checkpoint's file is written",
    "syncing": "before or after an fsync",
    "renaming": "before a rename: folder into place, `latest`, an old one out of sight",
    ANY: "chosen by a clock",
}
HEAD = """# Reliability: what was tried, and what happened

`make torture` (`python -m benchmarks.torture --kills 300`) writes this page. Runs are forked from one process that has
imported torch, with a model of 7,000 numbers, six steps each, saved at every second one. What a run does is watched
from inside (files, renames, fsyncs, sampler steps, rewards, updates), so that a SIGKILL can be put at the n-th of any
kind, or at a random time. Every killed run is resumed and killed again, up to four times, then left to end.

After each kill every checkpoint in sight must be whole, and no step lost whose save had returned. At the end the last
checkpoint, with weights, moments, cursors and counters, the log and the samples must be those of an undisturbed run,
**bit for bit**, and no temporary file may be left.
""".splitlines()


def page(found: Campaign, cases: Sequence[Case], seconds: float) -> str:
    """All of it, in tables."""
    kinds = [kind for kind in (*KINDS, ANY) if found.kinds[kind]]
    lines = [
        *HEAD,
        "",
        f"{found.kills} kills over {len(found.loops)} loops, {found.in_saves} inside a save; {found.compared} finished "
        f"runs compared; **{len(found.wrong)} broken promises**. All of this page in {seconds / 60:.1f} minutes.",
        "",
        "| killed while | | inside a save | kills |",
        "|---|---|---|---|",
        *(f"| {kind} | {WORDS[kind]} | {'yes' if kind in SAVES else ''} | {found.kinds[kind]} |" for kind in kinds),
        "",
        "Loops: " + ", ".join(f"{loop} ({count})" for loop, count in sorted(found.loops.items())) + ".",
        "",
        "## Everything else",
        "",
        "| tried | times | wrong | how it ends |",
        "|---|---|---|---|",
        *(f"| {c.name} | {c.tried} | {len(c.wrong)} | {c.ends.replace('|', '/')} |" for c in cases),
        "",
        *TAIL,
    ]
    return "\n".join([*lines, ""])


TAIL = """## What this rests on

- A checkpoint is written aside, hashed, synced and renamed; the next one is complete before an old one goes.
- Every run saves itself by the clock unless it is told not to (`save.minutes`): a kill costs half of the work so far or
  five minutes of it, whichever is less; more where a save takes over 1.5 s, for saving costs less than 1 % of the time
  ([checkpoints](../checkpoints.md)).
- A run's folder that is removed, renamed or replaced while the run goes on ends it with a line that says so. What a
  file of a run holds is checked for its type when it is read: a wrong value is told with its remedy.
- An invalid reward has a reason with the file and line of the user's code. Reasons are counted by kind, in
  `invalid.jsonl`. Each kind is told at its first occurrence and at the end, and shown in the report.
- Reward functions of files run in processes of their own (`train.reward_apart`, `train.reward_timeout`): one that hangs
  or takes its interpreter down makes its own outcome invalid and nothing else. Functions made in Python stay in the
  run's process unless `train.reward_apart=always`, for they may share what they know with the program.
- Such a process has a limit of memory with all that it starts (`train.reward_memory`, by default its share of half the
  machine's). A reward that takes more is invalid, and the reason names the setting. Whatever it started ends with it,
  daemons in sessions of their own too: when its time is up, when it dies, at the end of the run, and when the run is
  killed. A process that a call leaves without a parent ends after that call. A control group sees to both where the
  user may make one; elsewhere limits of each process (`RLIMIT_DATA`), a watch over their sum, and a subreaper do.
- An iteration that fails before it has moved the weights costs no step: the run is saved as it was before it. Ranks
  agree on a sampler, a reward or data that failed on one of them. With `train.lag=1` the step beside which samples
  could not be made ends, and is saved with the weights they are to be written by. A held-out evaluation that fails
  costs its own numbers. What fails between two updates of one step goes back to the last save.
- Where memory runs out, the gradients of that update are forgotten and computed again in micro-batches of half the
  size, to the bit those that smaller micro-batches give. The size found is part of the checkpoint. A rank that holds
  a part of the weights (`train.shard`) and leaves a pass midway cannot come back into it, where the others wait: the
  run ends, and goes on from its last checkpoint with half the size on every rank when it is started again
  (`torchrun --max-restarts=3 -m hone run RECIPE --resume` does that by itself).
- An update whose loss or gradient is not finite moves nothing; a checkpoint with more numbers that are not finite than
  the model had at the start is never written; a log-prob of the sampler that is not finite ends the run before it is
  learned from or saved.
- `train.rollback=N` (off by default) goes back to the last regular checkpoint when the loss lies N times its usual
  deviation above its median, or the weights are lost, and goes on with the data that follows.
""".splitlines()
