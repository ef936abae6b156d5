"""Every row of the specification's table of checked numbers has a test: named here where it exists, written here where
it did not."""

import ast
from pathlib import Path

import pytest
import torch
from each import each

from hone.algo.terms import k3
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.train import optim

ROOT = Path(__file__).parents[2]
SPEC = ROOT.parent / "shared" / "spec.md"
HERE = "parity/test_checked_numbers.py"

ROWS = {  # how the row begins: the tests that hold its numbers
    "PPO clip, eps 0.2, A +0.5": ["algo/test_terms.py::test_the_clip_table_of_the_specification"],
    "PPO clip, eps 0.2, rho 0.5 / 1 / 1.5": ["algo/test_terms.py::test_the_clip_table_of_the_specification"],
    "PPO clip, rho 0.4, A -0.8": [
        "algo/test_terms.py::test_the_clip_table_of_the_specification",
        "algo/test_terms.py::test_the_clip_cuts_the_gradient_and_says_so",
    ],
    "(z-scores below with eps 0)": [
        "algo/test_credit.py::test_zscores_of_the_specification",
        f"{HERE}::test_means_and_population_stds",
    ],
    "z-score of .2 .8 .5 .1": [
        "algo/test_credit.py::test_zscores_of_the_specification",
        f"{HERE}::test_means_and_population_stds",
    ],
    "k1 of d": ["algo/test_terms.py::test_the_estimators_of_the_specification"],
    "k3 of the same": ["algo/test_terms.py::test_the_estimators_of_the_specification"],
    "k3 direction": [
        f"{HERE}::test_k3_has_the_reference_on_top",
        "oracle/test_exact_kl.py::test_on_policy_k1_k3_and_exact_have_the_value_of_the_kl_and_k2_is_off",
    ],
    "Bradley-Terry at margin 0": ["algo/test_prefer.py::test_bradley_terry"],
    "LoRA d 4096, r 16": ["model/test_lora.py::test_the_checked_numbers_of_the_specification"],
    "Adam moments, 70B, fp32": [f"{HERE}::test_moments_of_adam", f"{HERE}::test_a_decoder_of_that_shape"],
    "reward-to-go": ["algo/test_credit.py::test_reward_to_go_is_the_discounted_sum_from_t_on"],
    "surrogate of TRPO": ["oracle/test_exact_bounds.py::test_the_return_is_never_below_trpos_bound"],
}


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@each("row", ROWS)
def test_the_row_has_its_tests(row):
    for test in ROWS[row]:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{test} is gone: name the test that holds the numbers of {row!r} now"


@pytest.mark.skipif(not SPEC.is_file(), reason="the specification is not beside this clone")
def test_no_row_is_left_out():
    section = SPEC.read_text(encoding="utf-8").split("## 12.")[1]
    lines = [line[2:] for line in section.splitlines() if line.startswith("| ") and not line.startswith("| example")]
    assert len(lines) == len(ROWS)
    for line in lines:
        assert [row for row in ROWS if line.startswith(row)], line


@pytest.mark.parametrize(
    ("rewards", "mean", "std"),
    [((0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.5, 0.4), 0.55, 0.22913), ((0.2, 0.8, 0.5, 0.1), 0.4, 0.27386)],
)
def test_means_and_population_stds(rewards, mean, std):
    x = torch.tensor(rewards, dtype=torch.float64)
    assert x.mean().item() == pytest.approx(mean, abs=1e-12)
    assert x.std(correction=0).item() == pytest.approx(std, abs=5e-6)


def test_k3_has_the_reference_on_top():
    pi, ref = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)
    d = pi.log() - ref.log()
    kl = (pi * d).sum().item()
    assert (pi * k3(d)).sum().item() == pytest.approx(kl, abs=1e-12)
    # r = pi/ref instead: its mean on samples of pi is chi-squared less the KL, sum pi^2/ref - 1 - KL
    upside_down = (pi * k3(-d)).sum().item()
    assert upside_down == pytest.approx((pi.square() / ref).sum().item() - 1 - kl, abs=1e-12)
    assert abs(upside_down - kl) > 0.3


def bytes_of_adam() -> float:
    """Bytes of optimiser state a trained number, from AdamW's own state after a step."""
    p = torch.nn.Parameter(torch.randn(100))
    optimizer = optim.adamw([p], [], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state[p]
    return sum(x.numel() * x.element_size() for x in state.values() if torch.is_tensor(x) and x.ndim) / p.numel()


def test_moments_of_adam():
    assert bytes_of_adam() == 8
    assert 70e9 * bytes_of_adam() == 560e9
    trained = 80 * 6 * 16 * (8192 + 8192)  # r (d_out + d_in); the row above has its test on the layer itself
    assert trained == 125_829_120
    assert trained * bytes_of_adam() / 1e9 == pytest.approx(1.0066, abs=5e-5)


def test_a_decoder_of_that_shape():
    config = DecoderConfig(
        vocab_size=32_000, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        numbers = sum(p.numel() for p in Decoder(config).parameters())
    assert numbers == 68_976_648_192  # what is called 70B
    assert numbers * bytes_of_adam() / 1e9 == pytest.approx(551.8, abs=0.05)
