"""What an environment is: `reset` begins an episode, `step` answers what the model wrote."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hone.types import Message, Task

Said = str | Mapping[str, Any] | Sequence[Message]  # a text is one message of the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn of the model."""

    messages: Sequence[Message] = ()  # what the model reads next; nothing once the episode is done
    reward: float = 0.0  # what the turn earned
    done: bool = False  # the episode has ended


class Environment(Protocol):
    """One episode's world. A new object is made for each episode, so it may keep its state in itself.

    It may also have `tools`, a sequence of functions whose schemas the model reads, and `snapshot() -> state` with
    `restore(state)`, for search.
    """

    def reset(self, task: Task) -> Said:
        """Begin the episode. Returns what the model reads first."""
        ...

    def step(self, message: Message) -> "Step | tuple[Said, float, bool]":
        """Answer the model's message: its `content`, and `tool_calls` where it called tools."""
        ...


MakeEnvironment = Callable[[], Environment]  # a class without arguments, most often


def as_messages(said: Said) -> tuple[Message, ...]:
    """What an environment said, as messages.

    >>> as_messages("Guess a number.")
    ({'role': 'user', 'content': 'Guess a number.'},)
    """
    if isinstance(said, str):
        return ({"role": "user", "content": said},) if said else ()
    if isinstance(said, Mapping):
        return (cast(Message, said),)
    return tuple(said)


def as_step(answer: "Step | tuple[Said, float, bool]") -> Step:
    """What `step` returned, as a Step.

    >>> as_step(("Higher.", 0, False)).messages
    ({'role': 'user', 'content': 'Higher.'},)
    """
    if isinstance(answer, Step):
        return Step(messages=as_messages(answer.messages), reward=float(answer.reward), done=answer.done)
    said, reward, done = answer
    return Step(messages=as_messages(said), reward=float(reward), done=bool(done))
