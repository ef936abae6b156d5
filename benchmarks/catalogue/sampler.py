"""Faults of the sampler: what is drawn and recorded, who is paired with whom, and which weights write."""

from benchmarks.catalogue.fault import fault

LOCAL, ENGINE, ROLLER, DRAW = "rollout/local.py", "engine/engine.py", "rollout/supply.py", "engine/draw.py"
PLAIN = ROWS = "engine/runners/torch/runner.py"

SAMPLER = (
    # --- random numbers and the distribution drawn from ---
    fault(
        "all samples of a group have the same random numbers", "pain 14", "sampler", "engine/schedule.py",
        old="    random_id = request.id if request.random_id is None else request.random_id",
        new="    random_id = 0 if request.random_id is None else request.random_id",
        tests="rollout/test_local.py",
    ),
    fault(
        "every step draws the same random numbers", "pain 14", "sampler", ROLLER,
        old="        self.requests += len(", new="        self.requests += 0 * len(",
        tests="rollout/test_roller.py",
    ),
    fault(
        "a row moves without its random numbers", "pain 15", "sampler", ROWS,
        old="        self.random.move(a, b)\n", new="",
        tests="rollout/test_local.py",
    ),
    fault(
        "the sampler records log-probs at temperature 1", "pain 9", "sampler", DRAW,
        old="    return token.squeeze(-1), logp.squeeze(-1), raw.squeeze(-1)\n",
        new="    return token.squeeze(-1), raw.squeeze(-1), raw.squeeze(-1)\n",
        tests="rollout/test_draw.py",
    ),
    fault(
        "the raw log-prob is taken after temperature and truncation", "pain 9", "sampler", DRAW,
        old="    if altered:\n        raw = ", new="    if y is not x:\n        raw = ",
        tests="rollout/test_local.py",
    ),
    fault(
        "log-probs before top-k and top-p", "pain 9", "sampler", DRAW,
        old="(z.gather(-1, token) - running[:, -1:].log())",
        new="(z.gather(-1, token) - _running(z.exp())[:, -1:].log())",
        tests="rollout/test_draw.py",
    ),
    fault(
        "tokens that tie with the last one of top-k are cut", "pain 15", "sampler", DRAW,
        old="        running = _running(weight)\n",
        new=(
            "        best = z.topk(int(sampling.host[2].max()), dim=-1).indices\n"
            "        weight *= torch.zeros_like(weight).scatter_(1, best, 1.0)\n"
            "        running = _running(weight)\n"
        ),
        tests="rollout/test_draw.py",
    ),
    fault(
        "the repetition penalty forgets the prompt", "pain 15", "sampler", ROWS,
        old="        self.sampling.seat(r, params, prompt)", new="        self.sampling.seat(r, params)",
        tests="rollout/test_local.py",
    ),
    fault(
        "training under top-p does not know what the sampler kept", "pain 9", "recipe", "launch/build.py",
        old="record_support=training and params.truncated)", new="record_support=False)",
        tests="run/test_truncated_runs.py",
    ),
    # --- which weights write ---
    fault(
        "the rollout never gets the weights", "pain 11", "sampler", LOCAL,
        old="        self.source, self.max_rows, self.invariant = decoder, max_rows, invariant\n",
        new=(
            "        from copy import deepcopy\n\n"
            "        decoder = deepcopy(decoder)\n"
            "        self.source, self.max_rows, self.invariant = decoder, max_rows, invariant\n"
        ),
        tests="rollout/test_local.py",
    ),
    fault(
        "a copy of the weights is published in name only", "pain 11", "sampler", LOCAL,
        old="            _copy_weights(self.source, self.decoder)",
        new="            pass",
        tests="rollout/test_local.py",
    ),
    fault(
        "a copy of the weights keeps its adapter when the learner selects another", "pain 11", "sampler", LOCAL,
        old="            setattr(twin, name, getattr(module, name))", new="            pass",
        tests="rollout/test_local.py",
    ),
    fault(
        "weights that were replaced are still read from the old memory", "pain 11", "sampler",
        "engine/runners/torch/layers.py",
        old="        self.weights.find()\n",
        new="        if not self.weights.blocks:\n            self.weights.find()\n",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "weights side by side are a copy that training does not reach", "pain 11", "model",
        "model/kernels/fused_weights.py",
        old="            t.data = joined[at : at + len(t)]\n", new="",
        tests="model/test_fused_weights.py",
    ),
    fault(
        "weights in 8 bits do not follow the learner", "pain 11", "sampler", "engine/runners/torch/int8.py",
        old="        if found != self.copied:", new="        if not self.copied:",
        tests="model/test_int8.py",
    ),
    fault(
        "the memory of the sampler stays in the precision the model had", "pain 15", "sampler", LOCAL,
        old=" or now != self._made_for:", new=":",
        tests="rollout/test_local.py",
    ),
    fault(
        "the adapter is off in the sampler", "pain 11", "sampler", LOCAL,
        old="            module.training = False\n        yield\n",
        new=(
            "            module.training = False\n"
            "        for module in decoder.modules():\n"
            "            if hasattr(module, 'enabled'):\n"
            "                module.enabled = False\n"
            "        yield\n"
            "        for module in decoder.modules():\n"
            "            if hasattr(module, 'enabled'):\n"
            "                module.enabled = True\n"
        ),
        tests="rollout/test_adapted_weights.py",
    ),
    # --- attention and positions ---
    fault(
        "rows of unequal length have the positions of the longest", "pain 15", "sampler", PLAIN,
        old="np.stack([self.rows.token[:rows], positions, ",
        new="np.stack([self.rows.token[:rows], np.where(alive, positions.max(), 0), ",
        tests="rollout/test_local.py",
    ),
    fault(
        "a short row looks at what a longer one left in its memory", "pain 15", "sampler", PLAIN,
        old="            even = bool((positions[index] == columns - 1).all())", new="            even = True",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "the second part of a prompt is read at the positions of the first", "pain 15", "sampler",
        "engine/runners/torch",
        old="    positions = [c for p in pieces for c in range(p.start, p.end)]",
        new="    positions = [c for p in pieces for c in range(len(p.tokens))]",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "the window is one wider when a row writes than when its prompt is read", "pain 15", "sampler",
        "engine/runners/torch",
        old="visible(positions, columns, w, dtype)[:, None]",
        new="visible(positions, columns, w and w + 1, dtype)[:, None]",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "a row that has ended writes on into its memory", "pain 15", "sampler", PLAIN,
        old="np.where(alive, positions, self.capacity)])", new="positions])",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "the cache is off by one", "pain 15", "sampler", PLAIN,
        old="            positions = np.where(alive, self.rows.length[:rows], 0)",
        new="            positions = np.where(alive, self.rows.length[:rows] - 1, 0)",
        tests="model/test_plain_runner.py rollout/test_local.py",
    ),
    # --- where a completion ends ---
    fault(
        "only one of several stop tokens stops", "pain 4", "sampler", ROWS,
        old="        self.stops[r, : len(stops)] = stops", new="        self.stops[r, : len(stops[:1])] = stops[:1]",
        tests="rollout/test_local.py",
    ),
    fault(
        "a finished completion is called truncated", "pain 4", "sampler", ENGINE,
        old="Stop.TOKEN if stopped else Stop.LENGTH", new="Stop.TOKEN if count < active.limit else Stop.LENGTH",
        tests="rollout/test_local.py",
    ),
    fault(
        "a stop string is found one token late", "pain 4", "sampler", "data/text/detokenizer.py",
        old="        final = len(text.rstrip(UNFINISHED))",
        new="        final = len(self.decode(self.window[:-1]).rstrip(UNFINISHED))",
        tests="rollout/test_stops.py",
    ),
    fault(
        "the text keeps the stop string", "pain 4", "sampler", "engine/stop_strings.py",
        old='            self.pieces = ["".join(self.pieces)[:found]]\n', new="",
        tests="rollout/test_stops.py",
    ),
    fault(
        "tokens after a stop string are kept", "pain 4", "sampler", "engine/static_batch.py",
        old="                rows.alive &= ~_found(finders, rows, token, hits).to(u.device)",
        new="                _found(finders, rows, token, hits)",
        tests="rollout/test_local.py",
    ),
    fault(
        "a stream shows the beginning of a stop string", "pain 4", "sampler", ENGINE,
        old="safe = count if finder is None else finder.safe", new="safe = count",
        tests="rollout/test_engine.py",
    ),
    # --- who is paired with whom ---
    fault(
        "prompts are paired with another prompt's answers", "pain 13", "sampler", LOCAL,
        old="for i in range(len(prompts))]", new="for i in reversed(range(len(prompts)))]",
        tests="rollout/test_local.py",
    ),
    fault(
        "a task is paired with the next task's completion", "pain 13", "sampler", ROLLER,
        old="for g, task in zip(groups, tasks, strict=True) for _ in g]",
        new="for g, task in zip(groups, [*tasks[1:], *tasks[:1]], strict=True) for _ in g]",
        tests="rollout/test_roller.py",
    ),
    fault(
        "a task is paired with an earlier task's completion where they are scored as they end", "pain 13", "sampler",
        "rollout/overlap.py", old="of[number // group]", new="of[number // group - 1]",
        tests="rollout/test_overlap.py",
    ),
    fault(
        "outcomes are put back in the order in which rollouts end", "pain 13", "sampler", "rollout/overlap.py",
        old="for number in sorted(done)]", new="for number in done]", tests="rollout/test_overlap.py",
    ),
    fault(
        "a request that ended in flight writes on into another's record", "pain 13", "sampler", "engine/requests.py",
        old="        while self._closed and self._closed[0][0] <= read:", new="        while self._closed:",
        tests="rollout/test_engine.py",
    ),
    fault(
        "what a launch in flight wrote goes to who has the row when it is read", "pain 13", "sampler", ENGINE,
        old="        self.in_flight.append((ticket, self.line_of.copy()))",
        new="        self.in_flight.append((ticket, self.line_of))",
        tests="rollout/test_engine.py",
    ),
    fault(
        "the completion is tokenised again", "pain 17", "sampler", ROLLER,
        old="            r.copy_with(task=task, text=r.text if r.stop is Stop.STRING else text)\n",
        new=(
            "            __import__('dataclasses').replace(\n"
            "                r, task=task, text=text, gen_logp=(), raw_logp=(),\n"
            "                tokens=(t := [*r.tokens[: r.mask.index(True)], *self.tokenizer.encode(text)]),\n"
            "                mask=[i >= r.mask.index(True) for i in range(len(t))],\n"
            "            )\n"
        ),
        tests="rollout/test_roller.py",
    ),
)  # fmt: skip
