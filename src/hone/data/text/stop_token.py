"""Whether a tokenizer's stop token can be one: what its chat template ends a turn with, what families of models use."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from hone.data.text.chat import render
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError

# What ends a turn of a chat, or a text, by the families that use it.
TURN_ENDS = {
    "<|im_end|>": "ChatML: Qwen, SmolLM2, Yi, OLMo",
    "<|eot_id|>": "Llama 3",
    "<|eot|>": "Llama 4",
    "<end_of_turn>": "Gemma",
    "<|end|>": "Phi 3, gpt-oss",
    "<|return|>": "gpt-oss",
    "<|END_OF_TURN_TOKEN|>": "Command R",
    "<|endofturn|>": "HyperCLOVA",
    "[|endofturn|]": "EXAONE",
    "<|end_of_turn|>": "OpenChat, Starling",
    "<|role_end|>": "Ling",
    "<turn|>": "Gemma 4",
}
TEXT_ENDS = {
    "</s>": "Llama 2, Mistral, Mixtral, T5",
    "<|endoftext|>": "GPT-2, Qwen, Phi, SmolLM, OLMo",
    "<|end_of_text|>": "Llama 3, Granite",
    "<eos>": "Gemma, Hone",
    "<\uff5cend\u2581of\u2581sentence\uff5c>": "DeepSeek",
    "<|end_of_sentence|>": "Moonlight",
    "<|EOT|>": "DeepSeek Coder",
    "<|eom_id|>": "Llama 3, before a tool's answer",
    "[EOS]": "Kimi, SentencePiece",
    "[SEP]": "BERT",
    "<|eos|>": "Xverse, Falcon",
    "<|endofprompt|>": "GPT-4",
}
ENDS = {**TURN_ENDS, **TEXT_ENDS}
# Special tokens that begin, fill or mark: none of them ends anything.
NO_ENDS = frozenset({
    "<s>", "<bos>", "<unk>", "<pad>", "<mask>", "<cls>", "[CLS]", "[PAD]", "[UNK]", "[MASK]", "[BOS]", "[INST]",
    "[/INST]", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
    "<|start|>", "<|message|>", "<|channel|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>",
    "</think>", "<|START_OF_TURN_TOKEN|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<|pad|>", "<|unk|>", "<|bos|>",
    "<repo_name>", "<reponame>", "<file_sep>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>",
})  # fmt: skip
MARKED = re.compile(r"(?!<0x..>)[<\[{(|].*[>\]})|]", re.DOTALL)  # how a token looks that is no text


@dataclass(frozen=True, slots=True)
class WrongStop:
    """What is wrong with a stop token, and what puts it right."""

    seen: str
    remedy: str


def wrong_stop(tokenizer: Tokenizer, texts: Sequence[str] = ()) -> WrongStop | None:
    """None where every stop token can end a text. texts: what the data says, which must not be full of it."""
    closing = closing_token(tokenizer)
    for name in dict.fromkeys((tokenizer.eos, *tokenizer.stops)):
        mend = partial(WrongStop, remedy=_remedy(tokenizer, name, closing))
        if _is_text(name):
            inside = sum(_shown(name) in text for text in texts)
            where = f", which {inside} of {len(texts)} texts of the data contain" if inside else ""
            return mend(f"the stop token {name!r} is an ordinary piece of text{where}: answers would end there")
        begins_the_next = name != tokenizer.eos and name == tokenizer.bos  # texts packed with nothing else between them
        if name in NO_ENDS and not begins_the_next:
            return mend(f"the stop token {name} begins, fills or marks a text: no model ends its answers with it")
    return None


def unheard_end(tokenizer: Tokenizer) -> WrongStop | None:
    """The chat template ends the assistant's turn with a special token that stops nothing."""
    closing, names = closing_token(tokenizer), (tokenizer.eos, *tokenizer.stops)
    if not closing or closing in names:
        return None
    seen = f"the chat template ends a turn with {closing}, the tokenizer stops at {' '.join(sorted(set(names)))}"
    return WrongStop(f"{seen}: an answer would go on after its end", _remedy(tokenizer, tokenizer.eos, closing))


def written_end(tokenizer: Tokenizer, texts: Iterable[str]) -> WrongStop | None:
    """Texts that end with the name of a stop token that is not this tokenizer's."""
    found = [text.rstrip() for text in texts if text.strip()]
    for end, family in ENDS.items():
        count = sum(text.endswith(end) for text in found)
        if count and count > len(found) / 2 and end not in (tokenizer.eos, *tokenizer.stops):
            seen = f"{count} of {len(found)} rows end with the text {end} ({family}), the stop token is {tokenizer.eos}"
            known = tokenizer.inner.token_to_id(end) is not None
            other = f", or {_setting(tokenizer, end)}" if known else ""
            return WrongStop(seen, f"remove {end} from the rows: the stop token is added to them{other}")
    return None


def closing_token(tokenizer: Tokenizer) -> str:
    """The special token that the chat template writes right after the assistant's words; "" where there is none."""
    if tokenizer.chat_template is None:
        return ""
    said = "Certainly"
    try:
        text = render(tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}])
    except HoneError:  # the template's own check says what is wrong with it
        return ""
    _, words, rest = text.rpartition(said)
    known = sorted({*tokenizer.special_tokens, *ENDS}, key=len, reverse=True)
    return next((name for name in known if words and rest.lstrip().startswith(name)), "")


def _is_text(name: str) -> bool:
    """A digit, a word, a blank or a stroke: whatever an answer may contain, special or not."""
    return name not in ENDS and not MARKED.fullmatch(_shown(name).strip())


def _shown(name: str) -> str:
    """The token's text: byte-level tokenizers write a blank as G with a dot, SentencePiece as a low line."""
    return name.replace("\u0120", " ").replace("\u010a", "\n").replace("\u2581", " ")


def _remedy(tokenizer: Tokenizer, name: str, closing: str) -> str:
    """Which file says it, and what it should say."""
    fits = [closing] if closing and not _is_text(closing) and closing not in NO_ENDS else []
    fits += [end for end in ENDS if tokenizer.inner.token_to_id(end) is not None]
    if name != tokenizer.eos:
        return (
            f"take {name!r} out of eos_token_id in generation_config.json, or of stop_tokens in tokenizer_config.json"
        )
    return _setting(tokenizer, fits[0]) if fits else "name the token that the model was trained to stop at as eos_token"


def _setting(tokenizer: Tokenizer, end: str) -> str:
    where = f"{tokenizer.source}/" if tokenizer.source else ""
    return f'set "eos_token" in {where}tokenizer_config.json to "{end}" ({ENDS.get(end, "as the chat template does")})'
