"""Mutants of algo/ that no test can or need kill, each with the reason. The program counts them apart, and says so when
one is killed after all or no longer exists."""

FEW_STEPS = "groups with fewer than two steps are set to 0 afterwards, whatever was divided"
ONE = "the mean of one number in float64 is that number, so a group of one has 0 either way"
TIE = "u = 0 is a tie, which is decided before"

# No input tells them from the original.
EQUIVALENT: dict[str, str] = {
    "credit._centred: batch.valid & (size > 1)  ->  batch.valid & (size >= 1)": ONE,
    "credit._centred: size > 1  ->  size > 0": ONE,
    "credit._centred: torch.where(batch.valid & (size > 1), reward - mean, 0.0)  ->  "
    "torch.where(batch.valid, reward - mean, 0.0)": ONE,
    "credit.group_process: square * rows / steps.clamp(min=1)  ->  square * rows / steps": FEW_STEPS,
    "credit.group_process: total * rows / steps.clamp(min=1)  ->  total * rows / steps": FEW_STEPS,
    "credit.group_process: min=1  ->  min=0": FEW_STEPS,
    "credit.group_process: min=1  ->  min=0 (#2)": FEW_STEPS,
    "credit.group_process: min=1  ->  min=2": FEW_STEPS,
    "credit.group_process: min=1  ->  min=2 (#2)": FEW_STEPS,
    "credit.group_progress: torch.zeros_like(x)  ->  torch.ones_like(x)": "a constant cancels in differences",
    "credit.is_builtin: getattr(inner, '__module__', None)  ->  getattr(inner, '__module__', 1)": (
        "neither is the name of a module"
    ),
    "credit.kl_cost: torch.zeros_like(batch.mask, dtype=batch.reward.dtype)  ->  "
    "torch.zeros_like(batch.real, dtype=batch.reward.dtype)": "only the shape is read, and it is the same",
    "credit.row_rewards: sequence_sum(token_rewards(batch, kl=kl), batch.mask)  ->  "
    "sequence_sum(token_rewards(batch, kl=kl), batch.real)": "token rewards are 0 off the mask",
    "credit.whiten: total / count.clamp(min=1)  ->  total / count": "without a trained token the mean is not read",
    "credit.whiten: min=1  ->  min=0": "without a trained token the mean is not read",
    "credit.whiten: min=1  ->  min=2 (#2)": "one token deviates by 0 from its own mean: 0 / 1 and 0 / 2 are the same",
    "credit.whiten: [x.sum(), mask.sum().to(x.dtype)]  ->  [x.sum(), mask.sum()]": "torch.stack promotes to float64",
    "prefer.gain_accuracy: (u > 0).float  ->  (u >= 0).float": TIE,
    "prefer.gain_accuracy: torch.where(u.abs() <= 1e-06 * size, 0.5, (u > 0).float())  ->  "
    "torch.where(u.abs() <= 1e-06 * size, 0.5, u > 0)": "torch.where promotes the truth values to float32 beside 0.5",
    "prefer.last_value: sequence_sum(fwd.value, last)  ->  sequence_mean(fwd.value, last)": (
        "a row has one last position: sum and mean of one number are the same"
    ),
    "terms.clipped: torch.where(batch.adv < 0, torch.minimum(loss, -dual * batch.adv), loss)  ->  "
    "torch.where(batch.adv <= 0, torch.minimum(loss, -dual * batch.adv), loss)": "with A = 0 both are 0",
    "terms.clipped: -torch.minimum(r * batch.adv, r.clamp(1 - low, 1 + high) * batch.adv)  ->  "
    "-torch.minimum(r.clamp(1 - low, 1 + high) * batch.adv, r * batch.adv)": "the minimum is symmetric",
}

# They differ, but in nothing that is promised.
ACCEPTED: dict[str, str] = {
    "weight.fixed_length: if limit.is_cpu and bool((batch.mask & (limit < 1)).any()):"
    "  ->  if bool((batch.mask & (limit < 1)).any()):": (
        "on a GPU the check would wait for the device; the tests of algo/ have none"
    ),
    "credit._group_mean: index = to_device(index, x.device)  ->  pass": "on a CPU the index is there already",
    "weight.Weighs: @property def weigh ... ...  ->  def weigh ... ...": "only the type checker reads a protocol",
}
