"""train.reference_cache: the bits of a live reference, computed once, whatever ends the pass or changes under it."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powertrain.train import ranks
from powertrain.train.config.yaml_source import ConfigError
from powertrain.train.data.loader import Batch
from powertrain.train.objective import Reference
from powertrain.train.reference_cache import ReferenceCache, examples
from powertrain.train.run import start
from powertrain.train.trainer import Trainer
from tests.faults.processes import end, said, wait_for, weights
from tests.faults.processes import start as launch
from tests.train.test_objectives import RECORDS, Recorder, read_run

UNPACKED = "data.packing=unpacked"


def _opened(folder: Path, objective: str, *options: str) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    return start(read_run(folder, objective, *options), ranks.read_launch_env(), lambda _: [recorder]), recorder


def _fit(folder: Path, objective: str, *options: str) -> tuple[Trainer, list[Any]]:
    folder.mkdir(exist_ok=True)
    trainer, recorder = _opened(folder, objective, *options)
    trainer.fit()
    trainer.close()
    return trainer, [(r.loss, r.grad_norm, r.objective) for r in recorder.steps]


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows that a reference model computes."""
    rows: list[int] = []
    live = Reference.__call__

    def counted(self: Reference, batch: Batch) -> Any:
        if batch.reference is None:
            rows.append(len(batch.tokens))
        return live(self, batch)

    monkeypatch.setattr(Reference, "__call__", counted)
    return rows


CASES = {
    "dpo": ("dpo", ()),
    "lora": ("dpo", ("train.lora.rank=4", "train.preference.loss=ipo")),
    "kto": ("kto", (UNPACKED,)),
    "policy": ("policy", ("train.policy.kl_weight=0.1", "evaluation.advance=true", "evaluation.every=2")),
    "bf16": ("dpo", ("train.precision=bf16", "train.gradient_accumulation_steps=2")),
}
SLOW = {"kto", "bf16"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_the_same_bits_as_a_live_reference(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, options = CASES[case]
    # fewer samples than an epoch has: each is in the row that the live reference reads
    options = (*options, "checkpoint.save=false", *(["train.steps=2"] if case != "kto" else []))
    live, wanted = _fit(tmp_path / "live", objective, *options)
    rows = _count(monkeypatch)
    cached, found = _fit(tmp_path / "cached", objective, *options, "train.reference_cache=true")
    assert found == wanted and cached.objective.reference.model is None
    for (name, p), q in zip(live.model.named_parameters(), cached.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert rows and sum(rows) > 0
    rows.clear()
    # everything is in the files: no reference is computed, and no bit is another one
    assert _fit(tmp_path / "cached", objective, *options, "train.reference_cache=true")[1] == wanted
    assert rows == []


def test_an_example_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 steps of 2 samples are more than two epochs of the 32 examples; unpacked, an example is a sample."""
    options = ("checkpoint.save=false", UNPACKED, "train.steps=40", "evaluation.every=0", "evaluation.at_end=false")
    _, wanted = _fit(tmp_path / "live", "dpo", *options)
    rows = _count(monkeypatch)
    trainer, found = _fit(tmp_path / "cached", "dpo", *options, "train.reference_cache=true")
    # of an epoch's micro-batches; a pair has two rows
    assert sum(rows) == 2 * 32 and len(trainer.reference_cache) == 2 * 32
    # another neighbour in the micro-batch may round otherwise
    for (loss, *_), (loss_2, *_) in zip(wanted, found, strict=True):
        assert loss_2 == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_every_epoch_has_the_bits_of_a_live_reference(tmp_path: Path) -> None:
    """Batch-invariant, an example has the same numbers in any row: packed anew, over two epochs and a part."""
    options = ("checkpoint.save=false", "train.steps=4", "evaluation.every=0", "evaluation.at_end=false",
               "train.batch_invariant=true", "data.split='20,80,0'")  # fmt: skip
    _, wanted = _fit(tmp_path / "live", "dpo", *options)
    trainer, found = _fit(tmp_path / "cached", "dpo", *options, "train.reference_cache=true")
    assert found == wanted and len(trainer.reference_cache) == 2 * 8


def _trees(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.rglob("*.bin")}


def test_a_pass_that_ends_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each number of files that a killed pass may leave, the next pass computes the rest, with the same bits."""
    monkeypatch.setattr("powertrain.train.reference_cache._AT_ONCE", 1)
    options = ("checkpoint.save=false", UNPACKED, "train.steps=4", "train.reference_cache=true", "evaluation.every=0",
               "evaluation.at_end=false")  # fmt: skip
    _, wanted = _fit(tmp_path / "whole", "dpo", *options)
    whole = _trees(tmp_path / "whole/run/reference")
    assert len(whole) == 4
    (key,) = (tmp_path / "whole/run/reference").iterdir()
    rows = _count(monkeypatch)
    for left in range(4):
        folder = tmp_path / f"left{left}"
        (folder / "run/reference" / key.name).mkdir(parents=True)
        for name in sorted(whole)[:left]:
            shutil.copy(key / name, folder / "run/reference" / key.name / name)
        rows.clear()
        assert _fit(folder, "dpo", *options)[1] == wanted
        assert sum(rows) == 4 * (4 - left) and _trees(folder / "run/reference") == whole


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "words"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    batch = _batch(3)
    cache = ReferenceCache(tmp_path)
    assert cache.fill([batch], lambda b: b.labels.float()) == 6
    wanted = cache.attach(batch).reference
    (file,) = tmp_path.glob("*.bin")
    content = file.read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    file.write_bytes({"cut": content[:-1], "flip": flipped, "empty": b"", "words": b"[1, 2]\n"}[damage])
    again = ReferenceCache(tmp_path)
    assert len(again) == 0 and "1 damaged files" in capfd.readouterr().err
    assert again.fill([batch], lambda b: b.labels.float()) == 6
    assert torch.equal(again.attach(batch).reference, wanted)


def _batch(seed: int, rows: int = 3) -> Batch:
    """Two examples in each row and padding behind them."""
    random = np.random.default_rng(seed)
    tokens = torch.from_numpy(random.integers(1, 99, (rows, 16)))
    documents = torch.tensor([0] * 5 + [1] * 7 + [2] * 4, dtype=torch.int32).expand(rows, 16)
    labels = tokens.where((documents < 2) & (torch.arange(16) % 5 > 1), torch.tensor(-100))
    return Batch(tokens, labels, documents, documents.long(), tuple(range(rows)))


def test_values_are_found_by_content(tmp_path: Path) -> None:
    """The same examples in other rows, of other batches, beside others; values at labels that count, else 0."""
    first, second = _batch(0), _batch(1)
    cache = ReferenceCache(tmp_path)
    assert cache.fill([first, second, first], lambda b: b.tokens.float() / 7) == 12
    assert cache.fill([second], lambda b: pytest.fail("all is known")) == 0
    mixed = Batch(*(torch.cat([a[1:], b[:1]]) for a, b in zip(first[:4], second[:4], strict=True)), (5, 6, 7))
    expected = (mixed.tokens.float() / 7).where(mixed.labels != -100, torch.tensor(0.0))
    assert torch.equal(cache.attach(mixed).reference, expected)
    with pytest.raises(ValueError, match=r"must have every example of samples \[0, 1, 2\], got none for row 0"):
        cache.attach(_batch(2))
    other = first._replace(labels=first.labels.where(first.labels != first.labels[0, 2], torch.tensor(-100)))
    assert {e.digest for e in examples(other)} != {e.digest for e in examples(first)}


@pytest.mark.parametrize("change", ["train.seed=7", "train.micro_batch_size=1", "model.rope_theta=5000"])
def test_another_reference_has_another_folder(change: str, tmp_path: Path) -> None:
    options = ("checkpoint.save=false", "train.steps=1", "evaluation.every=0", "evaluation.at_end=false")
    options = (*options, "train.reference_cache=true")
    _fit(tmp_path, "dpo", *options)
    _fit(tmp_path, "dpo", *options, change)
    assert len(list((tmp_path / "run/reference").iterdir())) == 2


def test_it_needs_a_reference(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.reference_cache must be false where objective sft reads no reference"
    ):
        read_run(tmp_path, "sft", "train.reference_cache=true")


@pytest.mark.slow
def test_kill_9_during_the_pass_loses_no_file(tmp_path: Path) -> None:
    """Killed at moments drawn at random; the last start ends with the weights of a whole run."""
    options = ("train.steps=160", UNPACKED, "train.reference_cache=true", "logging.report=false", "checkpoint.every=0")
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
        read_run(folder, "dpo")
        # no example twice: the pass is as long as the run
        lines = [json.dumps(RECORDS["dpo"](n)) for n in range(400)]
        (folder / "records.jsonl").write_text("\n".join(lines))
    whole, killed = folders
    assert launch(whole, "powertrain", "train", f"{whole}/tiny.yml", *options).wait(timeout=200) == 0, said(whole)
    chance, files = random.Random(3), 0
    for count in (1, 3, 6):
        process = launch(killed, "powertrain", "train", f"{killed}/tiny.yml", *options)
        wait_for(lambda n=count: len(_trees(killed / "run/reference")) >= n, killed)
        time.sleep(chance.random() * 0.02)
        end(process)
        left = _trees(killed / "run/reference")
        assert len(left) >= files
        files = len(left)
    assert launch(killed, "powertrain", "train", f"{killed}/tiny.yml", *options).wait(timeout=200) == 0, said(killed)
    found, wanted = (weights(folder / "run/checkpoints") for folder in (killed, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert _trees(killed / "run/reference") == _trees(whole / "run/reference")
