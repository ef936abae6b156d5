"""Checks of the run as a whole: what a step is, whether it fits disk and memory, and whether it can be resumed."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.check.learning import trained
from hone.check.perturb import perturb_weights, restore_after
from hone.check.probe import Probe
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.checkpoint.state import restore
from hone.config.recipe import plan as in_words
from hone.data.text.tokenizer import Tokenizer
from hone.launch.job import parts, save
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.layout import activation_numbers as kept_by_layer
from hone.model.layout import exceeds_memory
from hone.model.lora import plain_state
from hone.model.scorer import Scorer
from hone.model.vocab.token_stats import slices
from hone.storage import files as checkpoint
from hone.storage.files import optimizer_tensors
from hone.train.learner import rows_per_pass
from hone.train.update import update

MEMORY = "/proc/meminfo"
PLAIN = 2  # plain layers keep about twice what a GPU's do; a CPU's in C++ less, but not every CPU has them
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")


def step(probe: Probe) -> Finding:
    """What one step does, in rows, and how often the run meets each row of the data."""
    recipe, rows = probe.job.recipe, len(probe.job.source)
    if recipe.train.tokens:  # how many rows fit into a step is known once they are read
        return pass_finding(f"{in_words(recipe)}; {recipe.train.steps} steps over {rows} rows")
    epochs = recipe.train.steps * recipe.train.prompts / rows
    seen = f"{in_words(recipe)}; {recipe.train.steps} steps meet each of {rows} rows {epochs:.2g} times"
    if recipe.train.prompts > rows:
        return warn_finding(f"{seen}; a step takes more than there are", "lower train.prompts, or add data")
    return pass_finding(seen)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _size(number: float) -> str:
    """
    >>> _size(1536), _size(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _checkpoint_size(probe: Probe) -> int:
    """The model, two moments, and what is trained where the model does not hold it as it is."""
    weights = _bytes(trained(probe))
    apart = probe.job.recipe.lora.used or (probe.job.learner.masters is not None and probe.job.learner.masters.half)
    return _bytes(probe.job.policy.parameters()) + (3 if apart else 2) * weights


def disk(probe: Probe) -> Finding:
    """Room for the checkpoints that are kept, one more while it is written, and the model of the start."""
    recipe = probe.job.recipe
    every = 1 if recipe.save.minutes else recipe.save.every  # by the clock, any step may be saved
    saves = max(1, -(-recipe.train.steps // every)) if every else 1
    spared = bool(recipe.save.best) + (recipe.save.milestones and recipe.train.steps // recipe.save.milestones)
    most = min(recipe.save.keep + spared + 1, saves)  # the oldest goes when the new one is whole
    each = _checkpoint_size(probe)
    need = most * each + _bytes(probe.job.policy.decoder.parameters())
    place = next(path for path in (recipe.run_dir.absolute(), *recipe.run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    seen = f"{most} x {_size(each)} for checkpoints and the start need {_size(need)}, {_size(free)} are free"
    if free < need:
        return fail_finding(seen, "free some space, lower save.keep, or set out= to another disk")
    if free < 2 * need:
        return warn_finding(seen, "free some space: the logs and another run need some too")
    return pass_finding(seen)


def memory(probe: Probe) -> Finding:
    """What training adds to the weights that are loaded: gradients, moments, and about what a backward pass keeps."""
    learner, tokens = probe.job.learner, _tokens_at_once(probe)
    free = _free_memory(learner.device)
    if free is None:
        return skip_finding("this system does not say how much memory is free")
    again, certain = _recomputed(probe, tokens), _optimised(probe)
    estimate = _backward(probe, tokens, again=again)
    dtype = str(probe.job.policy.decoder.lm_head.weight.dtype).removeprefix("torch.")
    keeps = "each layer's input" if again else "all that layers compute"
    seen = (
        f"gradients and moments {_size(certain)}; an estimate of what a backward pass over {tokens} tokens keeps in "
        f"{dtype}, {keeps} and logits: {_size(estimate)}; {_size(free)} are free"
    )
    if certain > free:
        return fail_finding(seen, "train adapters (lora.rank=8), or a smaller model")
    if certain + estimate > free:
        name, most = ("tokens", learner.micro_tokens) if learner.micro_tokens else ("rows", learner.micro_rows)
        other = "" if again else ", or set train.recompute=always"
        return warn_finding(seen, f"lower train.micro_{name} ({most}){other}: no number changes")
    return pass_finding(seen)


def _optimised(probe: Probe) -> int:
    """Bytes of gradients and moments where the model computes: not those that optim.offload keeps elsewhere."""
    learner = probe.job.learner
    stepped = [p for p in learner.trained().values() if p.device == learner.device]
    return _bytes(stepped) + 2 * sum(p.numel() for p in stepped) * probe.job.recipe.optim.bits // 8


def _tokens_at_once(probe: Probe) -> int:
    """The most tokens of a micro-batch, were all its rows as long as the longest that is known or may be sampled."""
    recipe, learner, unit = probe.job.recipe, probe.job.learner, probe.job.algo.unit
    context = probe.job.policy.decoder.config.max_position_embeddings
    sampled = max(map(len, probe.prompts), default=0) + recipe.sample.limit(context)
    longest = min(context, sampled) if recipe.online else max(len(r.tokens) for r in probe.rows)
    rows = rows_per_pass(longest, rows=learner.micro_rows, tokens=learner.micro_tokens, device=learner.device)
    update = recipe.train.prompts * (recipe.sample.group if recipe.online else unit) / recipe.train.minibatches
    return longest * max(unit, rows if recipe.train.tokens else min(rows, math.ceil(update)))


def _recomputed(probe: Probe, tokens: int) -> bool:
    """Whether the learner will compute layers again instead of keeping what they computed."""
    again, decoder = probe.job.policy.checkpoint_layers, probe.job.policy.decoder
    return (decoder.takes_rows and exceeds_memory(decoder, tokens)) if again is None else again


def _backward(probe: Probe, tokens: int, *, again: bool) -> int:
    """Bytes, about: what the policy's layers keep until their gradient, recomputed ones one at a time, and logits."""
    policy = probe.job.policy
    config, head = policy.decoder.config, policy.decoder.lm_head.weight
    layers, each = config.num_hidden_layers, kept_by_layer(config) * (1 if head.is_cuda else PLAIN)
    numbers = tokens * (layers * config.hidden_size + each if again else layers * each)
    if not isinstance(policy, Scorer):
        chunk = slices(tokens, None if policy.checkpoint_layers is False else "fit", head, only_logits=True)[0]
        numbers += (chunk.stop - chunk.start) * config.vocab_size
    return numbers * head.element_size()


def _free_memory(device: torch.device) -> int | None:
    """The free memory of the GPU. On a CPU, that of the system or of the container, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path(MEMORY).read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    if all(os.path.exists(path) for path in LIMITS):
        most, used = (Path(path).read_text().strip() for path in LIMITS)
        free = min(free, int(most) - int(used)) if most.isdigit() and used.isdigit() else free
    return free


def saved(probe: Probe) -> Finding:
    """A checkpoint written after one update, read back bit for bit, resumed from, and loaded as a model."""
    layers = probe.job.policy.decoder.config.num_hidden_layers
    probe = probe.small
    each, folder = _checkpoint_size(probe), tempfile.gettempdir()
    if shutil.disk_usage(folder).free < 2 * each:
        return warn_finding(
            f"no room for a trial checkpoint of {_size(each)} in {folder}", "set TMPDIR to a larger disk"
        )
    job, parameters = probe.job, trained(probe)
    with tempfile.TemporaryDirectory(prefix="hone-check-") as place, restore_after(job.learner, parameters):
        update(job.learner, probe.batch, job.algo)
        where = save(job, Path(place))
        files = sum(p.stat().st_size for p in where.rglob("*") if p.is_file())
        wrong = [*_unequal(probe, where), *_not_restored(probe, where)]
    if wrong:
        return fail_finding(f"not as it was saved: {', '.join(wrong[:3])}", "this is a bug of Hone: please report it")
    few = job.policy.decoder.config.num_hidden_layers
    part = f" (tried on {few} of {layers} layers)" if few < layers else ""
    return pass_finding(f"{_size(files)} written, read back equal, resumed from, and loaded as a model{part}")


def _unequal(probe: Probe, where: Path) -> list[str]:
    """What the model in the files is not as in the run."""
    job = probe.job
    checkpoint.verify(where)
    model: nn.Module = load_scorer(where) if isinstance(job.policy, Scorer) else load_decoder(where)
    decoder = model.decoder if isinstance(model, Scorer) else model
    head = not isinstance(model, Scorer)
    wrong = _differences(plain_state(job.policy.decoder), decoder.state_dict(), head=head)
    if Tokenizer.load(where).stop_ids != job.tokenizer.stop_ids:
        wrong.append("the stop tokens")
    return wrong


def _differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, head: bool = True) -> list[str]:
    """The names on one side only, or whose bits differ; head: compare the vocabulary's too, which a scorer lacks."""
    names = {n for n in ours.keys() | theirs.keys() if head or not n.startswith("lm_head")}
    return sorted(n for n in names if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n]))


def _not_restored(probe: Probe, where: Path) -> list[str]:
    """What `resume` would not bring back: weights, moments, counters and cursors are all moved before it."""
    job, parameters = probe.job, trained(probe)
    before, weights = _state(probe), [p.detach().clone() for p in parameters]
    with perturb_weights(parameters):
        job.source.take(1)
        job.learner.optimizer.state.clear()
        job.learner.updates, job.learner.version = -1, -1
        job.learner.control = dict.fromkeys(job.learner.control, math.nan)
        restore(where, job.policy, job.learner, parts=parts(job))
        wrong = [f"parameter {i}" for i, p in enumerate(parameters) if not torch.equal(p, weights[i])]
        after = _state(probe)
    moments = _differences(before.pop("moments"), after.pop("moments"))
    return wrong + [f"moment {name}" for name in moments] + [name for name in before if before[name] != after[name]]


def _state(probe: Probe) -> dict[str, Any]:
    """All but the weights, as a checkpoint names it."""
    job, learner = probe.job, probe.job.learner
    moments = {name: x.clone() for name, x in optimizer_tensors(learner.optimizer).items()}
    counters = {"updates": learner.updates, "version": learner.version, "control": dict(learner.control)}
    return {"moments": moments, **counters, **{name: dict(part.state()) for name, part in parts(job).items()}}
