"""Compiled for processors without AVX-512, the C++ files keep what they promise: the same bits in any company."""

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch
from each import each
from test_native import same_in_any_company, same_in_parts
from test_native_layers import same_as_plain_and_recomputed
from test_native_stack import same_as_plain
from test_plain_invariant import build, check_invariant, requests
from test_same_bits import Shape, same_as_sampled

from hone.model.backends.native import stack
from hone.model.kernels.cpp import library as building
from hone.model.kernels.cpp.library import library

torch.set_num_threads(1)
NARROW, PLAIN = ("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2")
LESS = [NARROW, pytest.param(PLAIN, marks=pytest.mark.slow), pytest.param((*PLAIN, "-mno-fma"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LESS, ids=lambda flags: flags[-1][1:], autouse=True)
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The library, compiled once for a lesser processor, in place of this one's."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are those of x86")
    if isinstance(why := library(), str):
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "FLAGS", (*building.FLAGS, *request.param))
        patch.setenv("HONE_HOME", str(tmp_path_factory.mktemp("narrow")))
        building._library.cache_clear()
        found = library()
        assert not isinstance(found, str), found
        assert found.hone_lanes() <= (8 if request.param == NARROW else 4)
        yield found
    building._library.cache_clear()


@each(("shape", "adapters"), [("heads of 16", False), ("heads of 32", True)])
@each("rows", [15, 33, 130])
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_with_any_others(rows: int, shape: str, adapters: bool):
    same_in_any_company(rows, shape, adapters)


@pytest.mark.parametrize("shape", ["heads of 16", "heads of 64"])
@torch.inference_mode()
def test_a_prompt_read_in_parts_is_the_same_to_the_bit(shape: str):
    same_in_parts(shape)


def test_a_request_alone_and_in_any_company_is_the_same_to_the_bit():
    check_invariant(build("plain", torch.float32), requests(128, 24), invariant=True)


@pytest.mark.parametrize("name", ["llama", "adapters"])
def test_layers_are_the_plain_ones_and_recomputed_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack, "SMALL", 0)
    same_as_plain_and_recomputed(name, "shared", 2)


def test_all_layers_at_once_are_the_plain_ones():
    same_as_plain("shared")


# vectors of a head, heads of queries and of keys: K that divides the lanes and not, heads of one vector and of several
@each("shape", [(1, 8, 4), (1, 8, 2), (1, 6, 3), (2, 6, 2), (4, 3, 3), (8, 2, 1)], ids=str)
def test_sampler_and_learner_compute_the_same_bits(shape: Shape, narrow: ctypes.CDLL):
    vectors, H, K = shape
    same_as_sampled((vectors * narrow.hone_lanes(), H, K))
