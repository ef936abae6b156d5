"""The decoder against Hugging Face's Llama, and at the end of its context."""

import pytest
import torch
from each import each
from transformers import LlamaConfig, LlamaForCausalLM

from hone.errors import HoneError
from hone.model.config import DecoderConfig, Rope
from hone.model.decoder import Decoder, rope_tables

torch.set_num_threads(1)


@each("tie", [True, False])
@each("kv_heads", [1, 2, 4])
def test_logits_equal_those_of_hugging_face(tie, kv_heads, make_decoder):
    shape = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 32}
    shape |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": tie}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope)).eval()
    ours = make_decoder(**shape, rope=Rope(theta=500.0)).float()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 23, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.lm_head(ours(tokens)), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.5  # flat logits would agree whatever the attention did


def test_parameter_names_are_those_of_hugging_face(make_decoder):
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    theirs = LlamaForCausalLM(config)
    assert set(make_decoder(tie_word_embeddings=False).state_dict()) == set(theirs.state_dict())


def test_a_token_never_sees_a_later_one(make_decoder):
    decoder = make_decoder()
    tokens = torch.randint(0, 23, (1, 8))
    other = tokens.clone()
    other[0, 5:] = (tokens[0, 5:] + 1) % 23
    a, b = decoder(tokens), decoder(other)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert (a[:, 5:] - b[:, 5:]).abs().min(-1).values.max() > 0


def test_only_relative_position_matters_to_attention(make_decoder):
    decoder = make_decoder()
    tokens, here = torch.randint(0, 23, (1, 6)), torch.arange(6)[None]
    # the tables are float32, so angles differ in the seventh place
    torch.testing.assert_close(decoder(tokens, positions=here), decoder(tokens, positions=here + 9), rtol=0, atol=1e-5)


def test_rotation_by_hand():
    # head of 4: frequencies 1 and 100^(-2/4) = 0.1, the pair of each repeated half a head later
    config = DecoderConfig(
        vocab_size=2, hidden_size=4, num_attention_heads=1, num_key_value_heads=1, rope=Rope(theta=100.0)
    )
    cos, sin = rope_tables(config, 4)
    angle = torch.tensor([3.0, 0.3, 3.0, 0.3])
    torch.testing.assert_close(cos[3], angle.cos())
    torch.testing.assert_close(sin[3], angle.sin())


def test_tied_head_is_the_embedding(make_decoder):
    tied, untied = make_decoder(), make_decoder(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_a_sequence_beyond_the_context_is_refused(make_decoder):
    decoder = make_decoder(max_position_embeddings=8)
    with pytest.raises(HoneError, match="9 tokens, the model's context is 8: shorten it"):
        decoder(torch.zeros(1, 9).long())


@pytest.mark.parametrize("mask", [None, torch.eye(9, dtype=torch.bool)])
def test_checkpointed_layers_give_equal_gradients_and_keep_less(mask, make_decoder):
    tokens = torch.randint(0, 23, (2, 9))
    grads, kept = [], []
    for on in (False, True):
        decoder, sizes = make_decoder(), []

        def note(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = decoder(tokens, mask=mask, checkpoint_layers=on)
        kept.append(sum(sizes))
        out.square().sum().backward()
        grads.append([p.grad for p in decoder.parameters()])
    assert kept[1] < kept[0] / 4
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 5}, {"num_key_value_heads": 3}])
def test_heads_that_do_not_divide_are_refused(wrong):
    with pytest.raises(ValueError, match="heads"):
        DecoderConfig(vocab_size=4, **wrong)


def test_residual_outputs_start_smaller_with_depth():
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(vocab_size=4, hidden_size=64, num_hidden_layers=8))
    attention = decoder.model.layers[0].self_attn
    ratio = attention.o_proj.weight.detach().std() / attention.q_proj.weight.detach().std()
    assert abs(float(ratio) - 0.25) < 0.02  # 1 / sqrt(2 * 8)
