"""What the demo makes of sampled answers."""

from hone.demo.examine import preference_pairs
from hone.types import Outcome, Rollout, Stop, Task


def test_pairs_are_of_finished_answers_that_say_something():
    task = Task(prompt="What is 1+1?\n", answer="2")
    answers = [("2", 1.0, Stop.TOKEN), ("", 0.0, Stop.TOKEN), ("3", 0.0, Stop.LENGTH), ("4", 0.0, Stop.TOKEN)]
    group = [
        Rollout(tokens=[1, 2], mask=[False, True], task=task, text=text, stop=stop, outcome=Outcome(value=value))
        for text, value, stop in answers
    ]
    assert preference_pairs([group], seed=0) == [{"prompt": task.prompt, "chosen": "2", "rejected": "4"}]
    assert preference_pairs([group[:3]], seed=0) == []
