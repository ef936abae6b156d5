"""What the sampler writes comes from the weights as they are trained: with the adapter, and with it as it is now."""

from copy import deepcopy

import pytest
import torch

from hone.engine.params import SampleParams
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.lora import add_lora, lora_parameters
from hone.rollout.local import LocalSampler

torch.set_num_threads(1)
VOCAB = 11


def adapted() -> Decoder:
    """A LoRA whose update is as large as the base weights."""
    torch.manual_seed(0)
    decoder = Decoder(
        DecoderConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, initializer_range=0.3)
    ).double()
    add_lora(decoder, rank=2, alpha=4.0, targets=("all-linear",))
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.copy_(torch.randn_like(p))
    return decoder


@torch.no_grad()
def base_of(decoder: Decoder) -> Decoder:
    """A copy whose adapter adds nothing."""
    copy = deepcopy(decoder)
    for p in lora_parameters(copy):
        p.zero_()
    return copy


@torch.no_grad()
def logp_of(decoder: Decoder, tokens: list[int]) -> list[float]:
    x = torch.tensor([tokens])
    logp = decoder.lm_head(decoder(x[:, :-1])).log_softmax(-1)
    return logp.gather(-1, x[:, 1:, None]).flatten().tolist()


def test_the_sampler_writes_with_the_adapter_on() -> None:
    decoder = adapted()
    params = SampleParams(max_tokens=6, stop_ids=frozenset())
    for _ in range(2):  # also after the adapter has moved
        ((rollout,),) = LocalSampler(decoder).sample([[1, 2, 3]], n=1, params=params)
        written, tokens = rollout.gen_logp[3:], list(rollout.tokens)
        assert written == pytest.approx(logp_of(decoder, tokens)[2:], abs=1e-9)
        assert written != pytest.approx(logp_of(base_of(decoder), tokens)[2:], abs=1e-2), "the adapter matters"
        with torch.no_grad():
            for p in lora_parameters(decoder):
                p.mul_(-1.5)
