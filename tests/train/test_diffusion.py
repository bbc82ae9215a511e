"""`lohan train --task diffusion`: from a pipeline and latents to a folder that diffusers loads."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lohan.config import TASKS, load_config
from lohan.errors import LohanError
from lohan.optim import lr_at
from lohan.train import diffusion, trainer
from lohan.train import inputs as table
from lohan.train.diffusion import noising_of
from lohan.train.inputs import open_inputs
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from lohan.train.task import DataRequest
from lohan.util.settings import Source
from tests.support.model_folders import (
    IMAGE_CLASSES,
    POOLED_STATES,
    TEXT_STATES,
    load_denoiser,
    save_latents,
    save_pipeline,
    small_autoencoder,
)
from tests.support.models import decay_groups
from tests.support.training_runs import RecordingDisplay

pytest.importorskip("diffusers")
STEPS, BATCH = 4, 3
WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_images(folder: Path, count: int = 6) -> Path:
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines and data of every kind."""
    folder = tmp_path_factory.mktemp("diffusion")
    for kind in ("dit", "sd3", "flux"):
        save_pipeline(folder / kind, kind)
        save_latents(folder / f"{kind}-data", kind)
    return folder


def config_for(place: Path, kind: str, out: Path, **more: Any) -> Any:
    overrides = {
        "model": place / kind,
        "data": place / f"{kind}-data",
        "out": out,
        "budget.host": "32MiB",
        "train.steps": STEPS,
        "train.batch": BATCH,
        "train.micro_batch": 2,
        "train.lr": 1e-3,
        "train.schedule": "constant",
        "train.weight_decay": 0.1,
        "train.clip": 0.5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return load_config(None, overrides=overrides)


def train(place: Path, kind: str, out: Path, **more: Any) -> RecordingDisplay:
    shown = RecordingDisplay()
    trainer.train(config_for(place, kind, out, **more), shown)
    return shown


def reference(place: Path, kind: str, out: Path) -> dict[str, torch.Tensor]:
    """Train on the run's batches with PyTorch's AdamW in memory."""
    config = RunFolder(out).config()
    inputs = open_inputs(RunFolder(out), config, RecordingDisplay(), resume=True)
    train_, net = config.train, load_denoiser(place / kind / "transformer", kind).train()
    optimizer = torch.optim.AdamW(decay_groups(net, train_.weight_decay))
    torch.manual_seed(config.seed)  # DiT drops classes at random
    for step in range(STEPS):
        batch = inputs.train_examples.batch(step, BATCH)
        target = batch.pop("target")
        predicted = net(**batch).sample[:, : target.shape[1]]
        (predicted - target).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), train_.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, total_steps=STEPS, peak_lr=train_.lr, schedule="constant")
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


@pytest.mark.parametrize("kind", ["dit", "sd3", "flux"])
def test_from_latents_to_a_model(kind, place, tmp_path):
    """What is exported is what plain PyTorch gives, and diffusers loads it."""
    out = tmp_path / "run"
    shown = train(place, kind, out, train__micro_batch=BATCH)
    rows = step_rows(RunFolder(out))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["tokens"] == BATCH * 16 and row["loss"] > 0 for row in rows)
    assert "7 latents of 4 x 8 x 8" in shown.notes[0]
    assert ("3 classes" in shown.notes[0]) is (kind == "dit")
    tuned, before = (
        load_denoiser(out / "model", kind),
        load_denoiser(place / kind / "transformer", kind),
    )
    expected, weights = reference(place, kind, out), tuned.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith(("to_k.bias", "add_k_proj.bias")):  # rounding noise alone
            assert torch.allclose(weights[name], tensor, atol=2e-5), name
    moved = [n for n, t in before.state_dict().items() if not torch.equal(t, weights[n])]
    assert len(moved) > 20


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Run a DiT training in its simplest form."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(place, "dit", out, train__activations="recompute", train__overlap=False)
    return RunFolder(out)


def check_same(whole: RunFolder, other: RunFolder) -> None:
    losses = [[row["loss"] for row in step_rows(run)] for run in (whole, other)]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]
    one, same = (load_file(run.model / WEIGHTS) for run in (whole, other))
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_resume_is_exact(whole, place, tmp_path):
    run = RunFolder(tmp_path / "run")
    train(place, "dit", run.path, train__steps=2, train__activations="recompute")
    trainer.resume(run, RecordingDisplay(), steps=STEPS)
    check_same(whole, run)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train__activations": "all", "train__update_mode": "naive"},
        {"budget__device": "emulated", "budget__device_memory": "32MiB", "train__dtype": "fp32"},
    ],
)
def test_modes_and_devices_change_no_bit(settings, whole, place, tmp_path):
    train(place, "dit", tmp_path / "run", **settings)
    check_same(whole, RunFolder(tmp_path / "run"))


def test_bf16_evaluation_and_the_best(place, tmp_path):
    out = tmp_path / "run"
    shown = train(
        place,
        "sd3",
        out,
        train__dtype="bf16",
        eval__split=0.3,
        eval__every=2,
        output__export_best=True,
    )
    rows = eval_rows(RunFolder(out))
    assert [row["step"] for row in rows] == [2, 4] and "eval_perplexity" not in rows[0]
    assert rows[0]["eval_tokens"] == 2
    assert any(re.fullmatch(r"evaluation after step 2: loss [\d.]+ .*", n) for n in shown.notes)
    tuned = load_file(out / "best" / WEIGHTS)
    assert tuned["proj_out.weight"].dtype == torch.bfloat16 and "pos_embed.pos_embed" in tuned


def test_the_command_line(lohan, place, tmp_path):
    out, model = tmp_path / "run", place / "dit"
    words = (
        "--model",
        model,
        "--data",
        place / "dit-data",
        "--out",
        out,
        "--host",
        "32MiB",
        "--task",
        "diffusion",
        "--batch",
        2,
        "--steps",
        2,
    )
    dry = lohan("train", *words, "--dry-run")
    assert dry.code == 0 and "2 steps" in dry.out and not out.exists(), dry
    ended = lohan("train", *words)
    assert ended.code == 0, ended
    exported = lohan("export", out, "--out", tmp_path / "tuned")
    assert exported.code == 0, exported
    names = sorted(path.name for path in (out / "model").iterdir())
    assert names.pop(0) == ".lohan-exported"  # the run's own mark
    assert names == ["README.md", "config.json", WEIGHTS]
    for name in names:
        assert (tmp_path / "tuned" / name).read_bytes() == (out / "model" / name).read_bytes()
    plan = lohan("plan", "--model", model, "--host", "32MiB", "--batch", 2, "--json")
    assert plan.code == 0 and json.loads(plan.out)["seq"] == 16, plan
    for command in (
        ("eval", out, "--data", place / "dit-data"),
        ("generate", out, "--prompt", "a"),
        ("verify", "--config", out / "run.toml"),
    ):
        refused = lohan(*command, "--host", "32MiB")
        assert refused.code == 2 and "is a model of diffusers" in refused.err, refused
    assert lohan("report", out).code == 0


def test_folder_without_scheduler_has_ddpm_noise_levels(place, tmp_path):
    """Without a scheduler the noise levels are those of DDPM."""
    shutil.copytree(place / "dit" / "transformer", tmp_path / "alone")
    (tmp_path / "alone-data").symlink_to(place / "dit-data")
    train(tmp_path, "alone", tmp_path / "run", train__steps=1)
    config = RunFolder(tmp_path / "run").config()
    inputs = open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay(), resume=True)
    assert inputs.train_examples.noising.scheduler.config.num_train_timesteps == 1000


# -- batches --------------------------------------------------------------------------------------


def examples(place: Path, kind: str, tmp_path: Path, **more: Any) -> diffusion.Noised:
    config = config_for(place, kind, tmp_path / "run", **more)
    return open_inputs(RunFolder(tmp_path / "run"), config, RecordingDisplay()).train_examples


def latents(place: Path, kind: str) -> dict[str, np.ndarray]:
    files = sorted((place / f"{kind}-data").rglob("[0-9].npy"))
    return {file.stem: np.load(file) for file in files}


def test_a_batch_of_dit_is_noise_on_latents(place, tmp_path):
    actual = examples(place, "dit", tmp_path)
    scheduler = actual.noising.scheduler
    clean = latents(place, "dit")
    assert len(clean) == len(actual) == 7
    batch = actual.batch(5, 7)
    alphas = scheduler.alphas_cumprod[batch["timestep"]].view(-1, 1, 1, 1)
    assert batch["timestep"].max() < 50
    recovered = (batch["hidden_states"] - (1 - alphas).sqrt() * batch["target"]) / alphas.sqrt()
    for row, label in zip(recovered, batch["class_labels"].tolist(), strict=True):
        name = min(clean, key=lambda n: float((torch.from_numpy(clean[n]) - row).abs().max()))
        assert torch.allclose(torch.from_numpy(clean[name]), row, atol=1e-3)
        assert label == int(name) % 3
    again, other = actual.batch(5, 7), actual.batch(6, 7)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["target"].sum(0), other["target"].sum(0))
    held = [list(actual.passes(4)) for _ in range(2)]
    assert [len(b["target"]) for b in held[0]] == [4, 3]
    assert torch.equal(held[0][1]["target"], held[1][1]["target"])
    assert not torch.equal(held[0][0]["target"], actual.batch(0, 4)["target"])  # noise of its own


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_a_batch_of_a_flow_lies_between_latents_and_noise(kind, place, tmp_path):
    actual = examples(place, kind, tmp_path)
    batch = actual.batch(2, 4)
    assert batch[TEXT_STATES].shape == (4, 6, 16) and batch[POOLED_STATES].shape == (4, 12)
    levels = batch["timestep"] / (1000 if kind == "sd3" else 1)
    assert ((levels > 0) & (levels < 1)).all()
    each = levels.view(-1, *[1] * (batch["hidden_states"].ndim - 1))
    recovered = batch["hidden_states"] - each * batch["target"]
    clean = [torch.from_numpy(a) for a in latents(place, kind).values()]
    if kind == "flux":
        pipeline = pytest.importorskip("diffusers").FluxPipeline
        clean = [pipeline._pack_latents(a[None], 1, 4, 8, 8)[0] for a in clean]
        assert torch.equal(
            batch["img_ids"], pipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
        )
        assert batch["txt_ids"].shape == (6, 3) and (batch["guidance"] == 3.5).all()
    near = [min(float((row - one).abs().max()) for one in clean) for row in recovered]
    assert sum(distance < 1e-4 for distance in near) >= 1  # the others came as safetensors
    drawn = torch.cat([actual.batch(n, 7)["timestep"] for n in range(40)])
    shifted = 750 if kind == "sd3" else 0.75  # of the middle, by a shift of 3
    assert abs(float(drawn.median()) / shifted - 1) < 0.1


# -- data -----------------------------------------------------------------------------------------


def test_images_become_latents_or_pixels(tmp_path):
    pytest.importorskip("PIL")
    save_pipeline(tmp_path / "dit", "dit", vae=True)
    save_pipeline(tmp_path / "pixels", "pixels")
    save_images(tmp_path / "images")
    for kind in ("dit", "pixels"):
        (tmp_path / f"{kind}-data").symlink_to(tmp_path / "images")
    actual = examples(tmp_path, "pixels", tmp_path / "pixels-run").records
    whole = actual.stacked(range(6))
    assert whole["latents"].shape == (6, 3, 8, 8) and abs(whole["latents"]).max() <= 1
    assert whole["class_labels"].tolist() == [0, 0, 0, 1, 1, 1]
    encoded = examples(tmp_path, "dit", tmp_path / "dit-run").records.stacked([0])["latents"]
    from lohan.data.images import square

    pixels = torch.from_numpy(square(tmp_path / "images" / "0" / "0.png", 16))
    with torch.no_grad():
        expected = small_autoencoder().eval().encode(pixels[None]).latent_dist.mode() * 0.5
    assert np.allclose(encoded, expected.numpy(), atol=1e-5)
    train(tmp_path, "pixels", tmp_path / "run", train__steps=1)


def test_classes_may_come_with_the_latents(place, tmp_path):
    (tmp_path / "data").mkdir()
    for number in (4, 2, IMAGE_CLASSES):
        tensors = {"latents": torch.zeros(4, 8, 8).bfloat16(), "class_labels": torch.tensor(number)}
        save_file(tensors, tmp_path / "data" / f"{number}.safetensors")
    with pytest.raises(
        LohanError, match=f"is of class {IMAGE_CLASSES}, DiT.* has {IMAGE_CLASSES} of them"
    ):
        examples(place, "dit", tmp_path / "wrong", data=tmp_path / "data")
    (tmp_path / "data" / f"{IMAGE_CLASSES}.safetensors").unlink()
    actual = examples(place, "dit", tmp_path, data=tmp_path / "data")
    assert actual.records.stacked([0, 1])["class_labels"].tolist() == [2, 4]


def test_packages_that_are_missing_are_named(place, tmp_path, monkeypatch):
    (tmp_path / "data" / "0").mkdir(parents=True)
    (tmp_path / "data" / "0" / "a.png").write_bytes(b"")
    save_pipeline(tmp_path / "pixels", "pixels")
    config = config_for(tmp_path, "pixels", tmp_path / "run", data=tmp_path / "data")
    wanted = {
        "PIL": "needs Pillow, which is not installed; pip install pillow",
        "diffusers": "needs the diffusers package; pip install",
    }
    for package, message in wanted.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(LohanError, match=message):
            trainer.train(config, RecordingDisplay())


def test_tables_of_tasks_agree():
    assert set(table.TASKS) == set(TASKS)


def broken(folder: Path, what: str) -> None:
    """Corrupt the data in one way."""
    first = sorted((folder / "data").rglob("*.npy"))[0]
    if what == "shape":
        np.save(first, np.zeros((4, 8, 16), np.float32))
    elif what == "channels":
        np.save(first, np.zeros((3, 8, 8), np.float32))
    elif what == "unlike":
        np.save(sorted((folder / "data").rglob("*.npy"))[1], np.zeros((4, 16, 16), np.float32))
    elif what == "not finite":
        np.save(first, np.full((4, 8, 8), np.nan, np.float32))
    elif what == "pickle":
        np.save(first, np.array([{}], dtype=object), allow_pickle=True)
    elif what == "loose":
        shutil.move(first, folder / "data" / "loose.npy")
    elif what == "classes":
        (first.parent).rename(folder / "data" / "9")
        for number, other in enumerate(sorted((folder / "data").glob("class-*"))):
            other.rename(folder / "data" / str(number))
    elif what == "mixed":
        (first.parent / "a.png").write_bytes(b"no image")
    elif what == "images":
        for file in (folder / "data").rglob("*.npy"):
            file.rename(file.with_suffix(".png"))
    elif what == "empty":
        shutil.rmtree(folder / "data")
        (folder / "data").mkdir()
    elif what == "missing":
        shutil.rmtree(folder / "data")


WRONG = {
    "shape": r"0\.npy: the latent is 8 x 16, DiT.* takes multiples of 2, both the same; crop",
    "channels": r"the latent has shape \[3, 8, 8\], DiT.* takes \[4, height, width\]; check",
    "unlike": r"latents is 4 x 16 x 16 of float32, that of .* 4 x 8 x 8 of float32; all examples",
    "not finite": r"holds values that are not finite; write it again",
    "pickle": r"not an array of numpy .*; write it again",
    "loose": r"loose\.npy: is not in the folder of a class; put every example into a folder",
    "classes": rf"9: is class 9, the model has {IMAGE_CLASSES} of them",
    "mixed": r"1 image and 7 latents are mixed; give a folder with one kind",
    "images": r"an image, and DiT.* takes latents of 4 channels; give the folder of a pipeline",
    "empty": r"no image and no latent in it .*; check --data",
    "missing": r"no such folder; check --data",
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_data_gets_a_message(what, place, tmp_path):
    shutil.copytree(place / "dit-data", tmp_path / "data")
    broken(tmp_path, what)
    config = config_for(place, "dit", tmp_path / "run", data=tmp_path / "data")
    with pytest.raises(LohanError, match=WRONG[what]):
        trainer.train(config, RecordingDisplay())
    assert not (tmp_path / "run").exists()


def sized(height: int, width: int) -> dict[str, np.ndarray]:
    """Return an example for SD3."""
    shapes = {"latents": (4, height, width), TEXT_STATES: (6, 16), POOLED_STATES: (12,)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_latents_larger_than_the_positions_of_sd3(place, tmp_path):
    """Refused where diffusers would fail, and nowhere else."""
    shutil.copytree(place / "sd3-data", tmp_path / "data")
    np.save(tmp_path / "data" / "0.npy", np.zeros((4, 18, 16), np.float32))
    config = config_for(place, "sd3", tmp_path / "run", data=tmp_path / "data")
    message = r"0\.npy: the latent is 18 x 16, SD3\w+ takes 16 x 16 at most \(pos_embed_max_size 8,"
    with pytest.raises(LohanError, match=rf"{message} patches of 2\); crop it, or encode smaller"):
        trainer.train(config, RecordingDisplay())
    assert not (tmp_path / "run").exists()
    noising = noising_of(diffusion.diffusers_folder_of(config))
    net = load_denoiser(place / "sd3" / "transformer", "sd3")
    for size, fits in (((16, 16), True), ((16, 18), False)):
        arrays = sized(*size)
        batch = noising.batch({n: a[None] for n, a in arrays.items()}, torch.Generator())
        batch.pop("target")
        if fits:
            noising.check("here", arrays)
            assert net(**batch).sample.shape[-2:] == size
            continue
        with pytest.raises(LohanError, match="16 x 18"):
            noising.check("here", arrays)
        with pytest.raises(ValueError, match=r"greater than .*pos_embed_max_size"):
            net(**batch)


def test_rejects_latents_larger_than_sd3_positions(place, tmp_path):
    raw = json.loads((place / "sd3" / "transformer" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "pos_embed_max_size": 3}))
    config = config_for(place, "sd3", tmp_path / "run", model=tmp_path)
    with pytest.raises(LohanError, match=r"the latent is 8 x 8, SD3\w+ takes 6 x 6 at most"):
        diffusion.Diffusion().shapes(config, [], dtype="fp32")


def test_too_little_memory_names_the_options_to_change(place, tmp_path):
    config = config_for(place, "dit", tmp_path / "run", budget__host="100KiB")
    moves = r"raise --host to .*, or lower --batch \(now 3\) or --micro-batch \(now 2\), or train "
    with pytest.raises(LohanError, match=moves + "on smaller images or latents$"):
        trainer.train(config, RecordingDisplay())


def test_evaluation_has_the_classes_of_training(place, tmp_path):
    """Also where the data that is held back has only some of them."""
    last = sorted((place / "dit-data").iterdir())[-1]
    shutil.copytree(last, tmp_path / "held" / last.name)
    whole = config_for(place, "dit", tmp_path / "run", data=place / "dit-data")
    folder = tmp_path / "cache"
    folder.mkdir()
    data = DataRequest(
        sources=[Source(tmp_path / "held")],
        cache=folder / "held",
        config=whole,
        option="--eval-data",
        resume=False,
        progress=lambda *_: None,
    )
    result = diffusion.Diffusion().prepare(data)
    assert result.records.about["classes"][last.name] == 2
    (tmp_path / "held" / last.name).rename(tmp_path / "held" / "strange")
    with pytest.raises(LohanError, match="the folder strange is none of the 3 classes in"):
        diffusion.Diffusion().prepare(replace(data, cache=folder / "again"))


def test_conditioning_has_no_dimension_for_a_batch(place, tmp_path):
    shutil.copytree(place / "sd3-data", tmp_path / "data")
    config = config_for(place, "sd3", tmp_path / "run", data=tmp_path / "data")
    np.save(tmp_path / "data" / f"0.{POOLED_STATES}.npy", np.zeros((1, 12), np.float32))
    message = r"pooled_projections has shape \[1, 12\], one example takes \[width\]; write it"
    with pytest.raises(LohanError, match=message):
        trainer.train(config, RecordingDisplay())


def test_conditioning_that_is_missing_or_of_another_model(place, tmp_path):
    shutil.copytree(place / "sd3-data", tmp_path / "data")
    config = config_for(place, "sd3", tmp_path / "run", data=tmp_path / "data")
    np.save(tmp_path / "data" / f"0.{POOLED_STATES}.npy", np.zeros(3, np.float32))
    message = r"pooled_projections is 3 wide, pooled_projection_dim of the model is 12; make it"
    with pytest.raises(LohanError, match=message):
        trainer.train(config, RecordingDisplay())
    (tmp_path / "data" / f"0.{POOLED_STATES}.npy").unlink()
    message = r"0\.npy: no pooled_projections with it; write it to 0\.pooled_projections\.npy"
    with pytest.raises(LohanError, match=message):
        trainer.train(config, RecordingDisplay())


def test_settings_and_models_that_do_not_go_together(lohan, place, tmp_path):
    words = ("--data", place / "dit-data", "--out", tmp_path / "run", "--host", "32MiB")
    for option, message in (
        (("--pack",), "--pack: is for language models"),
        (("--lora", 4), "--lora: is for language models"),
        (("--sample-prompts", "a"), "--sample-prompts: is for language models"),
        (("--task", "language"), "is a model of diffusers"),
        (("--dtype", "fp16"), "in fp16: its loss is its own"),
    ):
        ended = lohan("train", "--model", place / "dit", *words, *option)
        assert ended.code == 2 and message in ended.err, ended
    unet = tmp_path / "unet"
    unet.mkdir()
    (unet / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    ended = lohan("train", "--model", unet, *words)
    assert ended.code == 2 and "UNet2DModel is not a model that --task diffusion" in ended.err
    (unet / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ended = lohan("train", "--model", unet, *words, "--task", "diffusion")
    assert ended.code == 2 and "not a diffusers folder" in ended.err
