"""The commands of the command line, one module a kind. None imports torch before it runs."""

from hone.commands import (
    chat,
    corpus,
    fetch,
    inspect,
    look,
    plan,
    replay,
    report,
    rewards,
    sandbox,
    score,
    serve,
    settings,
    steps,
    train,
)
from hone.commands.command import Command

COMMANDS: tuple[Command, ...] = (
    *train.COMMANDS,
    *replay.COMMANDS,
    *score.COMMANDS,
    *steps.COMMANDS,
    *rewards.COMMANDS,
    *report.COMMANDS,
    *sandbox.COMMANDS,
    *look.COMMANDS,
    *settings.COMMANDS,
    *fetch.COMMANDS,
    *chat.COMMANDS,
    *serve.COMMANDS,
    *inspect.COMMANDS,
    *corpus.COMMANDS,
    *plan.COMMANDS,
)
