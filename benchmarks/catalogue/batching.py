"""Faults of continuous batching: memory in blocks, prefixes shared, requests that come and go."""

from benchmarks.catalogue.fault import Edit, fault

BLOCKS, SCHEDULE, ENGINE = "engine/blocks.py", "engine/schedule.py", "engine/engine.py"

BATCHING = (
    # --- prefixes ---
    fault(
        "a group shares the block that its prompt leaves half filled", "pain 15", "sampler", BLOCKS,
        old="    full = (prompt - held_back) // CHUNK", new="    full = -(-(prompt - held_back) // CHUNK)",
        tests="rollout/test_blocks.py",
    ),
    fault(
        "each of a group is given the first one's half-filled block, uncopied", "pain 15", "sampler", "",
        old="            self.layers.slab.copy(part.blocks[0], [seat.blocks[0] for seat in part.seats], part.end)\n",
        new="",
        tests="model/test_plain_runner.py",
    ),
    fault(
        "a prompt that is in memory whole is not read at all", "pain 15", "sampler", BLOCKS,
        old="        while len(found) < (len(prompt) - 1) // CHUNK:",
        new="        while len(found) < len(prompt) // CHUNK:",
        tests="rollout/test_blocks.py",
    ),
    fault(
        "a prefix is found by its own tokens, whatever came before them", "pain 15", "sampler", BLOCKS,
        old="            above = chunk.id\n", new="",
        tests="rollout/test_blocks.py",
        more=(
            Edit(
                file=BLOCKS,
                old="        above = found[-1].id if found else self._root(adapter)",
                new="        above = self._root(adapter)",
            ),
        ),
    ),
    fault(
        "a prefix is found for another adapter", "pain 15", "sampler", BLOCKS,
        old="        return self.roots[adapter]", new="        return next(iter(self.roots.values()))",
        tests="rollout/test_schedule.py",
    ),
    fault(
        "prompts read before the weights changed are shared with later ones", "pain 11", "sampler", "rollout/local.py",
        old="        engine = Engine(runner, vocab_size=vocab, decode=self.decode)\n",
        new=(
            "        engine = getattr(self, '_engine', None)\n"
            "        if engine is None or engine.runner is not runner:\n"
            "            engine = self._engine = Engine(runner, vocab_size=vocab, decode=self.decode)\n"
        ),
        tests="rollout/test_local.py",
    ),
    fault(
        "a prompt begins with what another reads in the same launch", "pain 15", "sampler", SCHEDULE,
        old="            self._read(self._begin(group, requests, CHUNK * len(chunks), copy), chunks, launch)\n",
        new=(
            "            begun = self._begin(group, requests, CHUNK * len(chunks), copy)\n"
            "            index.add(group.adapter, group.prompt, len(group.prompt), requests[0].blocks)\n"
            "            self._read(begun, chunks, launch)\n"
        ),
        tests="rollout/test_schedule.py",
    ),
    # --- blocks and rows ---
    fault(
        "a block that two read is free when the first has ended", "pain 13", "sampler", BLOCKS,
        old="                self.free -= 1\n            self.refs[block] += 1\n",
        new="                self.free -= 1\n                self.refs[block] += 1\n",
        tests="rollout/test_blocks.py",
    ),
    fault(
        "blocks are taken for the prompt, and not for what is written", "pain 13", "sampler", BLOCKS,
        old="    private = [-(-(prompt + limit) // CHUNK) - full for limit in limits]",
        new="    private = [-(-(prompt + min(limit, 1)) // CHUNK) - full for limit in limits]",
        tests="rollout/test_blocks.py rollout/test_engine.py",
    ),
    fault(
        "a row moves and its prefix is looked for where it was", "pain 15", "sampler", BLOCKS,
        old="        self.index.move(a, b)\n", new="",
        tests="rollout/test_blocks.py",
    ),
    # --- requests that come and go ---
    fault(
        "a request cancelled while its prompt is read keeps its row and blocks", "pain 22", "sampler", SCHEDULE,
        old="            if active.cancelled:\n                self._free(active)\n", new="",
        tests="rollout/test_schedule.py",
    ),
    fault(
        "a row cancelled before it got its copy of a prompt is read by others", "pain 13", "sampler", SCHEDULE,
        old="            if not active.cancelled:  # each row", new="            if active:  # each row",
        tests="rollout/test_schedule.py",
    ),
    fault(
        "a cancelled request writes on", "pain 22", "sampler", ENGINE,
        old="            self.runner.stop([active.row for active in requests])", new="            pass",
        tests="rollout/test_engine.py",
    ),
    fault(
        "after a failure the rows of the last run write on", "pain 21", "sampler", ENGINE,
        old="            self.runner.stop(list(range(self.runner.max_rows)))\n", new="            pass\n",
        tests="rollout/test_engine.py",
    ),
    fault(
        "rows of two adapters run side by side", "pain 15", "sampler", SCHEDULE,
        old="        return not self.running and self.queues.turn(self.launches)",
        new="        return self.queues.turn(self.launches)",
        tests="rollout/test_schedule.py",
    ),
    fault(
        "an adapter's requests wait as long as others come", "pain 21", "sampler", "engine/schedule.py",
        old="        return now - max(min(others), self.served_since) >= SWITCH_AFTER", new="        return False",
        tests="rollout/test_schedule.py",
    ),
    fault(
        "the sampler leaves torch with fewer threads", "pain 26", "sampler", "engine/runners/torch/runner.py",
        old="                if fewer < before:\n                    torch.set_num_threads(before)\n",
        new="                pass\n",
        tests="model/test_plain_runner.py",
    ),
)  # fmt: skip
