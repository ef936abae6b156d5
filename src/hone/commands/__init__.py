"""The commands of the command line, one module a kind: what `hone NAME` reads, calls and prints.

Door: `COMMANDS`, which `hone.cli` makes a parser of. A command reads its options and calls the library; it computes
nothing itself. Rooms that need torch are imported inside its functions, so that help is instant.
May import: every room below it.
"""

from hone.commands import corpus, evaluate, look, models, plan, reference, rewards, sandbox, serve, train
from hone.commands.command import Command

COMMANDS: tuple[Command, ...] = (
    *train.COMMANDS,
    *look.COMMANDS,
    *evaluate.COMMANDS,
    *rewards.COMMANDS,
    *sandbox.COMMANDS,
    *reference.COMMANDS,
    *models.COMMANDS,
    *serve.COMMANDS,
    *corpus.COMMANDS,
    *plan.COMMANDS,
)
