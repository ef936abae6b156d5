"""Checks of the sampler against the learner: the same weights, the same distribution, completions that differ."""

import math
from collections import Counter
from typing import cast

import torch
from torch import Tensor

from hone.check.perturb import perturb_weights
from hone.check.probe import Probe, last_tokens
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.check.text import misplaced
from hone.data.collate import collate
from hone.data.text.chat import render_prompt
from hone.engine.params import SampleParams
from hone.launch.job import publish
from hone.model.policy import Policy
from hone.train.annotate import forward_in_slices
from hone.types import Batch, Group, Rollout, Stop

WARN_GAP, FAIL_GAP = 1e-3, 1e-2  # nats at temperature 1: float32 leaves about 1e-5
UNLIKELY = math.log(1e-6)  # a coincidence less probable than this is a fault
SOME = 16  # tokens of a row that a large model reads to show its temperature
OFFLINE = "nothing is sampled: the algorithm is offline"


def learner_logp(probe: Probe, batch: Batch) -> Tensor:
    """The log-prob that the loss reads, [B, T]."""
    return forward_in_slices(probe.job.policy, batch, frozenset({"logp"}), rows=probe.job.learner.micro_rows).logp


def gap(probe: Probe, groups: list[Group]) -> tuple[float, float]:
    """Largest and mean |log-prob of the sampler - of the learner| over the tokens written."""
    batch = collate(groups)
    difference = (learner_logp(probe, batch) - batch.gen_logp).abs()[batch.mask].double()
    return float(difference.max()), float(difference.mean())


def _limits(probe: Probe) -> tuple[float, float]:
    """The gaps that warn and fail. A rounding error in a logit is divided by the temperature."""
    grown = max(1.0, 1 / probe.job.recipe.sample.temperature)
    return WARN_GAP * grown, FAIL_GAP * grown


def agree(probe: Probe) -> Finding:
    """log pi of each sampled token: sampler and learner must give the same number."""
    if not probe.job.algo.online:
        return skip_finding(OFFLINE)
    groups = [g[:2] for g in probe.groups] if probe.large else probe.groups
    largest, mean = gap(probe, groups)
    rows = [r for g in groups for r in g]
    seen = f"gap of log-probs at most {largest:.1e}, mean {mean:.1e}, over {sum(sum(r.mask) for r in rows)} tokens"
    warn, fail = _limits(probe)
    remedy = "sampler and learner must share weights, temperature and precision; then train.mismatch=truncate"
    if not largest <= fail:
        return fail_finding(f"{seen} (limit {fail:.0e})", remedy)
    return warn_finding(f"{seen} (expected below {warn:.0e})", remedy) if largest > warn else pass_finding(seen)


def published(probe: Probe) -> Finding:
    """After the weights move and are published, the sampler uses them; after they are restored, the old ones."""
    job = probe.job
    if not job.algo.online:
        return skip_finding(OFFLINE)
    assert job.roller is not None
    tasks, version = probe.sampled_tasks[: 1 if probe.large else 2], job.roller.sampler.version
    few = 2 if probe.large else 1
    before = probe.sample(tasks, fewer=few)
    parameters = job.learner.policy.actor_parameters()
    try:
        with perturb_weights(parameters):
            publish(job, version + 1)
            after = probe.sample(tasks, fewer=few)
            followed, _ = gap(probe, after)
        stale, _ = gap(probe, after)  # the same tokens under the old weights: the gap of a stale sampler
    finally:
        publish(job, version)
    again = probe.sample(tasks, fewer=few)
    limit = _limits(probe)[1]
    seen = f"weights moved: sampler within {followed:.1e} of the learner, {stale:.2g} from the old weights"
    remedy = (
        "the sampler holds other weights than the learner: build it on the learner's own decoder, adapters included"
    )
    if not followed <= limit:
        return fail_finding(f"{seen} (limit {limit:.0e})", remedy)
    if any(r.version != version + 1 for g in after for r in g):
        return fail_finding("completions carry the version of older weights", "publish(version) must reach the sampler")
    if _written(again) != _written(before):
        return fail_finding(f"{seen}; put back, it writes something else than before", remedy)
    return pass_finding(f"{seen}; put back, it writes the same again")


def _written(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(list(r.tokens), list(r.gen_logp)) for g in groups for r in g]


def differ(probe: Probe) -> Finding:
    """Completions of one prompt are independent draws: equal ones are no more frequent than chance makes them."""
    if not probe.job.algo.online:
        return skip_finding(OFFLINE)
    size = len(probe.groups[0])
    if size < 2:
        return skip_finding("one sample a prompt: there is no group")
    chance, equal = 0.0, 0
    for group in probe.groups:
        counts = Counter(tuple(r.tokens) for r in group)
        likelihood = {tuple(r.tokens): sum(r.gen_logp) for r in group}
        for tokens, n in counts.items():
            if n > 1:
                equal += n - 1
                chance += math.log(math.comb(size, n)) + (n - 1) * likelihood[tokens]
    rows = size * len(probe.groups)
    seen = f"{rows - equal} of {rows} completions in {len(probe.groups)} groups are the first of their kind"
    if chance < UNLIKELY:
        seen += f"; so many equal ones have a chance of 1e{chance / math.log(10):.0f}"
        return fail_finding(seen, "give each request random numbers of its own: samples must not share a seed")
    if equal >= rows - len(probe.groups):
        return warn_finding(
            f"{seen}: the policy writes one thing only", "raise sample.temperature, or start from another model"
        )
    return pass_finding(seen)


def temperature(probe: Probe) -> Finding:
    """The learner's log-prob is log softmax(logits / T) of the next token, which is computed here row by row."""
    policy, job = probe.job.policy, probe.job
    if not isinstance(policy, Policy):
        return skip_finding("a scorer has no log-probs")
    if job.roller and (unseen := _unseen(job.roller.params)):
        seen = f"{', '.join(unseen)} changes the sampler's distribution and not the learner's"
        remedy = "train with sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0, no penalty, bias or banned tokens"
        return fail_finding(seen, remedy)
    T = job.recipe.sample.temperature if job.algo.online else 1.0
    if job.roller and job.roller.params.temperature != T:
        return fail_finding(
            f"the sampler's temperature is {job.roller.params.temperature}, the recipe's {T}", "use one"
        )
    rows = [r for g in probe.training_groups for r in g][: 1 if probe.large else 8]
    rows = [last_tokens(r, SOME) if probe.large else r for r in rows]
    worst = _largest_error(probe, rows, T)
    limit = _limits(probe)[0]
    seen = f"learner's log-prob within {worst:.1e} of log softmax(logits / {T:g}) on {len(rows)} rows"
    if not worst <= limit:
        return fail_finding(f"{seen} (limit {limit:.0e})", "the policy's temperature must be sample.temperature")
    return pass_finding(f"{seen}; nothing but the temperature changes what is sampled" if job.algo.online else seen)


def _unseen(params: SampleParams) -> tuple[str, ...]:
    """The sampler's settings that the learner ignores. It follows truncation if the sampler records the support."""
    seen = {"top_k", "top_p", "min_p"} if params.support_recorded else set[str]()
    return tuple(name for name in params.altered if name not in seen)


@torch.no_grad()
def _largest_error(probe: Probe, rows: list[Rollout], T: float) -> float:
    decoder = cast(Policy, probe.job.policy).decoder
    batch = collate([rows])
    logp, worst = learner_logp(probe, batch), 0.0
    for i, row in enumerate(rows):
        tokens = torch.tensor([list(row.tokens)], device=decoder.device)
        logits = decoder.lm_head(decoder(tokens))[0, :-1]
        if batch.support is not None:
            kept = batch.support.rows(i)
            outside = kept.outside(slice(len(logits)), logits.shape[-1]).to(logits.device)
            logits = logits.masked_fill(outside & batch.mask[i, : len(logits), None].to(logits.device), -torch.inf)
        expected = (logits.double() / T).log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
        at = batch.mask[i, : len(expected)]
        difference = (logp[i, : len(expected)].double() - expected)[at].abs()
        worst = max(worst, float(difference.max()) if len(difference) else 0.0)
    return worst


def completions(probe: Probe) -> Finding:
    """What was written is masked, prompts are those of the tasks, and a stop token that was written is trained on."""
    if not probe.job.algo.online:
        return skip_finding(OFFLINE)
    assert probe.job.roller is not None
    stops, rows = probe.job.roller.params.stop_ids, [r for g in probe.groups for r in g]
    remedy = "this is a bug of the sampler: use hone.rollout.local, or report it"
    for task, group in zip(probe.sampled_tasks, probe.groups, strict=True):
        prompt = render_prompt(probe.job.tokenizer, task.prompt)
        for r in group:
            if list(r.tokens[: len(prompt)]) != prompt or r.task is not task:
                return fail_finding(f"a completion of {task.prompt!r:.40} was sampled from another prompt", remedy)
            if any(r.mask[: len(prompt)]) or not all(r.mask[len(prompt) :]):
                return fail_finding("the mask is not exactly what the policy wrote", remedy)
            if (r.stop is Stop.TOKEN) != (r.tokens[-1] in stops):
                return fail_finding("a completion ended without its stop token, or went on after it", remedy)
    batch = collate(probe.groups, pad_id=probe.job.tokenizer.pad_id)
    if wrong := misplaced(batch, rows):
        return fail_finding(wrong, "this is a bug of Hone: please report it")
    stopped = sum(r.stop is Stop.TOKEN for r in rows)
    lengths = [sum(r.mask) for r in rows]
    if not stopped and (why := _cut_off(probe)):
        limit = probe.job.roller.params.max_tokens
        seen = f"no sampled answer ended by itself within sample.max_tokens ({limit}): {why}"
        return warn_finding(seen, "raise sample.max_tokens")
    ends = f"{stopped} stopped by themselves, their stop token trained on" if stopped else "none stopped by itself"
    return pass_finding(f"{len(rows)} completions of {min(lengths)} to {max(lengths)} tokens, {ends}")


def _cut_off(probe: Probe) -> str:
    """Why sample.max_tokens is too small, "" if nothing shows it.

    The answers of the data are longer, or most completions end if they may have more tokens. Otherwise the limit of
    the check ended them, or the model has not learnt to end.
    """
    job = probe.job
    assert job.roller is not None
    if (limit := job.roller.params.max_tokens) >= probe.extent.tokens:
        return ""
    answers = [len(job.tokenizer.encode(task.answer)) for task in probe.sampled_tasks if task.answer]
    if answers and min(answers) >= limit:  # the stop token is one more
        return f"the answers of the data have {min(answers)} tokens or more"
    if probe.large:
        return ""
    rows = [r for g in probe.sample(probe.sampled_tasks, longest=True) for r in g]
    ended = sum(r.stop is Stop.TOKEN for r in rows)
    return f"{ended} of {len(rows)} end within {probe.extent.tokens}" if 2 * ended >= len(rows) else ""
