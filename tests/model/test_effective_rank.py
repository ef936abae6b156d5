"""Effective ranks: known singular values, a product of thin matrices, and the whole update of a model."""

import pytest
import torch
from each import each

from hone.model.inspect import difference, effective_rank_of, energy_rank, low_rank_values, singular_values, update_of
from hone.model.lora import adapted_layers, add_lora, lora_parameters

torch.set_num_threads(1)


def with_values(*sigma, rows=7, columns=5, seed=0):
    """A matrix with these singular values, in random directions."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q for n in (rows, columns))
    k = len(sigma)
    return u[:, :k] @ torch.diag(torch.tensor(sigma, dtype=torch.float64)) @ v[:, :k].T


def adapted(make_decoder, *, moved):
    decoder = make_decoder()
    add_lora(decoder, rank=3, alpha=6.0, targets=("all-linear",))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64) * (0.2 if moved else 0.0))
    return decoder


def test_effective_rank_by_hand():
    assert effective_rank_of(torch.tensor([3.0, 1.0])) == pytest.approx(1.6)  # 4^2 / (9 + 1)
    assert effective_rank_of(singular_values(with_values(3.0, 1.0))) == pytest.approx(1.6)
    assert effective_rank_of(singular_values(torch.eye(5))) == pytest.approx(5.0)
    assert effective_rank_of(singular_values(torch.outer(torch.randn(4), torch.randn(6)))) == pytest.approx(1.0)
    assert effective_rank_of(singular_values(torch.zeros(3, 2))) == 0.0


@each(
    ("sigma", "rank"),
    [
        ([3.0, 1.0], 1),  # 9 of 10 is 0.9 exactly
        ([3.0, 1.01], 2),
        ([1.0] * 10, 9),
        ([1.0, 3.0], 1),  # in any order
        ([2.0, 1.0, 1.0], 3),  # 4, 5, 6 of 6
        ([0.0, 0.0], 0),
        ([], 0),
    ],
)
def test_the_rank_that_holds_nine_tenths_of_the_energy(sigma, rank):
    assert energy_rank(torch.tensor(sigma, dtype=torch.float64)) == rank


def test_a_difference_by_hand():
    # W0 has norm 10; the change has singular values 3, 2, 1: squares 9, 4, 1 of 14, and 13 / 14 is above 0.9
    base = with_values(6.0, 8.0, seed=1)
    found = difference(base + with_values(3.0, 2.0, 1.0), base)
    assert found.norm == pytest.approx(14**0.5)
    assert found.relative == pytest.approx(14**0.5 / 10)
    assert found.effective_rank == pytest.approx(36 / 14)
    assert found.energy_rank == 2


def test_no_change_a_vector_and_a_zero_base():
    same = difference(torch.ones(3, 2), torch.ones(3, 2))
    assert (same.norm, same.relative, same.effective_rank, same.energy_rank) == (0.0, 0.0, 0.0, 0)
    vector = difference(torch.tensor([3.0, 4.0]), torch.zeros(2))
    assert (vector.norm, vector.relative, vector.effective_rank, vector.energy_rank) == (5.0, None, None, None)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (2, 9), (9, 2), (1, 1)])
def test_thin_matrices_give_the_values_of_their_product(shape):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, shape[1]), (shape[0], 3)))
    few, all_of_them = low_rank_values(a, b), torch.linalg.svdvals(b @ a)
    k = min(len(few), len(all_of_them))
    torch.testing.assert_close(few[:k], all_of_them[:k])
    assert few[k:].sum() < 1e-9
    assert all_of_them[k:].sum() < 1e-9


def test_an_adapter_and_the_full_matrices_have_the_same_ranks(make_decoder):
    layers = [layer for _, layer in adapted_layers(adapted(make_decoder, moved=True))]
    assert len(layers) == 14
    for layer in layers:
        whole = difference(layer.merged(), layer.base.weight)
        thin = update_of(
            layer.adapter.scale * low_rank_values(layer.adapter.lora_A, layer.adapter.lora_B),
            base=float(layer.base.weight.norm()),
        )
        assert whole.norm == pytest.approx(thin.norm)
        assert whole.relative == pytest.approx(thin.relative)
        assert whole.energy_rank == thin.energy_rank <= 3
        assert whole.effective_rank == pytest.approx(thin.effective_rank, rel=1e-6)
        assert thin.effective_rank == pytest.approx(effective_rank_of(singular_values(layer.adapter.update())))
        assert 1 < thin.effective_rank <= 3


def test_an_adapter_that_has_not_moved_has_no_rank(make_decoder):
    for _, layer in adapted_layers(adapted(make_decoder, moved=False)):
        still = update_of(low_rank_values(layer.adapter.lora_A, layer.adapter.lora_B), base=1.0)
        assert (still.norm, still.effective_rank, still.energy_rank) == (0.0, 0.0, 0)
