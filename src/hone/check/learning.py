"""Checks of the learner before its first step: the forward pass, the reference, the gradient and how it is cut."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from hone.algo.table import Algorithm, objective
from hone.check.finding import Finding, failed, passed, skipped, warned
from hone.check.perturb import moved
from hone.check.probe import Probe
from hone.model.forward import LAYOUTS
from hone.model.policy import Policy
from hone.train import optim
from hone.train.step import Learner, evaluate, micro_batches
from hone.types import Batch, Forward

EXACT = 1e-6  # nats: the reference is a copy, so the same sums are made in the same order
CUT = 1e-3  # relative: two orders of float32 sums over a whole model


def forward(probe: Probe) -> Finding:
    """Two passes over the same batch are equal to the bit: nothing is dropped at random."""
    policy, batch = probe.job.learner.policy, probe.batch
    with torch.no_grad():
        one, two = _columns(policy(batch, probe.job.algo.wants)), _columns(policy(batch, probe.job.algo.wants))
    unlike = [name for name in one if not torch.equal(one[name], two[name])]
    if unlike:
        gap = max(float((one[name] - two[name]).abs().max()) for name in unlike)
        seen = f"{', '.join(unlike)} differ by up to {gap:.1e} between two passes over the same rows"
        return failed(seen, "switch dropout off, and keep train.deterministic=true")
    return passed(f"{', '.join(one)} are equal to the bit in two passes ({probe.about})")


def _columns(fwd: Forward) -> dict[str, Tensor]:
    return {
        name: x for name in ("logp", "entropy", "value", "ref_kl", "old_kl") if (x := getattr(fwd, name)) is not None
    }


def layouts(probe: Probe) -> Finding:
    """Padded and packed rows give the same numbers: no row sees its neighbour."""
    policy, want = probe.job.policy, probe.job.algo.wants & {"logp", "value"}
    before, found = policy.layout, list[Forward]()
    try:
        for layout in LAYOUTS:
            policy.layout = layout
            found.append(evaluate(policy, probe.batch, frozenset(want), rows=len(probe.batch)))
    finally:
        policy.layout = before
    padded, packed = map(_columns, found)
    gap = max(float((padded[name] - packed[name]).abs().max()) for name in padded)
    seen = f"{' and '.join(padded)} of padded and packed rows within {gap:.1e}; the run uses {before}"
    if not gap <= CUT:
        return failed(seen, "this is a bug of Hone: please report it")
    return passed(seen)


def reference(probe: Probe) -> Finding:
    """At step 0 the reference is the policy, so every log-ratio is 0; and it stays when the policy moves."""
    ref, policy = probe.job.learner.reference, probe.job.policy
    if ref is None or not isinstance(policy, Policy):
        return skipped("the algorithm, as it is set, compares with no reference")
    rows, want = probe.job.learner.micro_rows, frozenset({"logp"})
    now = evaluate(policy, probe.batch, want, rows=rows).logp
    before = evaluate(ref, probe.batch, want, rows=rows).logp
    gap = float((now - before).abs().max())
    kl = float(evaluate(policy, probe.batch, frozenset({"ref_kl"}), rows=rows).ref_kl.abs().max())
    seen = f"log-ratio to the reference at most {gap:.1e}, exact KL at most {kl:.1e} a token"
    if not max(gap, kl) <= EXACT:
        return failed(f"{seen}, expected 0", "the reference must be the model that the run starts from")
    with moved(policy.actor_parameters()):
        after = evaluate(ref, probe.batch, want, rows=rows).logp
    if not torch.equal(before, after):
        return failed(f"{seen}; but it moves when the policy moves", "the reference must be a copy, frozen")
    return passed(f"{seen}; it stays when the policy moves")


def gradients(learner: Learner, batch: Batch, algo: Algorithm, *, rows: int) -> tuple[float, list[Tensor | None]]:
    """The loss of the whole batch and its gradient for each parameter of the optimiser, before clipping."""
    parameters, loss = optim.parameters_of(learner.optimizer), 0.0
    learner.optimizer.zero_grad(set_to_none=True)
    for micro in micro_batches(batch, rows=rows, unit=algo.unit):
        part = objective(learner.policy(micro, algo.wants), micro, algo.loss)
        part.backward()
        loss += part.item()
    found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    learner.optimizer.zero_grad(set_to_none=True)
    return loss, found


def norm(tensors: Sequence[Tensor | None]) -> float:
    """The joint norm, in float64."""
    return float(sum(float(t.double().square().sum()) for t in tensors if t is not None) ** 0.5)


def gradient(probe: Probe) -> Finding:
    """Finite and not zero, for actor and critic; parameters that no gradient reaches are named."""
    learner, algo = probe.job.learner, probe.job.algo
    loss, found = gradients(learner, probe.batch, algo, rows=learner.micro_rows)
    parameters = optim.parameters_of(learner.optimizer)
    by_id = {id(p): g for p, g in zip(parameters, found, strict=True)}
    parts = {"actor": learner.policy.actor_parameters(), "critic": learner.policy.critic_parameters()}
    if probe.job.recipe.lora.rank:
        parts = {"adapters": parts["actor"], "critic": parts["critic"]}
    norms = {name: norm([by_id[id(p)] for p in ps]) for name, ps in parts.items() if ps}
    seen = f"loss {loss:.4g}, gradient " + ", ".join(f"{name} {x:.3g}" for name, x in norms.items())
    seen = f"{seen} ({probe.about})"
    remedy = "check the rewards and labels of the rows, and the model's weights"
    if not all(torch.tensor([loss, *norms.values()]).isfinite()):
        return failed(f"{seen}: not finite", remedy)
    if nothing := [name for name, x in norms.items() if x == 0]:
        return failed(f"{seen}: the {' and '.join(nothing)} would not learn", remedy)
    if unreached := _unreached(probe, by_id):
        return warned(f"{seen}; no gradient reaches {', '.join(unreached[:3])}", "freeze what the loss does not read")
    return passed(seen)


def _unreached(probe: Probe, by_id: dict[int, Tensor | None]) -> list[str]:
    named: Sequence[tuple[str, nn.Parameter]] = list(probe.job.policy.named_parameters())
    return [name for name, p in named if p.requires_grad and by_id.get(id(p)) is None]


def cut(probe: Probe) -> Finding:
    """The gradient does not depend on how the batch is cut into micro-batches."""
    learner, algo, batch = probe.job.learner, probe.job.algo, probe.batch
    whole_loss, whole = gradients(learner, batch, algo, rows=len(batch))
    parts_loss, parts = gradients(learner, batch, algo, rows=algo.unit)
    size = norm(whole)
    pairs = [(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None]
    gap = norm([a - b for a, b in pairs]) / max(size, 1e-30)
    seen = f"{len(batch)} rows at once or {algo.unit} at a time: gradients differ by {gap:.1e} of their norm"
    if size and not gap <= CUT:
        return failed(
            f"{seen}, losses {whole_loss:.5g} and {parts_loss:.5g}", "this is a bug of Hone: please report it"
        )
    return passed(seen)


def trained(probe: Probe) -> list[nn.Parameter]:
    """Every parameter that training may change, each once."""
    policy = probe.job.learner.policy
    return list({id(p): p for p in chain(policy.actor_parameters(), policy.critic_parameters())}.values())
