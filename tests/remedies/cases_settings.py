"""Settings of a run that are refused, and the setting that each message names."""

from remedy_world import call, instead, prepared, settings

SETTINGS = [
    settings("grpo", "sample.group=1", "sample.group=2", "set sample.group to 2 or more"),
    settings("kto", "train.prompts=1", "train.prompts=2", "set train.prompts to 2 or more"),
    settings(
        "grpo", "sample.top_k=5", "sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0", "sample.top_k=0 sample.top_p=1.0"
    ),
    settings(
        "a2c", "train.epochs=2", "train.epochs=1 train.minibatches=1", "set train.epochs=1 and train.minibatches=1"
    ),
    settings("grpo", "train.minibatches=8", "train.minibatches=2", "set train.minibatches=2 or less"),
    settings("grpo", "train.minibatches=8", "train.prompts=8", "or train.prompts=8 or more"),
    settings("sft", "train.minibatches=64", "train.minibatches=1", "leave train.epochs and train.minibatches at 1"),
    settings("a2c", "train.minibatches=64", "train.epochs=1 train.minibatches=1", "set train.epochs=1"),
    settings("grpo", "teacher=WORLD/teacher", "algo=distil", "set algo=distil"),
    instead("distil", "teacher=", "teacher=WORLD/teacher", "set teacher=FOLDER"),
    settings("distil", "train.reference_refresh=1", "train.reference_refresh=0", "set it to 0"),
    settings("trpo", "optim.offload=true", "optim.offload=false", "set optim.offload=false"),
    settings("grpo", "train.device=cuda", "train.device=cpu", "set train.device=cpu"),
    settings("grpo", "train.device=tpux", "train.device=cpu", "use auto, cpu, cuda or cuda:N"),
    settings("sft", "train.lag=1", "train.lag=0", "set train.lag=0"),
    settings("grpo", "train.tokens=99", "train.tokens=0 train.micro_tokens=99", "set train.micro_tokens"),
    settings("grpo", "read.overlong=truncate", "read.overlong=drop", "set read.overlong=drop"),
    settings(
        "kto",
        "train.tokens=99",
        "train.tokens=0 train.prompts=2 train.micro_tokens=99",
        "set train.prompts and train.micro_tokens",
    ),
    settings("sft", "train.eval_every=1", "train.eval_every=0", "or train.eval_every=0"),
    settings("sft", "train.eval_every=1", "eval_data=WORLD/answers.jsonl", "set eval_data"),
    settings("sft", "lora.rank=2 lora.targets=[]", "lora.rank=0", "or set lora.rank=0"),
    settings("sft", "model.path=", "model.tokenizer=WORLD/tokenizer", "set model.tokenizer=FOLDER"),
    settings(
        "sft",
        "model.path= model.tokenizer=WORLD/tokenizer model.hidden_size=20",
        "model.hidden_size=24",
        "use a multiple of 8",
    ),
    settings(
        "sft",
        "model.path= model.tokenizer=WORLD/tokenizer model.kv_heads=3",
        "model.kv_heads=2",
        "must divide the 4 heads",
    ),
    settings(
        "grpo",
        "model.path= model.tokenizer=WORLD/tokenizer model.context=8 sample.max_tokens=9",
        "sample.max_tokens=4",
        "lower it, or raise model.context",
    ),
    settings(
        "grpo",
        "model.path= model.tokenizer=WORLD/tokenizer model.context=8 sample.max_tokens=9",
        "model.context=32",
        "or raise model.context",
    ),
    settings("grpo", "train.mismatch=mask train.mismatch_cap=0.5", "train.mismatch_cap=1", "it must be at least 1"),
    settings("grpo", "optim.betas=(0.9,1.5)", "optim.betas=(0.9,0.95)", "each must be in [0, 1)"),
    settings("grpo", "optim.lr=0", "optim.lr=1e-4", "it must be above 0"),
    settings("grpo", "train.steps=0", "train.steps=1", "it must be at least 1"),
    settings("grpo", "sample.top_p=2 sample.top_k=0", "sample.top_p=1", "it must be at most 1"),
    settings("grpo", "sample.max_tokens=48", "sample.max_tokens=8", "lower it"),
    settings("grpo", "algo.kl=loss:k9", "algo.kl=loss:k3", "k1, k2, k3 or exact"),
    settings("grpo", "algo.kl=loss:k1", "algo.kl=loss:k2", "use reward:k1, loss:k2 or loss:k1*ratio"),
    settings("grpo", "algo.kl=reward:k3", "algo.kl=reward:k1", "use reward:k1 or loss:k3"),
    settings("sft", "algo.average=word", "algo.average=token", "use token or row"),
    settings("grpo", "reward={}", "reward.math=1.0", "set reward.math=1.0"),
    settings("grpo", "reward={}", "reward=WORLD/rewards.py:length", "or reward=FILE.py:function"),
    settings("grpo", "reward=WORLD/rewards.py:strange", "reward=WORLD/rewards.py:length", "has the parameter"),
    settings("grpo", "reward=WORLD/rewards.py", "reward=WORLD/rewards.py:length", "rewards.py"),
    instead("grpo", "reward={} reward.math=1.0 parts.timeout.math=3", "reward={} reward.math=1.0", "leave it out"),
    settings(
        "grpo",
        "reward={} reward.math=1.0 parts.schedule.math=often",
        "parts.schedule.math=0:1",
        "write steps that grow",
    ),
    settings(
        "grpo",
        "reward={} reward.math=1.0 parts.low.math=2 parts.high.math=1",
        "parts.high.math=3",
        "parts.low below parts.high",
    ),
    instead("grpo", "reward={} reward.numeric:x=1.0", "reward={} reward.numeric:0.01=1.0", "write numeric:0.01"),
    instead(
        "grpo", "reward={} reward.tags:a,a=1.0", "reward={} reward.tags:think,answer=1.0", "as in tags:think,answer"
    ),
    instead("grpo", "reward={} reward.length:9-2=1.0", "reward={} reward.length:20-200=1.0", "write length:20-200"),
    instead("grpo", "reward={} reward.language:xx=1.0", "reward={} reward.language:en=1.0", "as in language:en"),
    instead("grpo", "reward={} reward.repetition:0=1.0", "reward={} reward.repetition:4=1.0", "as in repetition:4"),
    instead("grpo", "reward={} reward.code:most=1.0", "reward={} reward.code:all=1.0", "write code:fraction, code:all"),
    instead("grpo", "reward={} reward.regex:(=1.0", "reward={} reward.regex:[0-9]+=1.0", "correct it"),
    settings("sft", "name=a/b", "name=ab", "it must be a plain word"),
    settings("sft", "out=", "out=WORLD/some", "as in out=runs/{name}"),
    settings("sft", "data=", "data=WORLD/answers.jsonl", "set data=FILE.jsonl"),
    settings(
        "sft", "train.rollback=3 save.every=0", "save.every=1 save.keep=2", "set save.every, and save.keep to 2 or more"
    ),
    settings(
        "sft",
        "save.best=eval/loss",
        "eval_data=WORLD/answers.jsonl train.eval_every=2 save.every=2",
        "set eval_data, and train.eval_every to save.every",
    ),
    settings(
        "grpo", "process.path=WORLD/judge train.lag=1 train.mismatch=truncate", "train.lag=0", "or set train.lag=0"
    ),
    settings("grpo", "train.lag=1", "train.mismatch=truncate", "set train.mismatch=truncate"),
    settings("grpo", "process.path=WORLD/judge process.use=shaping", "process.use=reward", "set process.use=reward"),
    settings("grpo", "process.path=WORLD/judge process.use=shaping", "algo=ppo", "or algo=ppo or reinforce"),
    settings("grpo", "process.path=WORLD/scorer", "process.path=WORLD/judge", "is a reward model"),
    instead(
        "grpo",
        "reward={} reward.model:WORLD/model=1.0",
        "reward={} reward.model:WORLD/scorer=1.0",
        "train a reward model from it first",
    ),
    settings("sft", "lora.rank=2 lora.targets=('nothing',)", "lora.targets=('q_proj',)", "the linear layers are"),
    instead("grpo", "train.prompt=3", "train.prompts=3", "did you mean 'train.prompts'?"),
    instead("grpo", "reward.math=1.0", "reward={} reward.math=1.0", "replace it with reward=... first"),
    call(
        lambda w: prepared(w, "grpo", "train=3"),
        lambda w: prepared(w, "grpo", "train.steps=3"),
        "set one of train.steps",
    ),
    call(
        lambda w: prepared(w, "grpo", "train.steps"), lambda w: prepared(w, "grpo", "train.steps=3"), "write name=value"
    ),
    call(
        lambda w: prepared(w, "grpo", "train.steps=many"),
        lambda w: prepared(w, "grpo", "train.steps=3"),
        "expected a whole number",
    ),
    instead("grpo", "read.columns.prompts=a", "read.columns.prompt=prompt", "did you mean 'prompt'"),
    settings("sft", "train.tokens=3", "train.tokens=200", "raise train.tokens"),
    settings("sft", "model.path=WORLD/absent/model", "model.path=WORLD/model", "check the path"),
    settings("sft", "model.path=smollm2-135M-x", "model.path=WORLD/model", "`hone fetch smollm2-135m` brings it"),
]
