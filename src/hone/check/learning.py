"""Checks of the learner before its first step: forward pass, reference, gradient and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm, objective
from hone.check.perturb import perturb_weights
from hone.check.probe import Probe
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.model.layout import LAYOUTS
from hone.model.policy import Policy
from hone.train import optim
from hone.train.annotate import forward_in_slices
from hone.train.learner import Learner, micro_batches
from hone.types import Batch, Forward

EXACT = 1e-6  # nats: the reference is a copy, so that its sums have the same order
CUT = 1e-3  # relative: two orders of float32 sums over a whole model


def forward(probe: Probe) -> Finding:
    """Two passes over the same batch are equal to the bit: nothing is dropped at random."""
    policy, batch = probe.job.learner.policy, probe.batch
    if probe.large:
        batch = batch.rows(slice(probe.job.algo.unit))
    with torch.no_grad():
        one, two = _columns(policy(batch, probe.job.algo.wants)), _columns(policy(batch, probe.job.algo.wants))
    unlike = [name for name in one if not torch.equal(one[name], two[name])]
    if unlike:
        gap = max(float((one[name] - two[name]).abs().max()) for name in unlike)
        seen = f"{', '.join(unlike)} differ by up to {gap:.1e} between two passes over the same rows"
        return fail_finding(seen, "switch dropout off, and keep train.deterministic=true")
    return pass_finding(f"{', '.join(one)} are equal to the bit in two passes ({probe.about})")


def _columns(fwd: Forward) -> dict[str, Tensor]:
    return {
        name: x for name in ("logp", "entropy", "value", "ref_kl", "old_kl") if (x := getattr(fwd, name)) is not None
    }


def layouts(probe: Probe) -> Finding:
    """Rows give the same numbers in every layout: no row sees its neighbour."""
    probe = probe.small
    policy, want = probe.job.policy, probe.job.algo.wants & {"logp", "value"}
    before, found = policy.layout, list[Forward]()
    try:
        for layout in LAYOUTS:
            policy.layout = layout
            found.append(forward_in_slices(policy, probe.table, frozenset(want), rows=len(probe.table)))
    finally:
        policy.layout = before
    padded, *others = map(_columns, found)
    gap = max(float((padded[name] - other[name]).abs().max()) for name in padded for other in others)
    seen = f"{' and '.join(padded)} of rows {', '.join(LAYOUTS)} within {gap:.1e}; the run uses {before}"
    if not gap <= CUT:
        return fail_finding(seen, "this is a bug of Hone: please report it")
    return pass_finding(seen)


def reference(probe: Probe) -> Finding:
    """At step 0 the reference equals the policy, so every log-ratio is 0. It does not move with the policy."""
    ref, policy = probe.job.learner.reference, probe.job.policy
    if ref is None or not isinstance(policy, Policy):
        return skip_finding("the algorithm, as it is set, compares with no reference")
    if probe.job.algo.teacher:
        return skip_finding("the reference is a teacher, another model")
    rows, want = probe.job.learner.micro_rows, frozenset({"logp"})
    batch = probe.batch.rows(slice(probe.job.algo.unit)) if probe.large else probe.batch
    both = forward_in_slices(policy, batch, want | {"ref_kl"}, rows=rows)
    before = forward_in_slices(ref, batch, want, rows=rows).logp
    gap, kl = float((both.logp - before).abs().max()), float(both.ref_kl.abs().max())
    seen = f"log-ratio to the reference at most {gap:.1e}, exact KL at most {kl:.1e} a token"
    if not max(gap, kl) <= EXACT:
        return fail_finding(f"{seen}, expected 0", "the reference must be the model that the run starts from")
    with perturb_weights(policy.actor_parameters()):
        after = forward_in_slices(ref, batch, want, rows=rows).logp
    if not torch.equal(before, after):
        return fail_finding(f"{seen}; but it moves when the policy moves", "the reference must be a copy, frozen")
    return pass_finding(f"{seen}; it stays when the policy moves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The loss of a batch and its gradient before clipping, None for a parameter that the loss does not reach."""

    loss: float
    tensors: list[Tensor | None]  # in the optimiser's order
    summed: float  # the sum of the norms of the micro-batches' gradients, the scale of rounding errors


def gradients(learner: Learner, batch: Batch, algo: Algorithm, *, rows: int) -> Gradient:
    """Loss and gradient, summed over micro-batches of at most `rows` rows."""
    parameters, loss, summed = optim.parameters_of(learner.optimizer), 0.0, 0.0
    total: list[Tensor | None] = [None] * len(parameters)
    for micro in micro_batches(batch, rows=rows, unit=algo.unit):
        part = objective(learner.policy(micro, algo.wants), micro, algo.loss)
        gradient = torch.autograd.grad(part, parameters, allow_unused=True)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, gradient, strict=True)]
        loss, summed = loss + part.item(), summed + norm(gradient)
    return Gradient(loss=loss, tensors=total, summed=summed)


def gradient_of(probe: Probe) -> Gradient:
    """The gradient of the batch, computed once."""
    job = probe.job
    return probe.cached("gradient", lambda: gradients(job.learner, probe.batch, job.algo, rows=job.learner.micro_rows))


def norm(tensors: Sequence[Tensor | None]) -> float:
    """The joint norm. Each tensor is summed in float32: converting it first would take fifty times as long."""
    sizes = [torch.linalg.vector_norm(t, dtype=_precision(t)) for t in tensors if t is not None]
    return sum(float(size) ** 2 for size in sizes) ** 0.5


def _precision(t: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, else float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def apart(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> float:
    """The norm of the difference; a tensor that one side lacks counts whole."""
    pairs = zip(left, right, strict=True)
    return norm([a if b is None else b if a is None else a - b for a, b in pairs])


def gradient(probe: Probe) -> Finding:
    """Finite and not zero, for actor and critic; parameters that no gradient reaches are named."""
    learner, found = probe.job.learner, gradient_of(probe)
    parameters, loss = optim.parameters_of(learner.optimizer), found.loss
    by_id = {id(p): g for p, g in zip(parameters, found.tensors, strict=True)}
    parts = {"actor": learner.policy.actor_parameters(), "critic": learner.policy.critic_parameters()}
    if probe.job.recipe.lora.used:
        parts = {"adapters": parts["actor"], "critic": parts["critic"]}
    norms = {name: norm([by_id[id(p)] for p in ps]) for name, ps in parts.items() if ps}
    seen = f"loss {loss:.4g}, gradient " + ", ".join(f"{name} {x:.3g}" for name, x in norms.items())
    seen = f"{seen} ({probe.about})"
    remedy = "check the rewards and labels of the rows, and the model's weights"
    if not all(torch.tensor([loss, *norms.values()]).isfinite()):
        return fail_finding(f"{seen}: not finite", remedy)
    if nothing := [name for name, x in norms.items() if x == 0]:
        return fail_finding(f"{seen}: the {' and '.join(nothing)} would not learn", remedy)
    if unreached := _unreached(probe, by_id):
        return warn_finding(
            f"{seen}; no gradient reaches {', '.join(unreached[:3])}", "freeze what the loss does not read"
        )
    return pass_finding(seen)


def _unreached(probe: Probe, by_id: dict[int, Tensor | None]) -> list[str]:
    named: Sequence[tuple[str, nn.Parameter]] = list(probe.job.policy.named_parameters())
    return [name for name, p in named if p.requires_grad and by_id.get(id(p)) is None]


def cut(probe: Probe) -> Finding:
    """The gradient does not depend on how the batch is cut into micro-batches."""
    probe = probe.small
    learner, algo, batch = probe.job.learner, probe.job.algo, probe.batch
    whole, parts = (gradients(learner, batch, algo, rows=rows) for rows in (len(batch), algo.unit))
    gap = apart(whole.tensors, parts.tensors) / max(parts.summed, 1e-30)
    seen = f"{len(batch)} rows at once or {algo.unit} at a time: gradients differ by {gap:.1e} of their size"
    if not gap <= CUT:
        remedy = "the loss must be a sum over rows: weigh them in `weigh`, never by the size of a micro-batch"
        return fail_finding(f"{seen}, losses {whole.loss:.5g} and {parts.loss:.5g}", remedy)
    return pass_finding(seen)


def trained(probe: Probe) -> list[nn.Parameter]:
    """Every parameter that training may change, each once."""
    policy = probe.job.learner.policy
    return list({id(p): p for p in chain(policy.actor_parameters(), policy.critic_parameters())}.values())
