"""Runs on adapters: what their checkpoints hold, and runs that start from an adapter in a folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from small import Wire, World, assert_same_run, contents, interrupt, metrics, recipe, watched

import hone
from hone.config.rules import validate
from hone.errors import HoneError, Interrupted
from hone.launch.job import prepare
from hone.model.formats.folder import load_decoder
from hone.model.formats.peft import CONFIG, load_peft, read_peft
from hone.model.lora import adapter_off, lora_state
from hone.model.policy import ReferenceView
from hone.storage.files import load_tensors

torch.set_num_threads(1)
TOKENS = torch.arange(40, 60)[None]


@pytest.fixture(scope="module")
def adapter(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an SFT run left: ranks, alpha and targets that are nobody's default."""
    settings = ["lora.rank=3", "lora.alpha=7", "lora.targets=q_proj,down_proj", "lora.rslora=true", "optim.lr=0.05"]
    folder = hone.run(recipe(world, "sft", tmp_path_factory.mktemp("sft"), *settings))
    return folder / "adapter"


@pytest.mark.parametrize("algo", ["sft", "grpo", "reward_model"])
def test_a_checkpoint_holds_the_adapter_over_the_start(algo: str, world: World, tmp_path: Path):
    folder = hone.run(recipe(world, algo, tmp_path / "run", "lora.rank=2", "optim.lr=0.05"))
    decoder = load_decoder(tmp_path / "run/start")
    load_peft(decoder, folder / "adapter")
    merged = load_tensors(folder / "model.safetensors")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        layer = decoder.get_submodule(f"model.layers.0.{name}")
        assert torch.equal(layer.merged(), merged[f"model.layers.0.{name}.weight"])
        assert not torch.equal(layer.base.weight, merged[f"model.layers.0.{name}.weight"])
    assert json.loads((folder / "adapter" / CONFIG).read_text())["base_model_name_or_path"] == world / "model"


def test_a_run_on_all_the_weights_has_none(world: World, tmp_path: Path):
    assert not (hone.run(recipe(world, "sft", tmp_path / "run")) / "adapter").exists()


def test_peft_loads_the_adapter_of_a_checkpoint(adapter: Path, world: World):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    expected = load_decoder(adapter.parent)  # the merged model
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, adapter).eval()(TOKENS).logits
        torch.testing.assert_close(logits, expected.lm_head(expected(TOKENS)), rtol=0, atol=2e-4)
        plain = load_decoder(world / "model")
        assert (logits - plain.lm_head(plain(TOKENS))).abs().max() > 0.05


def test_a_run_starts_from_the_adapter_with_the_base_as_its_reference(adapter: Path, world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", f"lora.path={adapter}"))
    decoder = job.policy.decoder
    found = read_peft(adapter)
    state = lora_state(decoder)
    assert len(state) == 2 * len(found.tensors) == 4
    for layer, (a, b) in found.tensors.items():
        assert torch.equal(state[f"{layer}.lora_A.weight"], a)
        assert torch.equal(state[f"{layer}.lora_B.weight"], b)
        assert decoder.get_submodule(layer).adapter.scale == 7 / 3**0.5
    plain, merged = load_decoder(world / "model"), load_decoder(adapter.parent)
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), merged(TOKENS), rtol=0, atol=1e-5)
        with adapter_off(decoder):
            assert torch.equal(decoder(TOKENS), plain(TOKENS))
    assert isinstance(job.learner.reference, ReferenceView)
    trained = {name for name, p in decoder.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    assert all(".adapters.default.lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("algo", "settings"),
    [("sft", []), ("grpo", []), ("ppo", ["critic.kind=own"]), ("reward_model", []), ("sft", ["train.dtype=bfloat16"])],
)
def test_it_resumes_exactly_though_the_adapter_is_gone(
    algo: str, settings: list[str], adapter: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = tmp_path / "given"
    shutil.copytree(adapter, given)
    settings = [*settings, f"lora.path={given}"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, algo, whole, *settings))
    made = recipe(world, algo, cut, *settings)
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(made), Wire(2, 4, interrupt), monkeypatch)
    assert len(metrics(cut)) == 2
    shutil.rmtree(given)
    assert hone.resume(cut) == cut / "checkpoints/step-000004"
    assert_same_run(whole, cut, step=4)
    given_weights, start = load_tensors(Path(world / "model/model.safetensors")), contents(cut / "start")
    assert start == contents(whole / "start")
    if "train.dtype=bfloat16" not in settings:  # the base, not the base with the adapter in it
        kept = load_tensors(cut / "start/model.safetensors")
        assert all(torch.equal(x, kept[name]) for name, x in given_weights.items())


@pytest.mark.parametrize("setting", ["lora.rank=4", "lora.alpha=3", "lora.targets=q_proj", "lora.rslora=true"])
def test_an_adapter_brings_its_own_settings(setting: str, adapter: Path, world: World, tmp_path: Path):
    validate(recipe(world, "sft", tmp_path / "run", f"lora.path={adapter}"))
    with pytest.raises(HoneError, match="brings its own rank"):
        validate(recipe(world, "sft", tmp_path / "run", f"lora.path={adapter}", setting))


def test_an_adapter_that_cannot_be_trained_is_refused_before_anything_is_written(
    adapter: Path, world: World, tmp_path: Path
):
    given = tmp_path / "given"
    shutil.copytree(adapter, given)
    config = json.loads((given / CONFIG).read_text())
    (given / CONFIG).write_text(json.dumps(config | {"lora_dropout": 0.05}))
    for path, match in ((given, "lora_dropout 0.05"), (tmp_path / "none", "has no adapter_config.json")):
        with pytest.raises(HoneError, match=match):
            hone.run(recipe(world, "sft", tmp_path / "run", f"lora.path={path}"))
        assert not (tmp_path / "run").exists()
