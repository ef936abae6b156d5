"""A language model to work with: load it, sample from it, score completions, save it. What `hone.load` gives."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch

from hone.data.collate import collate
from hone.data.text.chat import encode_completion, render_prompts
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams, check_whole
from hone.errors import HoneError
from hone.launch.build import load_model
from hone.model.decoder import Decoder
from hone.model.formats.cache import folder_of, resolve
from hone.model.formats.peft import is_adapter, load_peft
from hone.model.formats.save import save_model
from hone.model.lora import adapted_layers, use_adapter
from hone.model.policy import Policy
from hone.rollout.local import LocalSampler, evaluating
from hone.rollout.supply import Roller
from hone.types import Message, Rollout, Stop, Task

Prompt = str | Sequence[Message]  # plain text, or the messages of a chat
AdapterRef = str | Path  # the name of a loaded adapter, or a PEFT folder
PRECISIONS = ("auto", "float32", "bfloat16")
ROWS_AT_ONCE = 32  # rows of a forward pass, so that memory does not grow with the number of completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of a prompt."""

    text: str  # without the stop token or stop string
    tokens: tuple[int, ...]  # as the model wrote them, the stop token included
    logprobs: tuple[float, ...]  # of each token, under the distribution that it was drawn from
    stop: Stop  # why it ended: "token", "string" or "length"


Completion = str | Sample | Sequence[int]  # text, what `sample` returned, or token ids


class Model:
    """A language model with its tokenizer, which samples, scores and saves. `load` gives one.

    ```python
    model = hone.load("smollm2-135m")
    ((answer,),) = model.sample(["The capital of France is"], max_tokens=8)
    print(answer.text, model.logprobs(["The capital of France is"], [answer]))
    ```
    """

    decoder: Decoder  # the network: a torch module
    tokenizer: Tokenizer  # its encode and decode turn text into token ids and back
    folder: Path  # what it was loaded from
    sampler: LocalSampler  # what draws the completions of `sample`
    lock: AbstractContextManager[object]  # threads take turns: they share the sampler and the adapter in use

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, folder: Path) -> None:
        self.decoder, self.tokenizer, self.folder = decoder, tokenizer, folder
        self.sampler = LocalSampler(decoder, decode=tokenizer.decode, switch=partial(use_adapter, decoder))
        self._adapters = dict[str, tuple[Path, int]]()  # by name: the folder, and when its weights were written
        self.lock = RLock()

    def __repr__(self) -> str:
        weights = list(self.decoder.parameters())
        size, dtype = sum(x.numel() for x in weights) / 1e6, str(weights[0].dtype).removeprefix("torch.")
        return f"hone.Model({str(self.folder)!r}: {size:.1f}M parameters, {dtype}, on {self.device})"

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return self.decoder.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.decoder.device

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return tuple(self._adapters)

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        adapter: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[list[Sample]]:
        """n completions of each prompt. The same arguments give the same completions.

        prompts: texts, or lists of chat messages, which the chat template renders.
        temperature: 0 takes the most probable token each time. seed: of the random numbers.
        adapter: a PEFT folder or a loaded adapter, for all prompts or one for each; None is the model itself.
        """
        tasks = [Task(prompt=prompt) for prompt in _listed(prompts)]
        params = SampleParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=self.tokenizer.stop_ids,
            seed=seed,
        )
        check_whole("n", n)
        tokens = render_prompts(self.tokenizer, [(task.prompt, None) for task in tasks])
        with self.lock:
            groups = self.sampler.sample(tokens, n=n, params=params, adapter=self._names(adapter, len(tasks)))
        roller = Roller(self.sampler, self.tokenizer, params, group=n)
        return [[_sample(rollout) for rollout in group] for group in roller.add_texts(groups, tasks)]

    def logprobs(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion] | Sequence[Sequence[Completion]],
        *,
        temperature: float = 1.0,
        adapter: AdapterRef | None = None,
    ) -> list[list[float]] | list[list[list[float]]]:
        """The log-prob of each token of the completions, in their own order and nesting.

        completions: one for each prompt, or a list for each prompt, as `sample` returns them. A text is scored with
        the stop token that ends it; a sample or a list of token ids is scored as it is.
        """
        prompts, completions = _listed(prompts), _listed_completions(completions)
        if len(prompts) != len(completions):
            raise HoneError(f"{len(prompts)} prompts and {len(completions)} completions: give one or a list for each")
        several = [_is_several(completion) for completion in completions]
        lists = [c if many else [c] for c, many in zip(completions, several, strict=True)]
        groups = [
            [self._row(prompt, completion) for completion in cast(Sequence[Completion], group)]
            for prompt, group in zip(prompts, lists, strict=True)
        ]
        rows = [row for group in groups for row in group]
        with self.lock, self._using(adapter), evaluating(self.decoder):
            found = iter([x for part in _parts(rows) for x in self._score(part, temperature)])
        nested = [[next(found) for _ in group] for group in groups]
        return [group if many else group[0] for group, many in zip(nested, several, strict=True)]  # pyright: ignore

    def load_adapter(self, folder: str | Path, *, name: str = "") -> str:
        """Load a PEFT adapter beside the weights; returns the name to give as `adapter`.

        folder: of the adapter, or of a run that trained one. The model itself stays as it is.
        """
        with self.lock:
            return self._load_adapter(folder, name)

    def _load_adapter(self, folder: str | Path, name: str) -> str:
        found = resolve(folder)
        found = found / "adapter" if not is_adapter(found) and is_adapter(found / "adapter") else found
        if not is_adapter(found):
            known = f", or one of {', '.join(self._adapters)}" if self._adapters else ""
            raise HoneError(f"{folder} is no adapter: give the folder of a PEFT adapter{known}")
        written = max(file.stat().st_mtime_ns for file in found.iterdir())
        about = found.resolve(), written
        for known, before in self._adapters.items():
            if before == about and name in ("", known):
                return known
        name = name or f"adapter{len(self._adapters)}"
        load_peft(self.decoder, found, name=name, train=False)
        for _, layer in adapted_layers(self.decoder):
            layer.enabled = False  # without adapter= the model itself answers
        self._adapters[name] = about
        return name

    def save(self, folder: str | Path, *, adapter: AdapterRef | None = None) -> Path:
        """Write weights and tokenizer in Hugging Face's format into a new folder; with an adapter, merged into them."""
        target = Path(os.path.expanduser(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise HoneError(f"{target} is not empty: save into a new folder")
        try:
            with self.lock, self._using(adapter):
                save_model(self.decoder, self.tokenizer, target)
        except OSError as error:
            raise HoneError(f"{target} cannot be written ({error.strerror}): save into another folder") from error
        return target

    def _names(
        self, adapter: AdapterRef | Sequence[AdapterRef | None] | None, count: int
    ) -> str | list[str | None] | None:
        """The names by which the sampler knows the adapters."""
        if adapter is None or isinstance(adapter, str | Path):
            return None if adapter is None else self._name(adapter)
        if len(adapter) != count:
            raise HoneError(f"{len(adapter)} adapters for {count} prompts: give one, or one for each prompt")
        return [None if one is None else self._name(one) for one in adapter]

    def _name(self, adapter: AdapterRef) -> str:
        return str(adapter) if str(adapter) in self._adapters else self.load_adapter(adapter)

    def _using(self, adapter: AdapterRef | None) -> AbstractContextManager[None]:
        return nullcontext() if adapter is None else use_adapter(self.decoder, self._name(adapter))

    def _row(self, prompt: Prompt, completion: Completion) -> Rollout:
        """Prompt and completion as one row. Its mask is True at the tokens that the model writes."""
        if isinstance(completion, str):
            tokens, mask = encode_completion(self.tokenizer, prompt, completion)
        else:
            (head,) = render_prompts(self.tokenizer, [(prompt, None)])
            tail = [int(token) for token in (completion.tokens if isinstance(completion, Sample) else completion)]
            tokens, mask = [*head, *tail], [False] * len(head) + [True] * len(tail)
        vocab = self.decoder.config.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise HoneError(f"a completion has token {wrong[0]}, outside the vocabulary of {vocab}: give token ids")
        if mask[:1] == [True]:
            raise HoneError("a prompt has no token, so nothing predicts the first token of its completion: give a text")
        if len(tokens) > self.context:
            raise HoneError(
                f"a prompt with its completion has {len(tokens)} tokens, the model's context is {self.context}: "
                "shorten one of them"
            )
        return Rollout(tokens=tokens, mask=mask)

    @torch.no_grad()
    def _score(self, rows: list[Rollout], temperature: float) -> list[list[float]]:
        batch = collate([[row] for row in rows]).to(self.device)
        logp = Policy(self.decoder, temperature=temperature)(batch, frozenset({"logp"})).logp
        return [x[mask].tolist() for x, mask in zip(logp.float(), batch.mask, strict=True)]


def load(model: str | Path, *, device: str = "auto", dtype: str = "auto") -> Model:
    """A model with its tokenizer.

    model: a fetched model's name, a model folder in Hugging Face's format, or a run's folder: its newest checkpoint.
    device: auto, cpu, cuda or cuda:N. dtype: auto, float32 or bfloat16; auto is bfloat16 on a GPU.
    """
    if not str(model):
        raise HoneError("model is empty: give a fetched model's name, or a folder")
    folder = folder_of(model)
    if is_adapter(folder):
        raise HoneError(f"{folder} is an adapter: load its base model, and give the adapter to sample(adapter=...)")
    if dtype not in PRECISIONS:
        raise HoneError(f"dtype is {dtype!r}: use one of {', '.join(PRECISIONS)}")
    tokenizer, decoder = load_model(folder, device=device, precision=dtype)
    return Model(decoder.eval(), tokenizer, folder=folder)


def _listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        raise HoneError("prompts is one prompt: give a list of prompts, as in [prompt]")
    found = list(prompts)
    if found and isinstance(found[0], Mapping):
        raise HoneError("prompts is one prompt: give a list of prompts, as in [prompt]")
    for number, prompt in enumerate(found):
        messages = isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
        if not isinstance(prompt, str) and not messages:
            raise HoneError(f"prompt {number} is {prompt!r:.60}: give text, or a list of chat messages")
    return found


def _listed_completions(completions: Iterable[Any]) -> list[Any]:
    """The completions as lists; token ids may come as arrays and tensors."""
    if isinstance(completions, str | Sample | Mapping):
        raise HoneError("completions is one completion: give a list with one for each prompt")
    return [c.tolist() if hasattr(c, "tolist") else c for c in completions]


def _is_several(completion: Completion | Sequence[Completion]) -> bool:
    """Whether it is a list of completions, and not one completion."""
    if isinstance(completion, str | Sample):
        return False
    if not isinstance(completion, Sequence):
        raise HoneError(f"a completion is {completion!r:.60}: give text, what `sample` returned, or token ids")
    return not all(isinstance(x, Integral) for x in completion)


def _parts(rows: list[Rollout]) -> Iterator[list[Rollout]]:
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[first : first + ROWS_AT_ONCE]


def _sample(rollout: Rollout) -> Sample:
    written, mask = rollout.written(), rollout.mask
    logp = [x for x, own in zip(rollout.gen_logp, mask, strict=True) if own]
    return Sample(text=rollout.text, tokens=tuple(written), logprobs=tuple(logp), stop=rollout.stop)
