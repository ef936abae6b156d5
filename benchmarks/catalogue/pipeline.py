"""Faults on the way from data to batch, in the reward and the checkpoint."""

from benchmarks.catalogue.fault import fault

COLLATE, CHAT, FORWARD = "data/collate.py", "data/text/chat.py", "model/layout.py"

DATA = (
    fault(
        "the mask is shifted by one", "pain 5", "data", COLLATE,
        old="    mask = _shift(_pad([r.mask for r in rows], real, False, np.bool_), False)",
        new="    mask = _pad([r.mask for r in rows], real, False, np.bool_)",
        tests="data/test_collate.py",
    ),
    fault(
        "the sampler's log-prob is recorded one token late", "pain 5", "data", COLLATE,
        old="torch.from_numpy(_shift(_pad([getattr(r, name) for r in rows], real, 0.0, kind), 0.0))",
        new="torch.from_numpy(_pad([getattr(r, name) for r in rows], real, 0.0, kind))",
        tests="data/test_collate.py",
    ),
    fault(
        "the stop token is dropped from the mask", "pain 4", "data", CHAT,
        old="    return head + tail, [False] * len(head) + [True] * len(tail)",
        new="    return head + tail, [False] * len(head) + [True] * (len(tail) - 1) + [False]",
        tests="data/test_chat.py",
    ),
    fault(
        "the stop token of a chat turn is dropped from the mask", "pain 6", "template", CHAT,
        old="        mask += [False] * (len(tokens) - len(mask)) + [True] * written",
        new="        mask += [False] * (len(tokens) - len(mask)) + [True] * (written - 1) + [False]",
        tests="data/test_chat.py",
    ),
    fault(
        "no stop token is written at all", "pain 4", "data", CHAT,
        old="specials=False), tokenizer.eos_id]", new="specials=False)]",
        tests="data/test_chat.py",
    ),
    fault(
        "the prompt is trained on", "pain 6", "data", CHAT,
        old="    return head + tail, [False] * len(head) + [True] * len(tail)",
        new="    return head + tail, [True] * len(head) + [True] * len(tail)",
        tests="data/test_chat.py",
    ),
    fault(
        "padding is trained on", "pain 4", "data", COLLATE,
        old="_pad([r.mask for r in rows], real, False, np.bool_), False)",
        new="_pad([r.mask for r in rows], real, True, np.bool_), True)",
        tests="data/test_collate.py",
    ),
    fault(
        "the user's turns of a chat are trained on", "pain 6", "template", CHAT,
        old="        mask += [False] * (len(tokens) - len(mask)) + [True] * written",
        new="        mask += [True] * (len(tokens) - len(mask)) + [True] * written",
        tests="data/test_chat.py",
    ),
    fault(
        "a template that rewrites earlier turns is accepted", "pain 17", "template", CHAT,
        old="            if not longer.startswith(shorter):", new="            if not longer:",
        tests="data/test_chat.py",
    ),
    fault(
        "two beginnings of the text", "pain 5", "data", CHAT,
        old="    found |= {i: tokenizer.start_ids + ids for i, ids in texts}",
        new="    found |= {i: 2 * tokenizer.start_ids + ids for i, ids in texts}",
        tests="data/test_chat.py",
    ),
    fault(
        "an invalid reward counts as zero", "pain 12", "data", COLLATE,
        old="        mask = mask & valid[:, None]\n", new="        valid |= True\n",
        tests="data/test_collate.py",
    ),
    fault(
        "a row that a stop string ended counts as truncated", "contract", "data", COLLATE,
        old="(r.stop is cut_off for r in rows)", new="(r.stop is not Stop.TOKEN for r in rows)",
        tests="data/test_collate.py",
    ),
    fault(
        "every epoch has the same order", "pain 19", "data", "data/feed/source.py",
        old="self._seed, self._epoch)\n", new="self._seed, 0)\n",
        tests="data/test_source.py",
    ),
    fault(
        "KTO's mismatched pair is the matched one", "contract", "data", COLLATE,
        old="        j = (i + 1) % len(rows)", new="        j = i",
        tests="data/test_collate.py",
    ),
)  # fmt: skip

MODEL = (
    fault(
        "packing without the block mask", "pain 7", "model", FORWARD,
        old="    same = document_LW[:, :, None] == document_LW[:, None, :]",
        new="    same = torch.ones_like(document_LW[:, :, None] == document_LW[:, None, :])",
        tests="model/test_layout.py",
    ),
    fault(
        "positions are not reset in packing", "pain 7", "model", FORWARD,
        old="        positions=place(rank),\n", new="",
        tests="model/test_layout.py model/test_policy.py",
    ),
    fault(
        "attention looks ahead in packed lines", "pain 7", "model", FORWARD,
        old="device=same.device).tril())", new="device=same.device))",
        tests="model/test_layout.py model/test_policy.py",
    ),
    fault(
        "the merged adapter is not scaled", "pain 25", "model", "model",
        old="        return self.scale * (self.lora_B @ self.lora_A)", new="        return self.lora_B @ self.lora_A",
        tests="model/test_lora.py",
    ),
)  # fmt: skip

REWARD = (
    fault(
        "a crashed verifier is a reward of zero", "pain 12", "reward", "reward/score.py",
        old=(
            "        except BaseException as error:  # SystemExit and CancelledError too are only the function's own\n"
            "            return crash_outcome(error)"
        ),
        new="        except BaseException:\n            return Outcome(value=0.0)",
        tests="reward/test_score.py",
    ),
    fault(
        "a NaN reward is kept", "pain 3", "reward", "reward/outcome.py",
        old="    return number if abs(number) <= FLOAT32_MAX else None", new="    return number",
        tests="reward/test_score.py",
    ),
    fault(
        "a reward of 0.0 is called missing", "pain 12", "reward", "types.py",
        old="        return self.value is not None", new="        return bool(self.value)",
        tests="reward/test_score.py",
    ),
    fault(
        "one number is broadcast to all completions", "pain 12", "reward", "reward/score.py",
        old="            values: Any = result.tolist() if hasattr(result, \"tolist\") else result  # numpy and torch",
        new=(
            "            values: Any = result.tolist() if hasattr(result, \"tolist\") else result\n"
            "            values = [values] * n if isinstance(values, int | float) else values"
        ),
        tests="reward/test_score.py",
    ),
    fault(
        "a run with a broken reward goes on", "pain 12", "loop", "reward/group_scorer.py",
        old="        if not bad or len(bad)", new="        if True or len(bad)",
        tests="run/test_settings_take_effect.py",
    ),
)  # fmt: skip

RESUME = (
    fault(
        "resume restarts the data", "pain 19", "resume", "data/feed/source.py",
        old="        self._epoch, self._position = epoch, position\n        self._order",
        new="        self._epoch, self._position = 0, 0\n        self._order",
        tests="data/test_source.py",
    ),
    fault(
        "resume goes on in the order of the first epoch", "pain 19", "resume", "data/feed/source.py",
        old="        self._epoch, self._position = epoch, position\n        self._order = self._permutation()",
        new="        self._epoch, self._position = epoch, position",
        tests="data/test_source.py",
    ),
    fault(
        "resume resets the optimiser", "pain 19", "resume", "checkpoint/state.py",
        old="    load_optimizer(learner.optimizer, moments)\n", new="",
        tests="run/test_resume.py",
    ),
    fault(
        "resume resets the KL controller", "pain 19", "resume", "checkpoint/state.py",
        old='    learner.control = state["control"]\n', new="",
        tests="run/test_resume.py",
    ),
    fault(
        "resume samples anew what was sampled ahead", "pain 19", "resume", "rollout/supply.py",
        old="        self._rounds = [part[collect.share(len(part))] for part in rounds]\n", new="",
        tests="train/test_ahead.py",
    ),
    fault(
        "a sampler ahead reads weights that are being stepped", "pain 13", "loop", "launch/job.py",
        old="copied = recipe.train.lag > 0 and shards is None", new="copied = False", tests="run/test_lag.py",
    ),
    fault(
        "a lag of the sampler is not corrected for", "pain 13", "loop", "rollout/supply.py",
        old="    if algo.credit is not None and not corrected:", new="    if False:", tests="run/test_lag.py",
    ),
    fault(
        "resume resets the request counter", "pain 19", "resume", "rollout/supply.py",
        old="        self.requests = requests", new="        self.requests = 0",
        tests="run/test_resume.py",
    ),
    fault(
        "resume resets the schedule", "pain 19", "resume", "checkpoint/state.py",
        old='    learner.updates, learner.version = state["updates"], state["version"]',
        new='    learner.version = state["version"]',
        tests="run/test_resume.py",
    ),
    fault(
        "resume takes the start's weights", "pain 19", "resume", "checkpoint/state.py",
        old="        p.copy_(tensors[name])", new="        p.copy_(p.clone())",
        tests="run/test_resume.py",
    ),
    fault(
        "resume with another dataset is accepted", "pain 19", "resume", "data/feed/source.py",
        old="            if saved != here or type(saved) is not type(here):", new="            if saved is None:",
        tests="data/test_source.py",
    ),
    fault(
        "resume is declared and never read", "pain 19", "resume", "",
        old="start.run(recipe, resume=arguments.resume, allow_change=arguments.allow_change)",
        new="start.run(recipe)",
        tests="run/test_resume.py::test_a_run_longer_than_planned_is_the_long_run",
    ),
    fault(
        "checkpoints are not atomic", "pain 19", "resume", "storage/files.py",
        old="    aside, before = _aside(folder), _aside(folder, \"old.tmp\")\n",
        new="    aside, before = folder, _aside(folder, \"old.tmp\")\n",
        tests="train/test_checkpoint.py",
    ),
    fault(
        "a damaged checkpoint is taken", "pain 19", "resume", "storage/files.py",
        old="        if not path.is_file() or digest(path) != expected:", new="        if not path.is_file():",
        tests="train/test_checkpoint.py",
    ),
    fault(
        "the old checkpoint goes before the new one is whole", "pain 19", "resume", "storage/files.py",
        old='    folder = save_folder(root / name_of(step), write, between=between)\n',
        new=(
            "    for old in list(checkpoints(root).values())[: -max(keep - 1, 0) or None]:\n"
            "        shutil.rmtree(old)\n"
            "    folder = save_folder(root / name_of(step), write, between=between)\n"
        ),
        tests="train/test_checkpoint.py",
    ),
    fault(
        "what is written beside the loop changes with it", "pain 19", "resume", "checkpoint/state.py",
        old="            self._copies[place] = _copy(x)", new="            self._copies[place] = x",
        tests="train/test_saver.py",
    ),
    fault(
        "a writer that failed is forgotten", "pain 19", "resume", "checkpoint/saver.py",
        old="        if before is not None:\n            self.wait()\n", new="        self.events.clear()\n",
        tests="train/test_saver.py",
    ),
    fault(
        "two processes write into one run", "pain 19", "resume", "checkpoint/run_folder.py",
        old="            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", new="            pass\n",
        tests="train/test_lock.py",
    ),
    fault(
        "resume takes whatever settings it is given", "pain 19", "resume", "config/changes.py",
        old="    if changed and not allow:", new="    if False:",
        tests="run/test_changes.py",
    ),
    fault(
        "the best checkpoint is removed with the old ones", "pain 19", "resume", "launch/job.py",
        old="        spared.add(top)\n", new="",
        tests="run/test_saving.py",
    ),
)  # fmt: skip
