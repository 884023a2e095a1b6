"""Going on from DeepSpeed's checkpoints: the same bits as a run that was not interrupted."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint.load import open_weights
from powertrain.train.reporting.metrics import StepRecord
from powertrain.train.schedule import learning_rate
from powertrain.train.trainer import Trainer
from tests.distributed.launch import run_ranks
from tests.train.deepspeed_files import LAYER, Engine, write
from tests.train.tiny_run import At, open_trainer, write_config

STEPS, AT = 9, 5
MODEL = ("model.architecture=gpt_neox", "train.steps=9", "evaluation.every=0", "evaluation.at_end=false",
         "schedule.kind=cosine", "schedule.warmup_steps=3", "schedule.clamp=neox")  # fmt: skip
PARALLEL = ("model.parallel_residual=true",)
TIED = ("model.tie_embeddings=true",)
ENGINES: dict[str, tuple[Engine, tuple[str, ...]]] = {
    "fp32": (Engine("fp32", "fp32"), ()),
    "fp32-stages": (Engine("fp32", "fp32", pipe=2), TIED),
    "fp16-fused": (Engine("fused", "fp16", tp=2), PARALLEL),
    "fp16-fused-stages": (Engine("fused", "fp16", tp=2, pipe=2), TIED),
    "fp16-unfused-stages": (Engine("unfused", "fp16", pipe=2), ()),
    "fp16-zero": (Engine("zero", "fp16", dp=3), TIED),
    "fp16-zero-stages": (Engine("zero", "fp16", dp=2, tp=2, pipe=2), (*TIED, *PARALLEL)),
    "fp16-elastic": (Engine("elastic", "fp16", dp=2, pipe=1, param_shapes=False), ()),
    "fp16-stage1": (Engine("stage1", "fp16", dp=3, tp=2, pipe=2, param_shapes=False), PARALLEL),
    "bf16": (Engine("bf16", "bf16", dp=2, tp=2, pipe=1), PARALLEL),
    "bf16-stages": (Engine("bf16", "bf16", dp=3, pipe=2), TIED),
    "bf16-zero": (Engine("zero", "bf16", dp=2), ()),
    "bf16-experts": (Engine("bf16", "bf16", dp=2, tp=2, pipe=2), ("model.num_experts=4", "model.expert_interval=2")),
}  # fmt: skip


class Rates(At):
    """A sink that keeps the learning rates."""

    def __init__(self) -> None:
        super().__init__(-1, lambda: None)
        self.rates: list[float] = []

    def step(self, record: StepRecord) -> None:
        self.rates.append(record.lr)


def _trainer(folder: Path, *overrides: str, sink: At | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    return open_trainer(folder, *MODEL, *overrides, sinks=lambda trainer: [sink] if sink else [])


def _whole(folder: Path, *overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Trainer]:
    """(tensors after step AT, tensors at the end, trainer) of a run that is not interrupted."""
    stopped = _trainer(folder / "first", *overrides)
    stopped.should_stop = False
    sink = At(AT - 1, lambda: setattr(stopped, "should_stop", True))
    stopped.sinks = [sink]
    stopped.fit()
    stopped.close()
    assert stopped.progress.step == AT
    middle = {name: t.detach().clone() for name, t in stopped.optimizer.tensors().items()}
    whole = _trainer(folder / "whole", *overrides)
    whole.fit()
    whole.close()
    return middle, whole.optimizer.tensors(), stopped


def _scaler(tensors: dict[str, Tensor], fused: bool) -> dict[str, Any] | None:
    """DeepSpeed's counters of the same state."""
    if "scaler.scale" not in tensors:
        return None
    scale, good, patience = (tensors[f"scaler.{name}"].item() for name in ("scale", "good", "patience"))
    last = AT - 1 - int(good) - fused  # cur_iter counts steps; the fused one grows a step later
    found = {"cur_scale": scale, "cur_iter": AT, "last_overflow_iter": last, "scale_factor": 2.0, "scale_window": 1000}
    return found | ({} if fused else {"cur_hysteresis": int(patience), "delayed_shift": 2, "dtype": torch.float16})


def _write(folder: Path, trainer: Trainer, tensors: dict[str, Tensor], engine: Engine, **client_state: Any) -> Path:
    adam_step = int(tensors["step.embed.weight"].item())
    schedule = {"start_lr": 3e-4, "min_lr": 0.0, "warmup_iter": 3.0, "end_iter": STEPS, "decay_style": "cosine",
                "num_iters": AT - trainer.progress.skipped}  # fmt: skip
    state = {"lr_scheduler": schedule, "global_samples": AT * 4, **client_state}
    scaler = _scaler(tensors, engine.kind in ("fused", "unfused"))
    return write(folder, trainer.config.model, tensors, engine, step=AT, adam_step=adam_step, scaler=scaler, **state)


# the others have less than these
OFTEN = ("fp32-stages", "fp16-fused-stages", "fp16-zero-stages", "fp16-stage1", "bf16-stages", "bf16-experts")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in ENGINES])
def test_the_same_bits_as_without_an_interruption(name: str, tmp_path: Path) -> None:
    engine, model = ENGINES[name]
    precision = (f"train.precision={engine.precision}", *model)
    if engine.precision == "fp16":
        # the first steps overflow: schedule and Adam are behind the steps
        precision += ("train.loss_scale.initial_power=20", "train.loss_scale.hysteresis=1")
    middle, end, first = _whole(tmp_path, *precision)
    if engine.precision == "fp16" and not torch.cuda.is_available():  # another device overflows elsewhere
        assert 0 < first.progress.skipped < AT, first.progress
    _write(tmp_path / "neox", first, middle, engine)
    again = _trainer(tmp_path / "again", *precision, f"checkpoint.load={tmp_path}/neox")
    assert again.progress == first.progress, (again.progress, first.progress)
    assert "with other settings" not in again.resumed_from, again.resumed_from
    for tensor_name, tensor in again.optimizer.tensors().items():
        assert torch.equal(tensor, middle[tensor_name]), tensor_name
    again.fit()
    again.close()
    for tensor_name, tensor in again.optimizer.tensors().items():
        assert torch.equal(tensor, end[tensor_name]), tensor_name


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Trainer]:
    """A bf16 run after step AT."""
    middle, _, first = _whole(tmp_path_factory.mktemp("stopped"), "train.precision=bf16")
    return middle, first


def _checkpoint(folder: Path, stopped: tuple[dict[str, Tensor], Trainer], **client_state: Any) -> Path:
    return _write(folder / "neox", stopped[1], stopped[0], Engine("zero", "bf16", dp=2), **client_state)


def _again(folder: Path, *overrides: str) -> Trainer:
    trainer = _trainer(folder / "again", "train.precision=bf16", f"checkpoint.load={folder}/neox", *overrides)
    trainer.close()
    return trainer


def _edit(file: Path, **changes: Any) -> None:
    """The same file with other entries; None: without it."""
    content = {**load_pickle(file), **changes}
    new = file.with_suffix(".new")  # the old one is mapped into memory
    torch.save({key: value for key, value in content.items() if value is not None}, new)
    new.replace(file)


def _edit_first(**changes: Any) -> Callable[[Path], None]:
    return lambda step: _edit(step / "mp_rank_00_model_states.pt", **changes)


def test_no_load_optim_takes_the_weights_and_the_step(
    stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path
) -> None:
    """Masters are the 16-bit weights, as there; Adam and the schedule begin anew. No optimizer's file is needed."""
    step = _checkpoint(tmp_path, stopped)
    (step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    trainer = _again(tmp_path, "checkpoint.load_optimizer=false")
    assert (trainer.progress.step, trainer.progress.samples, trainer.progress.skipped) == (AT, AT * 4, AT)
    for name, tensor in trainer.optimizer.tensors().items():
        if name.startswith("model."):
            assert torch.equal(tensor, stopped[0][name].bfloat16().float()), name
        else:
            assert not tensor.any(), name


def test_finetune_begins_at_step_0(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    _checkpoint(tmp_path, stopped)
    assert _again(tmp_path, "checkpoint.finetune=true").progress.step == 0


def test_an_own_run_with_a_new_optimizer(tmp_path: Path) -> None:
    first = _trainer(tmp_path / "first", "train.precision=fp32")
    first.fit()
    first.close()
    load = (f"checkpoint.load={tmp_path}/first/run", "checkpoint.load_optimizer=false")
    trainer = _trainer(tmp_path / "again", "train.precision=fp32", *load)
    trainer.close()
    assert trainer.progress.step == STEPS and "load_optimizer" in trainer.resumed_from
    for name, tensor in trainer.optimizer.tensors().items():
        assert torch.equal(tensor, first.optimizer.tensors()[name] if name.startswith("model.") else 0 * tensor), name


def test_more_rows_of_vocabulary(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    """Other ranks of tensor parallelism pad it to another size."""
    _checkpoint(tmp_path, stopped)
    rows = stopped[1].config.model.vocab_size
    tensors = _again(tmp_path, f"model.vocab_size={rows + 64}").optimizer.tensors()
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        found = tensors[f"{kind}.embed.weight"]
        assert torch.equal(found[:rows], stopped[0][f"{kind}.embed.weight"]) and not found[rows:].any()


def test_other_settings_are_named(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    _checkpoint(tmp_path, stopped)
    trainer = _again(tmp_path, "optimizer.lr=1e-3", "train.micro_batch_size=2")
    for words in ("start_lr 0.0003 -> 0.001", "samples 20 -> 10"):
        assert words in trainer.resumed_from


def test_the_checkpoints_schedule(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    """use_checkpoint_lr_scheduler: rates of the saved schedule, in the run's own checkpoints too, whatever is set."""
    _checkpoint(tmp_path, stopped)
    other = ("optimizer.lr=1e-3", "schedule.kind=linear", "schedule.min_lr=1e-4", "checkpoint.load_schedule=true")
    trainer = _trainer(tmp_path / "again", "train.precision=bf16", f"checkpoint.load={tmp_path}/neox", *other)
    config, before = trainer.config, stopped[1].config
    assert config.optimizer.lr == before.optimizer.lr == 3e-4 and "with other settings" not in trainer.resumed_from
    steps = range(AT, STEPS)
    rates = [learning_rate(s, before.optimizer.lr, before.schedule, STEPS) for s in steps]
    assert [learning_rate(s, config.optimizer.lr, config.schedule, STEPS) for s in steps] == rates
    sink = Rates()
    trainer.sinks = [sink]
    trainer.fit()
    trainer.close()
    assert sink.rates == rates
    # its own checkpoint has that schedule: in a longer run the decay still ends where this one's did
    longer = _trainer(tmp_path / "again", "train.precision=bf16", "train.steps=20", *other)
    longer.close()
    assert longer.progress.step == STEPS
    assert (longer.config.schedule, longer.config.optimizer.lr) == (config.schedule, 3e-4)


def test_a_schedule_that_is_not_there(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    _edit_first(lr_scheduler={"num_iters": AT, "start_lr": 1.0})(_checkpoint(tmp_path, stopped))
    with pytest.raises(ValueError, match=r"must hold a learning rate.s schedule .* got KeyError 'decay_style'"):
        _again(tmp_path, "checkpoint.load_schedule=true")


def _without_optimizer(step: Path) -> None:
    for file in step.glob("*zero_pp*"):
        file.unlink()


def _lion(step: Path) -> None:
    for file in step.glob("*zero_pp*"):
        state = load_pickle(file)["optimizer_state_dict"]
        for each in state["base_optimizer_state"]["state"].values():
            del each["exp_avg_sq"]
        _edit(file, optimizer_state_dict={**state, "zero_stage": 2})


@pytest.mark.parametrize(
    "damage, message",
    [
        (_without_optimizer, r"must hold an optimizer.s state, got weights alone; set no_load_optim: true"),
        (lambda s: (s / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
         r"must hold zero_pp_rank_1_mp_rank_00_optim_states.pt, got 1 others"),
        (_lion, r"must have exp_avg_sq for each parameter, got exp_avg"),
        (lambda s: (s / "mp_rank_00_model_states.pt").rename(s / "mp_rank_01_model_states.pt"), "must hold"),
        (_edit_first(iteration="7"), r"iteration must be a number of steps, got '7'"),
        (_edit_first(lr_scheduler=None), "lr_scheduler.num_iters must be a number"),
        (_edit_first(param_shapes=[{"a": torch.Size([1])}] * 2),
         "param_shapes must name parameters as LAYER.NAME, got a"),
        (_edit_first(param_shapes=[{"0.word_embeddings.weight": torch.Size([10**6])}] * 2),
         "a group of parameters must have 1000000 values, got"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(
    damage: Any, message: str, stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path
) -> None:
    damage(_checkpoint(tmp_path, stopped))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        _again(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "train.objective=reward",
            "train.objective must be as in .*, which holds no value head, got reward; checkpoint.f",
        ),
        ("train.lora.rank=2", "train.lora must be as in .*, which holds no adapters, got rank 2; checkpoint.finetune"),
    ],
)
def test_parts_that_its_training_did_not_have(
    override: str, message: str, stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path
) -> None:
    _checkpoint(tmp_path, stopped)
    (tmp_path / "again").mkdir()
    pairs = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in range(1, 40)]
    (tmp_path / "again/pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = (f"data.train={tmp_path}/again/pairs.jsonl",) if "reward" in override else ()
    with pytest.raises(ValueError, match=message):
        _again(tmp_path, override, *data)
    assert _again(tmp_path, override, *data, "checkpoint.load_optimizer=false").progress.step == AT


def test_statistics_of_fp8_begin_anew(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    _checkpoint(tmp_path, stopped)
    again = _again(tmp_path, "fp8.recipe=tensor-delayed")
    assert again.progress.step == AT and torch.equal(
        again.optimizer.tensors()["model.norm.weight"], stopped[0]["model.norm.weight"]
    )


def test_a_reward_model_is_named(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    """train_impl rm has rm_linear in place of final_linear."""
    step = _checkpoint(tmp_path, stopped)
    file = step / "mp_rank_00_model_states.pt"
    module = load_pickle(file)["module"]
    name = next(name for name in module if name.endswith("final_linear.weight"))
    module[name.replace("final_linear", "rm_linear")] = module.pop(name)[:1].clone()
    _edit(file, module=module)
    with pytest.raises(ValueError, match=r"must hold a language model, got rm_linear.weight of train_impl rm"):
        open_weights(step)


def test_lion_does_not_take_the_average_of_adam(stopped: tuple[dict[str, Tensor], Trainer], tmp_path: Path) -> None:
    _checkpoint(tmp_path, stopped)
    lion = ("optimizer.kind=lion", "optimizer.betas=[0.9,0.99]")
    with pytest.raises(ValueError, match=r"must have exp_avg alone .* got exp_avg, exp_avg_sq; set"):
        _again(tmp_path, *lion)
    assert _again(tmp_path, *lion, "checkpoint.load_optimizer=false").progress.step == AT


def test_random_states_need_no_load_rng_where_they_count(tmp_path: Path) -> None:
    """Dropout's draws here are others; without dropout there is nothing to go on with."""
    dropout = ("train.precision=bf16", "model.hidden_dropout=0.1")
    middle, _, first = _whole(tmp_path, *dropout)
    _write(tmp_path / "neox", first, middle, Engine("zero", "bf16"))
    words = r"load_rng must be false \(no_load_rng: true\) to continue .* with hidden_dropout 0\.1, got true"
    with pytest.raises(ValueError, match=words):
        _again(tmp_path, *dropout)
    assert _again(tmp_path, *dropout, "checkpoint.load_rng=false").progress.step == AT


@pytest.mark.slow
@pytest.mark.parametrize(
    "micro, parallel",
    [(2, "parallel.shard=2"), (4, "parallel.tensor=2"), (4, "parallel.pipeline=2")],
    ids=["fsdp", "tensor-parallel", "stages"],
)
def test_two_ranks_go_on(micro: int, parallel: str, tmp_path: Path) -> None:
    """From a checkpoint of two others: the losses of one rank."""
    settings = ("train.precision=fp32", "train.gradient_accumulation_steps=2")
    middle, _, first = _whole(tmp_path, *settings)
    _write(tmp_path / "neox", first, middle, Engine("fp32", "fp32", tp=2))
    alone = _trainer(tmp_path / "alone", *settings, f"checkpoint.load={tmp_path}/neox")
    alone.fit()
    alone.close()
    (tmp_path / "two").mkdir()
    options = (*settings, f"checkpoint.load={tmp_path}/neox", parallel, f"train.micro_batch_size={micro}",
               f"model.vocab_size={first.config.model.vocab_size}")  # fmt: skip
    ranks = run_ranks(2, "-m", "powertrain", "train", str(write_config(tmp_path / "two")), *MODEL, *options)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
    for name, expected in open_weights(tmp_path / "alone" / "run").tensors():
        found = dict(open_weights(tmp_path / "two" / "run").tensors())[name]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize(
    "engine", ["fp32-0", "fp32-1", "bf16-0", "bf16-1", "bf16-2", "fp32-0-tied", "bf16-1-tied", "bf16-1-untied"]
)
def test_what_deepspeed_itself_wrote(engine: str, tmp_path: Path) -> None:
    """PRECISION-STAGE, with two data-parallel ranks or two pipeline stages: every master and moment that it held."""
    worker = Path(__file__).with_name("deepspeed_worker.py")
    for rank in run_ranks(2, str(worker), engine, str(tmp_path)):
        assert rank.returncode == 0, rank.stdout[-3000:]
    training = open_weights(tmp_path).training
    assert training is not None
    found, expected = training(), torch.load(tmp_path / "live.pt")
    assert (found.step, found.scheduled, found.samples) == (5, 5, 20 if engine.count("-") == 1 else 10)
    ours = {theirs: ours for ours, theirs in _OURS.items()}
    values = {}
    for full_name, kinds in expected.items():
        layer, name = re.fullmatch(r"(?:sequential\.)?(\d+|tied_modules\.embed)\.(.+)", full_name).groups()
        module, _, kind = name.rpartition(".")
        prefix = f"layers.{int(layer) - 2}." if layer in ("2", "3") else ""
        for state, tensor in kinds.items():
            values[f"{'model' if state == 'master' else state}.{prefix}{ours[module]}.{kind}"] = tensor
    # an unfused 16-bit optimizer begins with a step without gradients, which counts
    updates = 6.0 if engine == "bf16-0" else 5.0
    for name, tensor in found.tensors(("exp_avg", "exp_avg_sq")):
        if name.startswith("step."):
            assert tensor.item() == updates
        else:
            assert torch.equal(tensor.float(), values.pop(name).float()), name
    assert not values


_OURS = {ours: theirs for theirs, ours in LAYER.items()} | {
    "embed": "word_embeddings", "norm": "norm", "head": "final_linear"
}  # fmt: skip
