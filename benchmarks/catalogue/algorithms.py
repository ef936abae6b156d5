"""Faults in the mathematics: credit, ratios, clips, KL, preference losses."""

from benchmarks.catalogue.fault import Edit, fault

CREDIT, TERMS, PREFER = "algo/credit.py", "algo/terms.py", "algo/prefer.py"
EVERY = "algo/test_every_algorithm.py"

ALGORITHMS = (
    # --- credit ---
    fault(
        "group std over the whole batch", "pain 3", "algorithm", CREDIT,
        old="var, _ = _group_mean(centred.square(), batch, batch.valid)",
        new="var, _ = _group_mean(centred.square(), replace(batch, group=torch.zeros_like(batch.group)), batch.valid)",
        tests="algo/test_edges.py",
    ),
    fault(
        "std as E[x^2] - E[x]^2", "pain 3", "algorithm", CREDIT,
        old="    (square,) = reduce(deviation.square().sum()[None])",
        new=(
            "    raw = torch.where(mask, adv, 0.0).square().sum()\n"
            "    (square,) = reduce((raw - total.float().square() / count.float())[None])"
        ),
        tests="algo/test_credit.py",
    ),
    fault(
        "an invalid reward is in the group's mean", "pain 3", "algorithm", CREDIT,
        old="    mean, size = _group_mean(reward, batch, batch.valid)",
        new="    mean, size = _group_mean(reward, batch, torch.ones_like(batch.valid))",
        tests="algo/test_credit.py",
    ),
    fault(
        "a group of one has an advantage", "pain 3", "algorithm", CREDIT,
        old="batch.valid & (size > 1), reward - mean, 0.0",
        new="batch.valid & (size > 0), torch.where(size > 1, reward - mean, reward), 0.0",
        tests="algo/test_credit.py",
    ),
    fault(
        "leave-one-out keeps the row in its own mean", "pain 3", "algorithm", CREDIT,
        old="_spread(centred * size / (size - 1).clamp(min=1), batch.mask)",
        new="_spread(centred, batch.mask)",
        tests="algo/test_credit.py",
    ),
    fault(
        "advantage not masked", "contract", "algorithm", CREDIT,
        old="    return torch.where(mask, per_row[:, None], 0.0)",
        new="    return per_row[:, None].expand(mask.shape)",
        tests="algo/test_edges.py",
    ),
    fault(
        "GAE goes across observation tokens", "pain 18", "algorithm", CREDIT,
        old="        next_value = torch.where(live, value[:, t], next_value)",
        new="        next_value = torch.where(live, value[:, t], 0.0)",
        tests="oracle/test_exact_gae.py",
    ),
    fault(
        "the reward is lost at an observation span", "pain 18", "algorithm", CREDIT,
        old="        next_adv = torch.where(live, here, next_adv)",
        new="        next_adv = torch.where(live, here, 0.0)",
        tests="oracle/test_exact_gae.py",
    ),
    fault(
        "the reward lies on the last position, not on the last trained token", "pain 4", "algorithm", CREDIT,
        old="    last = batch.mask & (batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)",
        new="    last = batch.real & (batch.real.flip(-1).cumsum(-1).flip(-1) == 1)",
        tests="algo/test_credit.py",
    ),
    fault(
        "lambda left out of GAE", "contract", "algorithm", CREDIT,
        old="gamma * lam * next_adv", new="gamma * next_adv",
        tests="oracle/test_exact_gae.py",
    ),
    fault(
        "whitening divides by the variance", "contract", "algorithm", CREDIT,
        old="((square / count.clamp(min=1)).sqrt() + eps)", new="(square / count.clamp(min=1) + eps)",
        tests="algo/test_credit.py",
    ),
    fault(
        "whitening counts masked tokens", "contract", "algorithm", CREDIT,
        old="mask.sum().to(x.dtype)]", new="torch.ones_like(mask).sum().to(x.dtype)]",
        tests="algo/test_credit.py",
    ),
    # --- ratios and clips ---
    fault(
        "max instead of min in the clipped loss", "contract", "algorithm", TERMS,
        old="-torch.minimum(r * batch.adv,", new="-torch.maximum(r * batch.adv,",
        tests="algo/test_terms.py",
    ),
    fault(
        "the clip has the wrong sign", "contract", "algorithm", TERMS,
        old="    loss = -torch.minimum(r * batch.adv, r.clamp", new="    loss = torch.minimum(r * batch.adv, r.clamp",
        tests="algo/test_terms.py",
    ),
    fault(
        "the upper clip bound is the lower one", "contract", "algorithm", TERMS,
        old="r.clamp(1 - low, 1 + high)", new="r.clamp(1 - low, 1 + low)",
        tests="algo/test_terms.py",
    ),
    fault(
        "the ratio is taken before the mask", "contract", "algorithm", TERMS,
        old="    return torch.where(batch.mask, fwd.logp - batch.old_logp, 0.0).exp()",
        new="    return torch.where(batch.mask, (fwd.logp - batch.old_logp).exp(), 1.0)",
        tests=EVERY,
    ),
    fault(
        "the value loss takes the better of the two errors", "contract", "algorithm", TERMS,
        old="error = torch.maximum(error,", new="error = torch.minimum(error,",
        tests="algo/test_terms.py",
    ),
    fault(
        "the value loss is not clipped", "contract", "algorithm", TERMS,
        old="    if clip is not None:\n        near", new="    if clip is not None and False:\n        near",
        tests="algo/test_terms.py",
    ),
    fault(
        "GSPO's ratio is not divided by the length", "contract", "algorithm", TERMS,
        old="    return sequence_mean(fwd.logp - batch.old_logp, batch.mask).exp()",
        new="    return sequence_sum(fwd.logp - batch.old_logp, batch.mask).exp()",
        tests="algo/test_terms.py",
    ),
    fault(
        "CISPO's gradient goes through its weight", "contract", "algorithm", TERMS,
        old=".clamp(max=max_ratio).detach()", new=".clamp(max=max_ratio)",
        tests="algo/test_terms.py",
    ),
    # --- KL ---
    fault(
        "k1 is allowed in the loss", "pain 8", "algorithm", "algo/online.py",
        old='    if place == "loss" and estimator == "k1" and not ratio:',
        new='    if place == "loss" and estimator == "k9" and not ratio:',
        tests="algo/test_algo_settings.py",
    ),
    fault(
        "GRPO's KL is k1 in the loss", "pain 8", "algorithm", TERMS,
        old="    kl = ESTIMATORS[estimator](d)", new='    kl = ESTIMATORS["k1"](d)',
        tests="oracle/test_exact_kl.py",
    ),
    fault(
        "k3 with the ratio upside down", "pain 8", "algorithm", "algo/terms.py",
        old="    return (-d).expm1() + d", new="    return d.expm1() - d",
        tests="oracle/test_exact_kl.py",
    ),
    fault(
        "the KL cost is added to the reward", "pain 8", "algorithm", CREDIT,
        old="0.0) - kl_cost(batch, kl=kl)", new="0.0) + kl_cost(batch, kl=kl)",
        tests="algo/test_credit.py",
    ),
    fault(
        "the reward's KL is of the sampler's log-prob, not the policy's", "pain 15", "algorithm", CREDIT,
        old="ESTIMATORS[kl](batch.old_logp - batch.ref_logp)", new="ESTIMATORS[kl](batch.gen_logp - batch.ref_logp)",
        tests="algo/test_credit.py",
    ),
    fault(
        "PPO-penalty's beta moves the wrong way", "contract", "algorithm", "algo/control.py",
        old="        return beta * 2\n", new="        return beta / 2\n",
        tests="algo/test_weight_and_control.py",
    ),
    # --- selection ---
    fault(
        "dynamic sampling keeps groups with no signal", "pain 3", "algorithm", "algo/select.py",
        old="for value, _ in _valued(g)}) > 1]", new="for value, _ in _valued(g)}) > 0]",
        tests="algo/test_select.py",
    ),
    fault(
        "the overlong penalty is a bonus", "contract", "algorithm", "algo/select.py",
        old="value=r.outcome.value + penalty", new="value=r.outcome.value - penalty",
        tests="algo/test_select.py",
    ),
    fault(
        "an invalid reward counts as zero when rows are ranked", "pain 12", "algorithm", "algo/select.py",
        old="    return rollout.outcome.value if rollout.outcome else None",
        new="    return (rollout.outcome.value or 0.0) if rollout.outcome else None",
        tests="algo/test_select.py",
    ),
    # --- weights ---
    fault(
        "Dr. GRPO is divided by the row's length", "contract", "algorithm", "algo/weight.py",
        old="    limit = batch.limit[:, None]",
        new="    limit = batch.mask.sum(-1, keepdim=True)",
        tests="algo/test_weight_and_control.py",
    ),
    fault(
        "DAPO's token mean is a mean of rows", "pain 1", "algorithm", "algo/weight.py",
        old="    return batch.mask.double() / max(n.tokens, 1)",
        new="    return batch.mask.double() / batch.mask.sum(-1, keepdim=True).clamp(min=1) / max(n.rows, 1)",
        tests="algo/test_weight_and_control.py",
    ),
    fault(
        "the loss is divided by the rows of the micro-batch", "pain 1", "algorithm", "algo/table.py",
        old="        total = total + coefficient * (x.where(used, 0.0) * weights).sum()",
        new="        total = total + coefficient * (x.where(used, 0.0) * weights).sum() / max(len(x), 1)",
        tests=EVERY,
    ),
    fault(
        "the mismatch correction is upside down", "pain 15", "algorithm", "algo/weight.py",
        old="batch.old_logp - batch.gen_logp", new="batch.gen_logp - batch.old_logp",
        tests="algo/test_weight_and_control.py",
    ),
    # --- preferences ---
    fault(
        "chosen and rejected are swapped", "contract", "algorithm", PREFER,
        old="(chosen - rejected).repeat_interleave(2)", new="(rejected - chosen).repeat_interleave(2)",
        tests="algo/test_prefer.py",
    ),
    fault(
        "DPO without its reference", "pain 10", "algorithm", PREFER,
        old="    return sequence_sum(fwd.logp - batch.ref_logp, batch.mask)",
        new="    return sequence_sum(fwd.logp, batch.mask)",
        tests="algo/test_prefer.py",
    ),
    fault(
        "SimPO is not normalised by length", "contract", "algorithm", PREFER,
        old="gamma - beta * pair_margin(sequence_mean(fwd.logp, batch.mask))",
        new="gamma - beta * pair_margin(sequence_sum(fwd.logp, batch.mask))",
        tests="algo/test_prefer.py",
    ),
    fault(
        "ORPO's odds have the wrong sign", "contract", "algorithm", PREFER,
        old="logp - torch.log(-torch.expm1(logp))", new="logp + torch.log(-torch.expm1(logp))",
        tests="algo/test_prefer.py",
    ),
    fault(
        "KTO's labels are swapped", "contract", "algorithm", PREFER,
        old="    return torch.where(batch.label == 1, good", new="    return torch.where(batch.label == 0, good",
        tests="algo/test_prefer.py",
    ),
    fault(
        "a reward model reads the score before the stop token", "pain 4", "algorithm", PREFER,
        old="    last = batch.real & (batch.real.flip(-1).cumsum(-1).flip(-1) == 1)",
        new="    last = batch.mask & (batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)",
        tests="algo/test_prefer.py",
    ),
    fault(
        "two ratios for one algorithm: GRPO's watch and loss disagree", "pain 2", "algorithm", TERMS,
        old="(batch.adv > 0) & (r > 1 + high)", new="(batch.adv > 0) & (r > 1 + low)",
        tests="algo/test_terms.py",
        more=(Edit(file=TERMS, old="((batch.adv < 0) & outside)", new="((batch.adv > 0) & outside)"),),
    ),
)  # fmt: skip
