"""Faults between the batch and the weights: the loss's scale, the mask, the log-probs, the optimiser, the loop."""

from benchmarks.catalogue.fault import Edit, fault

TRAIN, LOOP, OPTIM = "train", "loop.py", "train/optim.py"

LEARNER = (
    # --- the scale of the loss ---
    fault(
        "the loss is divided by the micro-batches", "pain 1", "learner", "train/update.py",
        old="        loss.backward()\n",
        new="        (loss / -(-len(batch) // learner.micro_rows)).backward()\n",
        tests="train/test_update.py",
    ),
    fault(
        "the critic's loss is multiplied by the micro-batches", "pain 1", "learner", "train/update.py",
        old="        loss = objective(fwd, micro, algo.loss)\n",
        new=(
            "        parts = -(-len(batch) // learner.micro_rows)\n"
            "        scaled = tuple((c * (parts if 'value' in str(t) else 1), t) for c, t in algo.loss)\n"
            "        loss = objective(fwd, micro, scaled)\n"
        ),
        tests="train/test_update.py",
    ),
    fault(
        "every micro-batch has its own denominator", "pain 1", "learner", TRAIN,
        old="        fwd = learner.policy(micro, algo.wants)\n        micro = old_logp_from_first_pass(",
        new=(
            "        micro = weight.weigh(micro, algo.weigh, totals(micro))\n"
            "        fwd = learner.policy(micro, algo.wants)\n        micro = old_logp_from_first_pass("
        ),
        tests="train/test_update.py",
    ),
    fault(
        "old log-probs of the update itself, whatever the updates", "contract", "loop", TRAIN,
        old="without_old_logp(algo) if epochs == 1 and not corrected else algo", new="without_old_logp(algo)",
        tests="train/test_one_update.py",
    ),
    fault(
        "old log-probs of each update itself", "contract", "loop", TRAIN,
        old="    yield from map(replace(batch, old_logp=old).rows, others)",
        new="    yield from map(batch.rows, others)",
        tests="train/test_one_update.py",
    ),
    fault(
        "the last token that a log-prob depends on is not read", "contract", "model", "model/policy.py",
        old="    needed = at.mask.flip(-1).cumsum(-1).flip(-1) > 0",
        new="    needed = at.mask.flip(-1).cumsum(-1).flip(-1) > 1",
        tests="model/test_policy.py",
    ),
    fault(
        "in C++ a row does not see the prompt it shares", "contract", "model", "model/backends/native/calls.py",
        old="        own, count = start[:-1], np.diff(start)\n",
        new="        own, count, common = start[:-1], np.diff(start), 0 * common\n",
        tests="model/test_native_layers.py",
    ),
    fault(
        "in C++ a layer's gradient goes around its attention", "contract", "model", "model/backends/native/layer.py",
        old="dnormed, plus=dstream)", new="dnormed, plus=torch.zeros_like(dstream))",
        tests="model/test_native_layers.py",
    ),
    fault(
        "in C++ rows of a bundle share the first group's prompt", "contract", "model", "model/backends/native/stack.py",
        old="        moved[:, 2] = local[leader]", new="        moved[:, 2] = 0", tests="model/test_native_stack.py",
    ),
    fault(
        "rows of a group share their first tokens, the same or not", "contract", "model", "model/rows.py",
        old="        same = tokens_BW[others, :width] == tokens_BW[first[others], :width]",
        new="        same = np.ones((len(others), width), np.bool_)",
        tests="model/test_shared.py",
    ),
    fault(
        "every rank has its own denominator", "pain 1", "learner", TRAIN,
        old="weight.totals(batch, reduce=collect.total)", new="weight.totals(batch)",
        tests="train/test_two_ranks.py",
    ),
    fault(
        "gradients are not summed over ranks", "pain 1", "learner", TRAIN,
        old="    collect.total_gradients(whole)\n", new="",
        tests="train/test_two_ranks.py",
    ),
    fault(
        "gradients are averaged over ranks", "pain 1", "learner", "dist/collect.py",
        old="        dist.all_reduce(flat)\n", new="        dist.all_reduce(flat)\n        flat /= world()[1]\n",
        tests="train/test_two_ranks.py",
    ),
    fault(
        "whitening for each rank alone", "pain 3", "learner", TRAIN,
        old="assign_credit(batch, algo, reduce=collect.total)", new="assign_credit(batch, algo)",
        tests="train/test_two_ranks.py",
    ),
    fault(
        "rows without a trained token count in the denominator", "pain 1", "learner", "algo/weight.py",
        old="torch.stack([mask.any(-1).sum(), mask.sum()])",
        new="torch.stack([batch.real.any(-1).sum(), batch.mask.sum()])",
        tests="train/test_update.py",
    ),
    fault(
        "the prompt's tokens count in the denominator", "pain 1", "learner", "algo/weight.py",
        old="torch.stack([mask.any(-1).sum(), mask.sum()])",
        new="torch.stack([batch.mask.any(-1).sum(), batch.real.sum()])",
        tests="train/test_update.py",
    ),
    fault(
        "gradients add up from one update to the next", "contract", "learner", TRAIN,
        old="    learner.optimizer.zero_grad(set_to_none=True)\n    cut =",
        new="    cut =",
        tests="train/test_update.py",
        more=(
            Edit(
                file=TRAIN,
                old="    learner.optimizer.zero_grad(set_to_none=True)\n    return finite\n",
                new="    return finite\n",
            ),
        ),
    ),
    # --- log-probs ---
    fault(
        "temperature left out of the learner", "pain 9", "learner", "launch/build.py",
        old="temperature = recipe.sample.temperature if algo.online else 1.0", new="temperature = 1.0",
        tests="run/test_settings_take_effect.py run/test_end_to_end.py",
    ),
    fault(
        "temperature left out of the learner's logits", "pain 9", "model", "model/vocab/distribution.py",
        old="    return z if temperature == 1 else z.div_(temperature)\n", new="    return z\n",
        tests="model/test_vocab.py",
    ),
    fault(
        "the reference at the wrong temperature", "pain 9", "model", "model/policy.py",
        old="temperature=like.temperature, ", new="",
        tests="model/test_policy.py",
    ),
    fault(
        "the log-prob of the input, not of the target", "pain 5", "model", "model/policy.py",
        old="                batch.targets.flatten()[at],", new="                batch.inputs.flatten()[at],",
        tests="model/test_policy.py",
    ),
    fault(
        "old_logp is recomputed after each update", "pain 16", "loop", LOOP,
        old="                    stats.merge(take_step(learner, minibatch, algo))",
        new=(
            "                    stats.merge(take_step(learner, minibatch, algo))\n"
            "                    batch = annotate(replace(batch, old_logp=None), algo, learner)"
        ),
        tests="train/test_loop.py",
    ),
    fault(
        "old_logp is the sampler's log-prob", "pain 16", "learner", TRAIN,
        old="    batch = replace(batch, **columns)\n    if missing",
        new=(
            '    if "old_logp" in columns and batch.gen_logp is not ABSENT:\n'
            '        columns["old_logp"] = batch.gen_logp\n'
            "    batch = replace(batch, **columns)\n    if missing"
        ),
        tests="train/test_update.py",
    ),
    fault(
        "the sampler's log-probs are taken over without a look at the learner's", "pain 15", "learner", TRAIN,
        old="torch.equal(own[probe.mask], probe.gen_logp[probe.mask])",
        new="torch.equal(own[probe.mask], own[probe.mask])",
        tests="train/test_old_logp.py",
    ),
    fault(
        "log-probs are taken over from weights that did not write the rows", "pain 16", "learner", TRAIN,
        old="    old = old_logp_from_sampler(batch, learner) if from_sampler else None\n",
        new="    old = old_logp_from_sampler(batch, learner)\n",
        tests="train/test_old_logp.py",
    ),
    fault(
        "the correction of the sampler's mismatch compares it with itself", "pain 15", "loop", TRAIN,
        old="self._sampler_agrees = not lag and not corrected and ", new="self._sampler_agrees = ",
        tests="train/test_old_logp.py",
    ),
    # --- reference ---
    fault(
        "the reference is the policy itself", "pain 10", "learner", "model/policy.py",
        old="frozen_policy(copy.deepcopy(policy.decoder), policy", new="frozen_policy(policy.decoder, policy",
        tests="model/test_policy.py",
        more=(
            Edit(file="model/policy.py", old="    return policy.requires_grad_(False).eval()", new="    return policy"),
        ),
    ),
    fault(
        "the reference under LoRA has the adapter on", "pain 10", "model", "model",
        old="        with adapter_off(self.policy.decoder):\n            return self.policy(batch, want)",
        new="        with torch.no_grad():\n            return self.policy(batch, want)",
        tests="model/test_lora.py",
    ),
    fault(
        "the reference is refreshed at every step", "pain 10", "loop", "launch/train.py",
        old="    if every and job.step % every == 0 and isinstance(job.policy, Policy)",
        new="    if isinstance(job.policy, Policy)",
        tests="run/test_settings_take_effect.py",
    ),
    # --- bootstrap and KTO ---
    fault(
        "bootstrap on finished episodes", "contract", "learner", TRAIN,
        old="torch.where(batch.truncated, last_value(old, batch), 0.0)", new="last_value(old, batch)",
        tests="train/test_update.py",
    ),
    fault(
        "KTO's baseline is not clamped at zero", "contract", "learner", TRAIN,
        old="    return max(0.0, summed / max(count, 1.0))", new="    return summed / max(count, 1.0)",
        tests="train/test_update.py",
    ),
    fault(
        "KTO's baseline is of the matched pairs", "contract", "loop", TRAIN,
        old="mismatched_pairs([r for g in groups for r in g], max_tokens=context)",
        new="[r for g in groups for r in g]",
        tests="train/test_loop.py",
    ),
    # --- the optimiser ---
    fault(
        "the gradient is not clipped", "contract", "learner", OPTIM,
        old="        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)", new="        pass",
        tests="train/test_optim.py",
    ),
    fault(
        "the gradient is clipped after the step", "contract", "learner", TRAIN,
        old="    norm = optim.clip_gradients(parameters, learner.clip_norm, parts=parts)\n",
        new="    norm = optim.clip_gradients(parameters, 0.0, parts=parts)\n",
        tests="train/test_update.py",
        more=(
            Edit(
                file=TRAIN,
                old="        learner.optimizer.step()\n",
                new="        learner.optimizer.step()\n        optim.clip_gradients(parameters, learner.clip_norm)\n",
            ),
        ),
    ),
    fault(
        "the schedule is a step late", "contract", "learner", OPTIM,
        old="            return (step + 1) / warmup", new="            return step / warmup",
        tests="train/test_optim.py",
    ),
    fault(
        "the schedule reads iterations, not updates", "contract", "learner", TRAIN,
        old="learner.schedule(learner.updates)", new="learner.schedule(learner.version)",
        tests="train/test_update.py",
    ),
    fault(
        "the schedule ends too late: epochs and minibatches not counted", "contract", "recipe", "launch/build.py",
        old="steps=t.steps * t.epochs * t.minibatches", new="steps=t.steps",
        tests="run/test_settings_take_effect.py",
    ),
    fault(
        "weight decay on nothing", "contract", "learner", OPTIM,
        old="            (weight_decay, [p for p in parameters if p.ndim >= 2]),",
        new="            (0.0, [p for p in parameters if p.ndim >= 2]),",
        tests="train/test_optim.py",
    ),
    fault(
        "a NaN gradient is stepped on", "contract", "learner", TRAIN,
        old="    finite = bool(norm.isfinite())\n", new="    finite = True\n",
        tests="train/test_update.py",
    ),
    # --- metrics ---
    fault(
        "metrics of ranks are averaged without their counts", "pain 2", "loop", "log/stats.py",
        old="            self.add(name, total, count)\n        for name, value in other._maxima.items():",
        new=(
            "            self.add(name, total / count if count else 0.0)\n"
            "        for name, value in other._maxima.items():"
        ),
        tests="log/test_stats.py",
    ),
    fault(
        "invalid rewards are logged as zero", "pain 12", "loop", TRAIN,
        old="        reward=(sum(values), len(values)),",
        new="        reward=(sum(values), len(rollouts)),",
        tests="train/test_loop.py",
    ),
    fault(
        "the KL is logged as zero", "pain 2", "learner", TRAIN,
        old="k3(torch.where(mask, logp - batch.ref_logp, 0.0))",
        new="k3(torch.where(mask, logp - logp, 0.0))",
        tests="train/test_diagnose.py",
    ),
    # --- what a run survives ---
    fault(
        "what memory cut short is counted twice", "pain 22", "learner", TRAIN,
        old="    learner.optimizer.zero_grad(set_to_none=True)\n    cut =",
        new="    if learner.guard.divisor == 1:\n        learner.optimizer.zero_grad(set_to_none=True)\n    cut =",
        tests="train/test_memory.py",
    ),
    fault(
        "weights that are not finite are saved", "pain 19", "resume", "train/guard.py",
        old="        if sum(bad.values()) > self.known_nonfinite:\n",
        new="        if sum(bad.values()) < self.known_nonfinite:\n",
        tests="run/test_rescue.py",
    ),
    fault(
        "a step that fails costs those before it", "pain 19", "resume", "launch/rescue.py",
        old="    return job.step > 0 and", new="    return job.step < 0 and",
        tests="run/test_rescue.py",
    ),
    fault(
        "a run goes back to the harm it came from", "pain 19", "resume", "launch/rescue.py",
        old=", but=job.spikes.tried)", new=")",
        tests="run/test_rescue.py",
    ),
    fault(
        "half a step is saved as a whole one", "pain 19", "resume", "launch/rescue.py",
        old=" and not job.learner.moved", new="",
        tests="run/test_rescue.py",
    ),
)  # fmt: skip
