"""The initial state of a run: its own checkpoint, one of an unfinished GPT-NeoX training, or weights at step 0."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from powertrain.models.config import as_yaml
from powertrain.models.huggingface import is_head
from powertrain.models.reward import VALUE
from powertrain.runtime.reading import reading
from powertrain.train import fp8
from powertrain.train.agreement import done_by_all
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.load import (
    NAMES,
    Weights,
    fill,
    fitted,
    model_of,
    open_weights,
    refuse_another,
    with_rows,
)
from powertrain.train.checkpoint.neox_training import NeoXTraining
from powertrain.train.config.schema import RunConfig, ScheduleConfig
from powertrain.train.fp8_watch import FP8Watch
from powertrain.train.model_setup import is_base, reset_magnitudes
from powertrain.train.optim import Optimizer
from powertrain.train.update_rules import KINDS


@dataclass
class Progress:
    """Progress of a run, as a checkpoint records it beside the tensors.

    skipped   steps by which the learning-rate schedule of GPT-NeoX configs is behind: those whose gradients overflowed
    fp8       recipes that FP8 layers were moved to (`moved`), and their bad readings in a row (`bad`)
    data      identity of what is trained on
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    fp8: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: str = ""


class Restored(NamedTuple):
    """note: a line for the log;  source: for the report, the checkpoint and the settings that changed since.

    config   of the run from here on: with the checkpoint's schedule where checkpoint.load_schedule asks for it
    warning  "": none
    """

    progress: Progress
    note: str
    config: RunConfig
    source: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Restorer:
    """Fills the tensors of an optimizer and of its model. An error on one rank is raised on all.

    samples_per_step   over all ranks
    fp8_watch          takes the recipes of FP8 layers that a resumed run had moved
    """

    config: RunConfig
    optimizer: Optimizer
    samples_per_step: int
    group: dist.ProcessGroup | None
    fp8_watch: FP8Watch

    def resume(self, checkpoint: Path) -> Restored:
        """Continue from a run's checkpoint. Raises CheckpointError, or ValueError naming a field that differs."""
        facts = done_by_all(lambda: self._facts_of_run(checkpoint, vocab_size=True), self.group)
        done_by_all(lambda: self._refuse_other_optimizer(facts, checkpoint), self.group)
        # before the tensors: a layer that left delayed scaling has no statistics to load
        self.fp8_watch.restore(**facts.get("fp8", {}))
        tensors = done_by_all(lambda: self._tensors_in(checkpoint), self.group)
        checkpoint_store.load(checkpoint, tensors, group=self.group)
        self.optimizer.weights_from_masters()
        known = {name: facts[name] for name in Progress.__dataclass_fields__ if name in facts}
        config = self.config
        if config.checkpoint.load_schedule:
            with reading(checkpoint, "hold the schedule of its run"):
                config = _scheduled_as(config, facts["config"])
        changed = _changed(facts["config"], config.model_dump(mode="json"))
        progress = Progress(**known)
        warnings = _other_objective(facts, config, checkpoint), _other_order(changed, progress, checkpoint)
        return _at(progress, checkpoint, changed, config, "; ".join(filter(None, warnings)))

    def _tensors_in(self, checkpoint: Path) -> dict[str, Tensor]:
        """The tensors to read from a checkpoint: all but those of a precision that its run did not have, fp16's loss
        scale and delayed scaling's statistics, which begin anew."""
        tensors = self.optimizer.tensors()
        own = {name for name in tensors if fp8.is_statistic(name) or name.startswith("scaler.")}
        if not own:
            return tensors
        stored = checkpoint_store.dtypes(checkpoint)
        return {name: t for name, t in tensors.items() if name in stored or name not in own}

    def start_from(self, path: Path) -> Restored:
        """Continue from the checkpoint at `path`, a run's or GPT-NeoX's, or begin at step 0 with the weights there.

        checkpoint.finetune always begins at step 0. Without load_optimizer the optimizer and its schedule are new.
        Raises FileNotFoundError where there are no weights, and ValueError naming the mismatch with this run's model or
        the part of a GPT-NeoX checkpoint that cannot be used.
        """
        weights = done_by_all(lambda: open_weights(path), self.group)
        settings = self.config.checkpoint
        if settings.finetune or not (weights.is_run or weights.training):
            self._fill_weights(weights)
            note = f"weights from {weights.path} ({NAMES[weights.kind]})"
            return Restored(Progress(), note, self.config, warning=self._left_out(weights))
        if weights.is_run:
            checkpoint = checkpoint_store.find(path) or weights.path
            return self.resume(checkpoint) if settings.load_optimizer else self._new_optimizer(weights, checkpoint)
        return self._go_on_from_neox(weights)

    def _new_optimizer(self, weights: Weights, checkpoint: Path) -> Restored:
        facts = done_by_all(lambda: self._facts_of_run(checkpoint), self.group)
        self._fill_weights(weights)
        progress = Progress(facts["step"], facts["samples"], facts["tokens"], facts["step"])
        changed, warning = ["checkpoint.load_optimizer true -> false"], _other_objective(facts, self.config, checkpoint)
        return _at(progress, checkpoint, changed, self.config, warning)

    def _go_on_from_neox(self, weights: Weights) -> Restored:
        assert weights.training is not None
        training = done_by_all(weights.training, self.group)
        done_by_all(lambda: self._refuse_rng(weights), self.group)
        samples = training.step * self.samples_per_step
        progress = Progress(training.step, samples, samples * self.config.train.seq_length, training.step)
        changed = [] if training.samples in (None, 0, samples) else [f"samples {training.samples} -> {samples}"]
        config = self.config
        if self.config.checkpoint.load_optimizer:
            done_by_all(lambda: self._fill_training(weights, training), self.group)
            self.optimizer.weights_from_masters()
            progress.skipped = training.step - training.scheduled
            if config.checkpoint.load_schedule:
                config = done_by_all(lambda: _scheduled_as_neox(self.config, training), self.group)
            changed += _other_schedule(training.schedule, config)
        else:
            self._fill_weights(weights)
            changed.append("no_load_optim false -> true")
        return _at(progress, weights.path, changed, config)

    def _fill_weights(self, weights: Weights) -> None:
        done_by_all(lambda: fill(self._filled_by(weights), fitted(weights, self.config.model).tensors()), self.group)
        self.optimizer.weights_from_masters()
        reset_magnitudes(self.optimizer.model, self.optimizer)

    def _filled_by(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors that weights have. Adapters, FP8 statistics and a new value head keep their initial values."""
        is_reward = self.config.train.objective == "reward"
        if not is_reward:
            weights.need_head(f"checkpoint.load for train.objective {self.config.train.objective}")
        ours = {n: t for n, t in self._named("model.").items() if is_base(n) and not fp8.is_statistic(n)}
        if not weights.has_head:
            # which a reward run does not read
            ours = {n: t for n, t in ours.items() if not is_head(n)}
        if weights.has_value and is_reward:
            ours[VALUE] = self.optimizer.tensors()[f"model.{VALUE}"]
        return ours

    def _left_out(self, weights: Weights) -> str:
        """A note about a value head that this run does not use."""
        objective = self.config.train.objective
        if not weights.has_value or objective == "reward":
            return ""
        return (
            f"checkpoint.load: the value head in {weights.path} is left out, which train.objective {objective} has not"
        )

    def _fill_training(self, weights: Weights, training: NeoXTraining) -> None:
        fitted(weights, self.config.model)
        self._refuse_new_parts(weights)
        ours = {n: t for n, t in self._named("", without="scaler.").items() if not fp8.is_statistic(n)}
        fill(ours, self._of_training(training))
        scaler = self.optimizer.scaler
        values = training.scaler(scaler.config) if scaler and scaler.config.static is None else None
        for name, value in (values or {}).items():
            scaler.tensors()[name].fill_(value)  # type: ignore[union-attr]

    def _refuse_new_parts(self, weights: Weights) -> None:
        """Adapters and a value head, of which a GPT-NeoX training has no state to go on with."""
        train = self.config.train
        new = {"train.objective": ("value head", "reward")} if train.objective == "reward" else {}
        if train.lora is not None:
            new["train.lora"] = ("adapters", f"rank {train.lora.rank}")
        for key, (part, got) in new.items():
            raise ValueError(
                f"{key} must be as in {weights.path}, which holds no {part}, got {got}; checkpoint.finetune: true "
                "begins from its weights, checkpoint.load_optimizer: false goes on with a new optimizer"
            )

    def _of_training(self, training: NeoXTraining) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in training.tensors(self.optimizer.kinds):
            kind, _, ours = name.partition(".")
            yield name, tensor if kind == "step" else with_rows(ours, tensor, self.config.model.vocab_size)

    def _named(self, start: str, without: str = "\0") -> dict[str, Tensor]:
        """The optimizer's tensors whose names start so, under the rest of their names."""
        tensors = self.optimizer.tensors()
        return {
            n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start) and not n.startswith(without)
        }

    def _refuse_rng(self, weights: Weights) -> None:
        model = self.config.model
        rates = {name: getattr(model, name, 0.0) for name in ("hidden_dropout", "attention_dropout")}
        if self.config.checkpoint.load_rng and any(rates.values()):
            name, rate = next((name, rate) for name, rate in rates.items() if rate)
            raise ValueError(
                f"checkpoint.load_rng must be false (no_load_rng: true) to continue {weights.path} with {name} {rate}, "
                "got true: its random state cannot be used here, so dropout draws other values"
            )

    def _facts_of_run(self, checkpoint: Path, *, vocab_size: bool = False) -> dict[str, Any]:
        """A checkpoint's facts. Raises CheckpointError, or ValueError naming a field that differs from this run's.

        vocab_size   that must agree too, since the optimizer's state has its rows
        """
        facts = checkpoint_store.read_facts(checkpoint)
        if facts.get("weights_only"):
            raise checkpoint_store.CheckpointError(
                f"{checkpoint} holds weights only, of another run; name it in checkpoint.load and keep it out of "
                f"{self.config.checkpoint_folder()}"
            )
        for name in ("step", "samples", "tokens"):
            if not isinstance(facts.get(name), int):
                raise checkpoint_store.CheckpointError(
                    f"{checkpoint}/checkpoint.json: {name} must be a whole number, got {facts.get(name)!r}"
                )
        theirs_model, model = model_of(facts, checkpoint), self.config.model
        refuse_another(theirs_model, model, checkpoint)
        if vocab_size and theirs_model.vocab_size != model.vocab_size:
            rows, mine = theirs_model.vocab_size, model.vocab_size
            raise ValueError(f"model.vocab_size must be {rows} as in {checkpoint}, got {mine}; set it so, or {_ANEW}")
        theirs, ours = ((facts.get("config") or {}).get("train") or {}).get("lora"), self.config.train.lora
        if (theirs is None) != (ours is None):
            holds, got = ("adapters", "null") if ours is None else ("no adapters", f"rank {ours.rank}")
            raise ValueError(f"train.lora must be as in {checkpoint}, which holds {holds}, got {got}; {_ANEW}")
        self._refuse_other_head(facts, checkpoint)
        # adapters of other layers would be left out, and trained ones scaled, without a word
        for name in ("targets", "rank", "alpha", "rslora", "dora") if ours is not None else ():
            held, given = (theirs or {}).get(name), getattr(ours, name)
            if (list(given) if isinstance(given, tuple) else given) != held:
                raise ValueError(
                    f"train.lora.{name} must be {as_yaml(held)} as in {checkpoint}, got {as_yaml(given)}; {_ANEW}"
                )
        return facts

    def _refuse_other_optimizer(self, facts: dict[str, Any], checkpoint: Path) -> None:
        """One that keeps other numbers for each weight than the checkpoint has: Lion's average is not AdamW's."""
        theirs, ours = (facts.get("config") or {}).get("optimizer") or {}, self.config.optimizer
        kinds, stored = set(self.optimizer.kinds), {n.partition(".")[0] for n in checkpoint_store.dtypes(checkpoint)}
        stored &= set().union(*KINDS.values())
        for name in ("kind", "momentum") if kinds and kinds != stored else ():
            if theirs.get(name) != getattr(ours, name):
                missing = kinds - stored
                holds = f"no {', '.join(sorted(missing))}" if missing else ", ".join(sorted(stored))
                raise ValueError(
                    f"optimizer.{name} must be {as_yaml(theirs.get(name))} as in {checkpoint}, which holds {holds}, "
                    f"got {as_yaml(getattr(ours, name))}; "
                    "a new logging.folder with checkpoint.load and checkpoint.load_optimizer: false starts afresh"
                )

    def _refuse_other_head(self, facts: dict[str, Any], checkpoint: Path) -> None:
        """A value head that was trained would be left out, or one that was not be there."""
        theirs, ours = _objective_of(facts), self.config.train.objective
        if (theirs == "reward") != (ours == "reward"):
            holds = "a value head" if theirs == "reward" else "no value head"
            raise ValueError(
                f"train.objective must be {theirs} as in {checkpoint}, which holds {holds}, got {ours}; {_ANEW}"
            )
        if ours == "reward" and self.config.train.lora and _OLD_ADAPTER in checkpoint_store.dtypes(checkpoint):
            raise ValueError(
                f"{checkpoint} must have no adapter of the value head to be resumed, got one, which an earlier version "
                f"made; {_ANEW}, that adapter merged"
            )


_ANEW = "another logging.folder with checkpoint.load and checkpoint.finetune: true begins from its weights"
# earlier versions put an adapter beside the value head too
_OLD_ADAPTER = "model.value.lora_A"


def _objective_of(facts: dict[str, Any]) -> str:
    """The objective of a checkpoint's run; checkpoints of earlier versions do not have the key."""
    return str(((facts.get("config") or {}).get("train") or {}).get("objective", "pretrain"))


def _other_objective(facts: dict[str, Any], config: RunConfig, checkpoint: Path) -> str:
    """A note about a run that continues with another objective; "" if the objective is the same."""
    theirs, ours = _objective_of(facts), config.train.objective
    if theirs == ours:
        return ""
    return (
        f"train.objective was {theirs} in {checkpoint} and is {ours} from here on: step, schedule and place in the "
        "data go on; checkpoint.finetune: true in another logging.folder begins at step 0"
    )


# settings that decide what sample n is, the data and their number aside
_ORDER = ("train.seed", "train.seq_length", "data.order", "data.packing", "data.allow_chopped")


def _other_order(changed: list[str], progress: Progress, checkpoint: Path) -> str:
    """A warning for a run in which sample n is another than in the earlier run; "" if it is the same."""
    settings = [line for line in changed if line.partition(" ")[0] in _ORDER]
    if not settings or not progress.samples:
        return ""
    return (
        f"{', '.join(settings)} since {checkpoint}: samples come in another order from sample {progress.samples} on, "
        "so some may be repeated"
    )


def _at(progress: Progress, path: Path, changed: list[str], config: RunConfig, warning: str = "") -> Restored:
    source = str(path) + (f", with other settings: {', '.join(changed)}" if changed else "")
    return Restored(progress, f"resumed step {progress.step} from {path}", config, source, warning)


def _scheduled_as(config: RunConfig, saved: dict[str, Any]) -> RunConfig:
    """A config with the highest rate and the schedule of a run's saved one."""
    schedule = ScheduleConfig(**saved["schedule"])
    schedule = schedule.model_copy(update={"decay_steps": schedule.decay_steps or saved["train"]["steps"]})
    return _with_schedule(config, float(saved["optimizer"]["lr"]), schedule)


def _scheduled_as_neox(config: RunConfig, training: NeoXTraining) -> RunConfig:
    """The same with what GPT-NeoX saved; which formula computes it (clamp) stays the config's."""
    theirs = training.schedule
    with reading(training.folder, "hold a learning rate's schedule (use_checkpoint_lr_scheduler)"):
        schedule = ScheduleConfig(
            kind=theirs["decay_style"], warmup_steps=theirs["warmup_iter"], decay_steps=theirs["end_iter"],
            min_lr=theirs["min_lr"], clamp=config.schedule.clamp,
        )  # fmt: skip
        return _with_schedule(config, float(theirs["start_lr"]), schedule)


def _with_schedule(config: RunConfig, lr: float, schedule: ScheduleConfig) -> RunConfig:
    optimizer = config.optimizer.model_copy(update={"lr": lr})
    return config.model_copy(update={"optimizer": optimizer, "schedule": schedule})


def _changed(before: Any, now: Any, name: str = "") -> list[str]:
    """`key old -> new` of settings that differ, except paths of outputs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in now if name or key not in ("checkpoint", "evaluation", "logging")]
        return [line for key in keys for line in _changed(before.get(key), now[key], f"{name}.{key}".lstrip("."))]
    return [] if before == now else [f"{name} {as_yaml(before)} -> {as_yaml(now)}"]


def _other_schedule(theirs: dict[str, Any], config: RunConfig) -> list[str]:
    """`key old -> new` for a schedule that GPT-NeoX saved, which load_schedule would use."""
    schedule = config.schedule
    ours: dict[str, Any] = {
        "start_lr": config.optimizer.lr, "min_lr": schedule.min_lr, "warmup_iter": schedule.warmup_steps,
        "end_iter": schedule.decay_steps or config.train.steps, "decay_style": schedule.kind,
    }  # fmt: skip
    return [f"{name} {as_yaml(theirs[name])} -> {as_yaml(value)}" for name, value in ours.items()
            if name in theirs and not _equal(theirs[name], value)]  # fmt: skip


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
