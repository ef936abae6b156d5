"""Loading is light: no compiler is imported, no file is held twice, and what changes meanwhile is noticed."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats import weight_files
from hone.model.formats.folder import load_decoder
from hone.model.formats.save import save_decoder
from hone.model.formats.weight_files import WEIGHTS

SHAPE = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 2}
PEAK = """
import re, sys
from hone.model.formats.folder import load_decoder
def peak():  # ru_maxrss would begin with that of the process that has started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024
before = peak()
decoder = load_decoder(sys.argv[1])
print(peak() - before, "torch._dynamo" in sys.modules)
"""


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    save_decoder(Decoder(DecoderConfig(**SHAPE)), tmp_path / "m")
    return tmp_path / "m"


def test_loading_takes_the_memory_of_the_weights_and_no_compiler(tmp_path):
    decoder = Decoder(DecoderConfig(**{**SHAPE, "num_hidden_layers": 6}))
    save_decoder(decoder, tmp_path)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, compiler = done.stdout.split()
    weights = (tmp_path / WEIGHTS).stat().st_size / 2**20
    assert weights > 300
    assert float(grown) < 1.4 * weights
    assert compiler == "False"


@pytest.mark.parametrize("mapped", [1, 20_000_000, 2**40])
def test_a_file_read_in_parts_is_the_whole_file(mapped, saved, monkeypatch):
    torch.manual_seed(0)
    expected = Decoder(DecoderConfig(**SHAPE)).state_dict()
    monkeypatch.setattr(weight_files, "MAPPED", mapped)
    found = load_decoder(saved).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_file_that_is_written_while_it_is_read_is_refused(saved, monkeypatch):
    other = saved.parent / "other"
    shutil.copy(saved / WEIGHTS, other)
    plain = weight_files._float

    def replacing(x, name):
        if other.exists():
            os.replace(other, saved / WEIGHTS)
        return plain(x, name)

    monkeypatch.setattr(weight_files, "MAPPED", 1)
    monkeypatch.setattr(weight_files, "_float", replacing)
    with pytest.raises(HoneError, match="was written while it was read"):
        load_decoder(saved)


def test_a_decoder_made_on_a_device_has_its_tables_there():
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig(**SHAPE))
    assert {decoder.cos.device.type, decoder.sin.device.type, decoder.device.type} == {"meta"}
