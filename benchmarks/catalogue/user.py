"""Faults of the user's side: recipe, data, template, tokenizer and reward. `hone check` must see each."""

from benchmarks.catalogue.fault import Edit, Fault, Sight, Where


def _setting(
    name: str, mimics: str, *settings: str, recipe: str = "grpo", finding: str = "", refusal: str = ""
) -> Fault:
    sight = Sight(recipe=recipe, finding=finding, refusal=refusal)
    return Fault(name=name, mimics=mimics, where="recipe", settings=settings, sight=sight)


def _edit(name: str, mimics: str, where: Where, file: str, /, *, old: str, new: str, sight: Sight) -> Fault:
    return Fault(name=name, mimics=mimics, where=where, project=(Edit(file=file, old=old, new=new),), sight=sight)


def _reward(name: str, mimics: str, new: str, *, finding: str = "", refusal: str = "") -> Fault:
    sight = Sight(finding=finding, refusal=refusal)
    return _edit(name, mimics, "reward", "rewards.py", old="", new=new, sight=sight)


RECIPE = (
    _setting("a group of one", "pain 3", "sample.group=1", refusal="sample.group"),
    _setting("k1 in the loss, by setting", "pain 8", "algo.kl=loss:k1", refusal="zero expected gradient"),
    _setting("a setting that does not exist", "pain 24", "train.stpes=3", refusal="train.stpes"),
    _setting("several updates of an on-policy method", "pain 16", "algo=rloo", "train.epochs=2", refusal="on policy"),
    _setting("more minibatches than prompts", "pain 24", "train.minibatches=9", refusal="train.minibatches"),
    _setting("a learning rate that overshoots", "contract", "optim.lr=30", finding="one step"),
    _setting("a warm-up longer than the run", "contract", "optim.warmup=1000", finding="optimiser"),
    _setting("no room for the completion", "contract", "sample.max_tokens=120", finding="context"),
    _setting("a temperature without chance", "pain 14", "sample.temperature=0.001", finding="groups differ"),
    _setting("more prompts than rows", "pain 24", "train.prompts=500", finding="plan"),
    _setting("the evaluation's prompts are trained on", "contract", "eval_data=problems.jsonl", finding="copies"),
)  # fmt: skip

ROW = '{"prompt": [{"role": "user", "content": "5 and 5"}], "answer": "10"}\n'
DATA = (
    _edit(
        "one prompt with two answers", "pain 13", "data", "problems.jsonl",
        old="", new=ROW + ROW.replace('"10"', '"11"'), sight=Sight(settings=("train.prompts=2",), finding="copies"),
    ),
    _edit(
        "the data is one row many times", "pain 19", "data", "problems.jsonl",
        old="", new=ROW * 9, sight=Sight(finding="copies"),
    ),
    _edit(
        "answers that no verifier can read", "pain 12", "data", "problems.jsonl",
        old="", new=ROW.replace('"10"', '"see page 4"') + ROW.replace("5 and", "6 and").replace('"10"', '"see page 5"'),
        sight=Sight(settings=("reward=math", "train.prompts=2"), finding="gold answers"),
    ),
    _edit(
        "rows without an answer for a verifier", "pain 12", "data", "problems.jsonl",
        old="", new=(ROW + ROW.replace("5 and", "6 and")).replace(', "answer": "10"', ""),
        sight=Sight(settings=("reward=math", "train.prompts=2"), finding="gold answers"),
    ),
    _edit(
        "a stop token forged in a user's text", "pain 17", "data", "problems.jsonl",
        old="", new=ROW.replace("5 and 5", "5 and <|assistant|> 10"), sight=Sight(refusal="special token"),
    ),
    _edit(
        "chosen and rejected are the same", "contract", "data", "pairs.jsonl",
        old="", new='{"prompt": "5 and 5", "chosen": "10", "rejected": "10"}\n',
        sight=Sight(recipe="dpo", refusal="are the same"),
    ),
    _edit(
        "a row longer than the context", "contract", "data", "chats.jsonl",
        old="", new='{"prompt": "5 and 5", "completion": "' + "ten " * 50 + '"}\n',
        sight=Sight(recipe="sft", refusal="limit is"),
    ),
    _edit(
        "a chat that nobody answers", "pain 6", "data", "chats.jsonl",
        old="", new='{"messages": [{"role": "user", "content": "5 and 5"}]}\n',
        sight=Sight(recipe="sft", refusal="no assistant message"),
    ),
)  # fmt: skip

JINJA = "model/chat_template.jinja"
TEMPLATE = (
    _edit(
        "the template writes no stop token", "pain 4", "template", JINJA,
        old="{{ eos_token }}", new="", sight=Sight(recipe="sft", refusal="stop token"),
    ),
    _edit(
        "the template does not open the assistant's turn", "pain 6", "template", JINJA,
        old="{% if add_generation_prompt %}<|assistant|>{% endif %}", new="", sight=Sight(finding="template"),
    ),
    _edit(
        "the template drops the system's message", "pain 6", "template", JINJA,
        old="{% for m in messages %}", new="{% for m in messages if m.role != 'system' %}",
        sight=Sight(finding="template"),
    ),
    _edit(
        "two beginnings of the text, by template", "pain 5", "template", JINJA,
        old="{{ bos_token }}", new="{{ bos_token }}{{ bos_token }}", sight=Sight(finding="first token"),
    ),
    _edit(
        "the template forgets what was said before", "pain 17", "template", JINJA,
        old="{{ m.content }}", new="{{ m.content if loop.last or m.role != 'assistant' else '...' }}",
        sight=Sight(recipe="sft", refusal="rewrites earlier text"),
    ),
    _edit(
        "text after the stop token", "pain 4", "template", JINJA,
        old="{{ eos_token }}", new="{{ eos_token }}and so on",
        sight=Sight(recipe="sft", refusal="after the stop token"),
    ),
    _edit(
        "a tokenizer that loses capitals", "pain 5", "template", "model/tokenizer.json",
        old='"normalizer": null', new='"normalizer": {"type": "Lowercase"}', sight=Sight(finding="round trip"),
    ),
    _edit(
        "a stop token that the tokenizer does not have", "pain 4", "template", "model/tokenizer_config.json",
        old='"stop_tokens": []', new='"stop_tokens": ["<|im_end|>"]', sight=Sight(refusal="im_end"),
    ),
)  # fmt: skip

REWARD = (
    _reward(
        "a reward that always crashes", "pain 12",
        "def right(completion, task):\n    return task.gold in completion\n", finding="reward values",
    ),
    _reward(
        "a crash swallowed as zero", "pain 12",
        "def right(completion, task):\n    try:\n        return float(task.gold in completion)\n"
        "    except Exception:\n        return 0.0\n",
        finding="reward values",
    ),
    _reward(
        "None for some completions", "pain 3",
        "def right(completion, task):\n    return len(completion) if len(completion) % 2 else None\n",
        finding="reward values",
    ),
    _reward(
        "a reward of chance", "pain 20",
        "import random\n\n\ndef right(completion, task):\n    return random.random()\n", finding="reward repeats",
    ),
    _reward(
        "one number for all completions", "pain 12",
        "def right(completions, tasks):\n    return 1.0\n", finding="reward values", refusal="return one value",
    ),
    _reward(
        "rewards in another order than the completions", "pain 13",
        "def right(completions, tasks):\n    return sorted(sum(c.encode()) % 7 for c in completions)\n",
        finding="reward repeats",
    ),
    _reward(
        "a reward normalised over the batch", "pain 3",
        "def right(completions, tasks):\n    found = [sum(c.encode()) % 7 for c in completions]\n"
        "    return [x - sum(found) / len(found) for x in found]\n",
        finding="reward repeats",
    ),
    _reward(
        "a reward that prefers the wrong answer", "contract",
        "def right(completion, task):\n    return -float(task.answer in completion) + 0.01 * (len(completion) % 5)\n",
        finding="gold answers",
    ),
    _reward(
        "a reward that accepts any number", "contract",
        "def right(completion, task):\n    some = any(c.isdigit() for c in completion)\n"
        "    return some + 0.01 * (len(completion) % 5)\n",
        finding="gold answers",
    ),
    _reward(
        "a reward that needs what it is not given", "pain 12",
        "def right(prompt, answer):\n    return 1.0\n", refusal="name them from",
    ),
)  # fmt: skip

USER: tuple[Fault, ...] = (*RECIPE, *DATA, *TEMPLATE, *REWARD)
