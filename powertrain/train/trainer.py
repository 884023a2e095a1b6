"""The training loop: forward, backward, clip, optimizer step, log, evaluation, checkpoint."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil
import torch
from torch import Tensor

from powertrain.models import build
from powertrain.models.flops import flops_per_token
from powertrain.ops.batch_invariance import batch_invariant
from powertrain.quant.model import shared_weights
from powertrain.quant.scales import update_scales
from powertrain.runtime import tracing
from powertrain.runtime.reading import one_line
from powertrain.train import fp8
from powertrain.train.agreement import decided_by_first
from powertrain.train.anomaly import SpikeWatch, diagnose
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.loader import Batch, UnreadableSample, batches
from powertrain.train.evaluation import Scorer, ScoringStopped
from powertrain.train.fp8_watch import FP8Watch
from powertrain.train.micro_batch_graph import MicroBatchGraphs
from powertrain.train.model_setup import (
    balance_experts,
    build_model,
    reset_magnitudes,
    set_gradient_sync,
    to_low_precision,
)
from powertrain.train.objective import make_objective
from powertrain.train.optim import Optimizer, Stepped
from powertrain.train.pending_step import PendingStep, to_host
from powertrain.train.ranks import Ranks, disconnect
from powertrain.train.reference_cache import ReferenceCache, cached_reference
from powertrain.train.reporting.kernel_profile import StepWatch
from powertrain.train.reporting.metrics import EvaluationRecord, Sink, StepRecord, TaskRecord
from powertrain.train.reporting.peak_flops import peak_tflops
from powertrain.train.reporting.step_trace import StepTrace
from powertrain.train.reporting.timers import Moment, PhaseTimers, seconds
from powertrain.train.restore import Progress, Restored, Restorer
from powertrain.train.saving import Saver
from powertrain.train.schedule import learning_rate, unreached
from powertrain.train.tasks import run_tasks

if TYPE_CHECKING:
    from powertrain.train.data.sources import Data


# halving takes fp16's scale from float32's largest to its smallest value in fewer steps
MOST_SKIPPED = 300
_BATCHES_BETWEEN_LOOKS = 16  # of an evaluation, at whether a rank was asked to end the run


class TrainingStopped(RuntimeError):
    """The loss or its gradients went bad; the message says at which step, on which samples, in which module."""

    is_on_all = True  # every rank raises it


class Trainer:
    """A run: model, optimizer, data and progress, and the loop over them.

    config    the run's, with the vocabulary's size known
    ranks     which process this is
    data      from `open_data`
    sinks     destinations of each step's metrics (on the first rank)
    Nothing in a step waits for the device: a step's numbers are read while the next one computes, before that updates
    anything. A step whose gradients are not finite changes no weight; a spike is seen after its own update.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, data: "Data", sinks: Sequence[Sink] = ()) -> None:
        self.config, self.ranks, self.data, self.sinks = config, ranks, data, sinks
        self.progress = Progress(data=data.identity)
        self._timed = PhaseTimers(ranks.device, wanted=config.logging.phase_timers)
        self.model, self.overlap, self.pipeline = build_model(config, ranks)
        self.fp8 = fp8.quantize_run(self.model, config, staged=self.pipeline is not None)
        self.fp8_wires = fp8.wires(self.model, config.fp8, self.fp8)
        self._fp8_watch = FP8Watch(self.model, config.fp8, self._note, self.ranks.world_group)
        self.optimizer = Optimizer(self.model, config.optimizer, config.train, self.pipeline)
        to_low_precision(self.model, self.optimizer, config, ranks)
        reset_magnitudes(self.model, self.optimizer)
        self.objective = make_objective(self.model, config, ranks.device)
        self._graphs = MicroBatchGraphs(
            self.model, self.optimizer.parameters, self._compute, self._note, self._why_no_graphs()
        )
        self.reference_cache: ReferenceCache | None = None  # made by `fit`
        self._saver = Saver(config, ranks, data.tokenizer, self._note)
        self.checkpoints = self._saver.checkpoints
        self.claim: TextIO | None = None  # of logging.folder, on the first rank
        whole = self.model if self.pipeline is None else build(config.model)
        self.flops_per_token = flops_per_token(whole, config.train.seq_length)
        self.peak_flops = _peak_flops(config, ranks)
        # of the evaluations due at the resumed step, those that the earlier run finished; None: unknown, so none is run
        self.evaluated: frozenset[str] | None = None
        self.resumed_from = ""  # a checkpoint, and the settings changed since
        self.should_stop = False
        self.stop_reason = ""  # of should_stop, such as the name of a signal
        self._stopping, self._started_at = False, 0
        self._skipped = 0  # steps in a row
        self._failed_sinks: set[Sink] = set()
        self._spikes = SpikeWatch(config.train.spike_factor, config.train.objective)
        self._watch = StepWatch(ranks.device, config.train.recompiles, self._emit, profiles=ranks.is_first)
        self._trace = StepTrace(config.train.profile, config.profile_folder(), ranks.device, ranks.rank, self._note)
        self._pending: PendingStep | None = None
        self._overlap_is_logged = False
        self._clock = Moment(self.ranks.device)

    def fit(self) -> Progress:
        """Train to the configured number of steps, from wherever the run is.

        `should_stop`, set on any rank (by a signal handler, say), ends it early with a checkpoint on all; a note says
        so, with `stop_reason`.
        A checkpoint that cannot be written is reported and the next one tried when due; NotWritten is raised only if
        the last one fails.
        """
        with self._order():
            return self._fit()

    def _fit(self) -> Progress:
        train = self.config.train
        if train.reference_cache and self.reference_cache is None:
            self._cache_reference()
        stream = self._stream()
        self._started_at = self.progress.step
        self._clock = Moment(self.ranks.device)
        if self.fp8 is not None:
            self._note(fp8.summary(self.fp8, self.fp8_wires))
        if self.progress.step == 0 and self.config.checkpoint.save and 0 in self.config.checkpoint.extra_steps:
            self.save()
        if words := unreached(self.config.optimizer.lr, self.config.schedule, train.steps):
            self._note(words)
        if self.evaluated is not None:
            self._evaluate_what_is_due(but=self.evaluated)
        while self.progress.step < train.steps and not self._ends():
            step = self.progress.step
            with self._trace.step(step + 1), self._watch.step(step + 1):
                # dropout depends on the step alone: a resumed run draws the same numbers, and no generator is saved
                seed_step(train.seed, step, self.ranks.rank)
                with self._timed("data"), self._kept_if_unreadable():
                    micro_batches = [
                        next(stream).to(self.ranks.device) for _ in range(train.gradient_accumulation_steps)
                    ]
                with self._fp8_watch.step(step + 1):
                    loss = self._forward_backward(micro_batches)
                self._log_overlap()
                # only now, so that the host waits for the last step while the device computes this one; before the
                # update, so that a bad step is the last to change anything
                self._finish_previous_step()
                lr = self._learning_rate(step)
                with self._timed("optimizer"):
                    stepped = self.optimizer.step(lr)
                self._graphs.end_step()
                balance_experts(self.model, self.ranks)
                if self.config.fp8.recipe == "tensor-delayed":
                    update_scales(self.model, self.ranks.world_group)
                self._advance(loss, stepped, lr, micro_batches)
            # ahead of the evaluations: one that fails, or is killed, costs no steps
            if self._saver.is_due(self.progress.step):
                # a bad step raises here, before its state becomes the newest checkpoint
                self._finish_previous_step()
                self.save()
            self._evaluate_what_is_due()
            self._saver.poll()
        self._finish_previous_step()
        # a run that was asked to end keeps its progress
        if self._ends() and self.config.checkpoint.save and not self._saver.is_due(self.progress.step):
            self.save()
        self._saver.finish()
        if self._ends() and self.progress.step < train.steps:
            self._note(self._ending())
        return self.progress

    @contextlib.contextmanager
    def _kept_if_unreadable(self) -> Iterator[None]:
        """A sample that cannot be read ends the run, with a checkpoint: the state is sound. Of several ranks the others
        wait for this one's gradients by then, and cannot take part in a checkpoint."""
        try:
            yield
        except UnreadableSample:
            self._finish_previous_step()
            step = self.progress.step
            if self.ranks.world_size > 1:
                raise
            if step > self._started_at and self.config.checkpoint.save and not self._saver.is_due(step):
                self.save()
            # a checkpoint that could not be written was reported; the sample is why the run ends
            with contextlib.suppress(checkpoint_store.NotWritten):
                self._saver.finish()
            raise

    def _ending(self) -> str:
        reason = self.stop_reason or ("another rank was asked to" if self._stopping else "train.exit_interval")
        then = "the same command continues from its checkpoint"
        if not self.config.checkpoint.save:
            then = "nothing was saved, since checkpoint.save is false"
        return f"ended early, after step {self.progress.step} of {self.config.train.steps} ({reason}); {then}"

    def _order(self) -> contextlib.AbstractContextManager[None]:
        """Context of a forward: `batch_invariant`, if it is configured."""
        return batch_invariant() if self.config.train.batch_invariant else contextlib.nullcontext()

    def _ends(self) -> bool:
        """Whether the run was asked to end early; ranks exchange this a step later."""
        every, step = self.config.train.exit_interval, self.progress.step
        exits = every > 0 and step > self._started_at and step % every == 0
        return exits or self._stopping or (self.should_stop and self.ranks.world_size == 1)

    def _forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        """Gradients of the mean loss over the units that count in the global batch; returns that loss, whether any
        rank wants to stop, and the objective's metrics.

        FSDP averages gradients over the ranks that read different data, so each states its part times their number.
        """
        ranks = self.ranks
        # counted before any loss: each micro-batch's share is of the whole step, so that unequal counts weigh right
        counted = ranks.sum_over_data(torch.stack([self.objective.count(batch) for batch in micro_batches]).sum())
        if self.pipeline is not None:
            with self._timed("forward and backward"):
                loss = self.pipeline.step(
                    micro_batches, counted, lambda share: self.optimizer.scaled(share * ranks.dp_size)
                )
            return self._means(loss * ranks.dp_size, loss.new_empty(0))
        total = torch.zeros((), dtype=torch.float32, device=ranks.device)
        metrics = torch.zeros(len(self.objective.metrics), dtype=torch.float32, device=ranks.device)
        with shared_weights(self.model) if len(micro_batches) > 1 else contextlib.nullcontext():
            for index, batch in enumerate(micro_batches):
                # earlier micro-batches accumulate locally: one reduction per step
                set_gradient_sync(self.model, index == len(micro_batches) - 1)
                is_first = index == 0
                replayed = None if self._fp8_watch.is_measuring else self._graphs(batch, counted, is_first=is_first)
                loss, seen = self._compute(batch, counted) if replayed is None else replayed
                total += loss
                metrics += seen
        self._graphs.mark_computed()
        return self._means(total, metrics)

    def _compute(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward of a micro-batch: its share of the loss and of the metrics."""
        with self._timed("forward"):
            share, seen = self.objective(batch, counted)
            loss = share * self.ranks.dp_size
        with self._timed("backward"):
            self.optimizer.scaled(loss).backward()
        return loss.detach(), seen * self.ranks.dp_size

    def _why_no_graphs(self) -> str | None:
        """Why micro-batches of this run are not captured in CUDA graphs, or None."""
        train, model = self.config.train, cast(Any, self.model)
        if not train.cuda_graphs:
            return "train.cuda_graphs is false"
        if self.ranks.device.type != "cuda":
            return "there is no GPU"
        if self.ranks.world_size > 1:
            return "ranks exchange gradients in backward"
        if train.activation_checkpointing != "none" and any(layer.may_draw() for layer in model.layers):
            return "recomputing dropout reads the state of the random numbers on the host"
        return "logging.phase_timers times forward and backward apart" if self._timed.wanted else None

    def _means(self, total: Tensor, metrics: Tensor) -> Tensor:
        """Over all ranks: of the loss, of whether one wants to stop, of the metrics."""
        # the stop flag rides on the loss's all-reduce: all ranks see it at the same step without another collective
        stop = torch.full_like(total, float(self.should_stop))
        return self.ranks.mean(torch.cat([torch.stack([total, stop]), metrics]))

    def _log_overlap(self) -> None:
        """After the first forward and backward: which way each product of tensor parallelism takes, and why."""
        if self.overlap is None or self._overlap_is_logged:
            return
        self._overlap_is_logged = True
        size, transport = self.overlap.size, self.overlap.transport.name
        self._note(f"tensor parallelism over {size} ranks, transport {transport}\n{self.overlap.explain()}")

    def _loss(self, batch: Batch) -> Tensor:
        """The mean over this batch alone."""
        return self._share(batch, self.objective.count(batch))[0]

    def _repeat_backward(self, batch: Batch, loss: Tensor) -> None:
        """Gradients of a batch whose loss was computed; in stages as a step of this batch alone."""
        if self.pipeline is None:
            loss.backward()
            return
        micro_batches = [batch] * self.config.train.gradient_accumulation_steps
        counted = self.objective.count(batch) * len(micro_batches)
        self.pipeline.step(micro_batches, counted, lambda share: share)

    def _share(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The objective's share of a batch and of its metrics, on every rank of a pipeline; no gradients."""
        if self.pipeline is not None:
            share = self.pipeline.forward(batch, counted)
            return share, share.new_empty(0)
        return self.objective(batch, counted)

    def _set_training(self, mode: bool) -> None:
        self.model.train(mode)
        if self.pipeline is not None:
            self.pipeline.train(mode)

    @torch.no_grad()
    def evaluate(self, name: str) -> float | None:
        """The mean loss over some batches of a held-out set (evaluation.steps, advance); None if there is none."""
        source = getattr(self.data, name)
        if source is None:
            return None
        ranks = self.ranks
        self._set_training(False)
        # losses, number of units that count, metrics
        sums = torch.zeros(2 + len(self.objective.metrics), dtype=torch.float32, device=ranks.device)
        limit = self._evaluated_at_once(source)
        count, first = 0, 0 if name == "test" else self._first_evaluated(len(source), limit)
        unfinished = False
        for batch in self._of_set(name, self._batches(source, first, first + limit)):
            unfinished = self._is_left(count)
            if unfinished:
                break
            batch = batch.to(ranks.device)
            with self._order():
                loss, metrics = self._share(batch, torch.ones((), device=ranks.device))
            sums += torch.cat([torch.stack([loss, self.objective.count(batch)]), metrics])
            count += 1
        self._set_training(True)
        if unfinished:
            self._note(f"the evaluation of {name} after step {self.progress.step} was left, as the run is to end")
        if unfinished or not count:
            return None
        ranks.sum_over_data(sums)
        # one transfer for all sums; the host waits once an evaluation
        mean, _, *numbers = (sums / sums[1]).tolist()
        seen = dict(zip(self.objective.metrics, numbers, strict=True)) or None
        self._emit("evaluation", EvaluationRecord(self.progress.step, name, mean, count, seen))
        # the next step's time and rate count from here: the evaluation is not part of a step
        self._clock = Moment(self.ranks.device)
        return float(mean)

    def _evaluate_what_is_due(self, but: frozenset[str] = frozenset()) -> None:
        for name in self._evaluations_due():
            if name not in but:
                self._finish_previous_step()
                self.evaluate(name)
        if self.config.evaluation.tasks and self._evaluation_is_due() and "tasks" not in but:
            self._finish_previous_step()
            with contextlib.suppress(ScoringStopped):
                self.evaluate_tasks()

    def _is_left(self, batch: int) -> bool:
        """Whether an evaluation ends ahead of this batch, as the run was asked to end; the same on all ranks."""
        if self.ranks.world_size == 1:
            return self.should_stop
        # the host waits for the device, so not at each batch
        if batch % _BATCHES_BETWEEN_LOOKS == 0:
            asked = self.ranks.mean(torch.full((), float(self.should_stop), device=self.ranks.device))
            self._stopping = self._stopping or bool(asked > 0)
        return self._stopping

    @staticmethod
    def _of_set(name: str, read: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from read
        except UnreadableSample as error:
            raise UnreadableSample(f"{name}: {error}") from None

    def evaluate_tasks(self) -> dict[str, dict[str, float]]:
        """The metrics of evaluation.tasks; every rank computes all of them, since parameters may be sharded.

        Raises ScoringStopped when a run of one process is asked to end.
        """
        config, train = self.config.evaluation, self.config.train
        model: Any = self.model
        scorer = Scorer(
            model, self.data.tokenizer, batch_size=train.micro_batch_size, max_length=train.seq_length,
            should_stop=lambda: self.should_stop and self.ranks.world_size == 1,
        )  # fmt: skip
        folder = None if config.tasks_folder is None else Path(config.tasks_folder)
        try:
            results = run_tasks(scorer, config.tasks, folder=folder, limit=config.task_limit)
        except OSError as error:
            # a data set that is not there, whose line names neither the task nor the key
            raise OSError(f"evaluation.tasks ({', '.join(config.tasks)}): {error}") from error
        for task, metrics in results.items():
            self._emit("task", TaskRecord(self.progress.step, task, metrics))
        self._clock = Moment(self.ranks.device)
        return results

    def _evaluated_at_once(self, source: Any) -> int:
        """The number of samples of a held-out set that one evaluation looks at."""
        return min(len(source), self.config.evaluation.steps * self.config.train.micro_batch_size * self.ranks.dp_size)

    def _first_evaluated(self, samples: int, each: int) -> int:
        """Where this evaluation begins in its set. By the step alone, so that a resumed run goes on there."""
        config = self.config.evaluation
        if not config.advance or not each:
            return 0
        before = (self.progress.step - 1) // config.every if config.every else 0
        return each * (before % (samples // each))

    def close(self) -> None:
        """Finish pending writes and leave the process group."""
        try:
            self._trace.close()
            self._saver.poll(wait=True)
            for sink in self.sinks:
                self._call_sink(sink, sink.close)
        finally:
            self.checkpoints.release()
            if self.claim is not None:
                self.claim.close()
            disconnect(self.ranks)

    def save(self) -> None:
        """Begin a checkpoint of this very state."""
        self.progress.fp8 = self._fp8_watch.state()
        self._saver.save(self.optimizer.tensors(), self.progress)
        # the next step's time and rate count from here: saving is not part of a step
        self._clock = Moment(self.ranks.device)

    def resume(self, path: Path | None = None) -> bool:
        """Load the newest checkpoint of the run (or the one at `path`); False if there is none."""
        group = self.ranks.checkpoint_group
        # the first rank decides for all: a checkpoint may appear, or its folder be seen late, between two looks
        checkpoint = decided_by_first(lambda: checkpoint_store.find(path or self.checkpoints.folder), group)
        if path is None and self.ranks.is_first:
            checkpoint_store.warn_of_incomplete(self.checkpoints.folder)
        if checkpoint is not None:
            self._stand_at(self._restorer().resume(checkpoint))
        return checkpoint is not None

    def start_from(self, path: Path) -> None:
        """Go on from the checkpoint at `path`, or begin with its weights: `Restorer.start_from`."""
        self._stand_at(self._restorer().start_from(path))

    def _restorer(self) -> Restorer:
        return Restorer(
            self.config, self.optimizer, self._samples_per_step(), self.ranks.checkpoint_group, self._fp8_watch
        )

    def _stand_at(self, restored: Restored) -> None:
        self.progress, self.resumed_from = restored.progress, restored.source
        self.config = self._saver.config = restored.config
        self._note(restored.note)
        before, self.progress.data = self.progress.data, self.data.identity
        if before and self.data.identity and before != self.data.identity:
            said = (
                "data.train is not what the checkpoint was trained on: the samples that follow are those of the new "
                f"data from sample {self.progress.samples} on, and some may be repeated; "
                "checkpoint.finetune: true begins the new data at its first sample"
            )
            self._note_now(said)
        if restored.warning:
            self._note_now(restored.warning)

    def _note_now(self, text: str) -> None:
        self._note(text)
        # sinks show no notes before the first step
        if self.ranks.is_first:
            tracing.warn(text)

    def _samples_per_step(self) -> int:
        train = self.config.train
        return train.micro_batch_size * train.gradient_accumulation_steps * self.ranks.dp_size

    def _stream(self) -> Iterator[Batch]:
        # data are as long as this run, which may be shorter than the one that it resumes
        if self.progress.step >= self.config.train.steps:
            return iter(())
        # the loader's workers read ahead; samples behind the last step are never read
        limit = self.progress.samples + (self.config.train.steps - self.progress.step) * self._samples_per_step()
        return self._batches(self.data.train, self.progress.samples, limit)

    def _batches(self, source: Any, start: int, limit: int) -> Iterator[Batch]:
        read = batches(
            source, micro_batch_size=self.config.train.micro_batch_size, dp_rank=self.ranks.dp_rank,
            dp_size=self.ranks.dp_size, start_sample=start, limit=limit, num_workers=self.config.data.num_workers,
        )  # fmt: skip
        return read if self.reference_cache is None else map(self.reference_cache.attach, read)

    def _cache_reference(self) -> None:
        """The reference's log-probabilities of all samples that are left, into files; then its model is freed."""
        parts = [self._stream()]
        for name in ("validation", "test"):
            source = getattr(self.data, name)
            if source is not None:
                each = self._evaluated_at_once(source)
                walks = name == "validation" and self.config.evaluation.advance and each
                parts.append(self._batches(source, 0, len(source) // each * each if walks else each))
        objective: Any = self.objective
        reference = objective.reference
        self.reference_cache = cached_reference(
            reference.model, reference, parts, self.config, self.ranks.device, self.ranks.checkpoint_group
        )
        reference.model = None
        self._clock = Moment(self.ranks.device)

    def _learning_rate(self, step: int) -> float:
        """The learning rate of a step. GPT-NeoX's schedules do not advance in skipped steps (DeepSpeed)."""
        schedule = self.config.schedule
        taken = step if schedule.clamp == "safe" else step - self.progress.skipped
        return learning_rate(taken, self.config.optimizer.lr, schedule, self.config.train.steps)

    def _advance(self, loss: Tensor, stepped: Stepped, lr: float, micro_batches: list[Batch]) -> None:
        progress, train = self.progress, self.config.train
        samples = train.micro_batch_size * len(micro_batches) * self.ranks.dp_size
        progress.step += 1
        progress.samples += samples
        progress.tokens += samples * train.seq_length
        scale = self.optimizer.scaler.scale if self.optimizer.scaler else torch.ones((), device=loss.device)
        numbers = torch.cat([loss, torch.stack([stepped.grad_norm, stepped.skipped, scale])])
        self._pending = PendingStep(
            progress.step, progress.tokens, lr, to_host(numbers), micro_batches, self._timed.take()
        )

    def _finish_previous_step(self) -> None:
        """Read the last step's metrics, report them to the sinks, and stop the run if they are bad."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        loss, stop, *metrics, grad_norm, skipped, scale = pending.numbers()
        self._stopping = stop > 0
        self.progress.skipped += bool(skipped)
        # time between the ends of two steps on the device
        spent, self._clock = pending.ended.since(self._clock), pending.ended
        tokens = self.config.train.seq_length * len(pending.batches) * pending.batches[0].tokens.shape[0]
        rate = tokens * self.ranks.dp_size / spent
        mfu = None
        if self.peak_flops:
            mfu = rate * self.flops_per_token / (self.peak_flops * self.ranks.world_size)
        record = StepRecord(
            pending.step, loss, grad_norm, pending.lr, bool(skipped), scale, pending.tokens, spent, rate, mfu,
            _memory(), seconds(pending.spans) or None,
            dict(zip(self.objective.metrics, metrics, strict=True)) or None,
        )  # fmt: skip
        self._emit("step", record)
        self._stop_if_bad(record, pending.batches)

    def _stop_if_bad(self, record: StepRecord, micro_batches: list[Batch]) -> None:
        """Raise TrainingStopped for a spike, or for gradients that are not finite (fp16: if its scale cannot fall)."""
        config = self.config.train
        may_shrink = config.precision == "fp16" and config.loss_scale.static is None
        self._skipped = self._skipped + 1 if record.skipped else 0
        if record.skipped and self._skipped > MOST_SKIPPED + config.loss_scale.hysteresis:
            reason = (
                f"{self._skipped} steps in a row were skipped, their gradients were not finite; the loss scale is "
                f"{record.loss_scale:g}"
            )
        elif record.skipped and not (may_shrink and config.loss_scale.minimum < record.loss_scale < math.inf):
            reason = f"loss {record.loss:.4g} and gradient norm {record.grad_norm:.4g}; nothing was updated"
        elif record.skipped:
            # fp16's scale falls; a loss that is not finite would spoil the median of spikes
            return
        else:
            median = self._spikes.median_if_spike(record.loss)
            if median is None:
                return
            reason = f"a loss of {record.loss:.4g} where the median of the last steps is {median:.4g}"
        # with sharded parameters each forward is collective: every rank runs all micro-batches, whatever they give
        with torch.no_grad():
            bad = [candidate for candidate in micro_batches if not self._loss(candidate).isfinite()]
        batch = bad[0] if bad else micro_batches[-1]
        anomaly = diagnose(self.model, lambda: self._loss(batch), partial(self._repeat_backward, batch))
        # each rank has other samples, and only one of them may be bad
        everywhere = self.ranks.gather(f"samples {list(batch.indices)}: {anomaly}")
        newest = checkpoint_store.find(self.checkpoints.folder)
        saved = "There is no checkpoint yet." if newest is None else f"The last checkpoint is {newest}."
        lines = "\n".join(f"  rank {rank}, {text}" for rank, text in enumerate(everywhere))
        message = f"training stopped at step {record.step}: {reason}.\n{lines}\n{saved}"
        self._note(message)
        raise TrainingStopped(message)

    def _evaluations_due(self) -> list[str]:
        """Held-out sets to look at now: validation every so many steps, all that there are at the end."""
        last = self.config.evaluation.at_end and self.progress.step == self.config.train.steps
        due = {"validation": self._evaluation_is_due(), "test": last}
        return [name for name, is_due in due.items() if is_due and getattr(self.data, name) is not None]

    def _evaluation_is_due(self) -> bool:
        config, step = self.config.evaluation, self.progress.step
        last = config.at_end and step == self.config.train.steps
        return last or (config.every > 0 and step % config.every == 0)

    def _emit(self, kind: str, record: Any) -> None:
        for sink in self.sinks:
            self._call_sink(sink, getattr(sink, kind), record)

    def _call_sink(self, sink: Sink, method: Callable[..., None], *record: Any) -> None:
        """Call a sink. One that fails (a full disk, a closed pipe, no network) is reported once and kept."""
        try:
            method(*record)
        except Exception as error:
            if sink not in self._failed_sinks:
                self._failed_sinks.add(sink)
                # where stderr is full or closed too
                with contextlib.suppress(OSError):
                    tracing.warn(f"{type(sink).__name__}: {one_line(error)}; training continues without it")

    def _note(self, text: str) -> None:
        self._emit("note", text)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Every step draws its dropout from a seed of its own, so a resumed run has nothing to restore.

    So does every rank: no two drop elements of the same tokens and heads.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**64)


def _peak_flops(config: RunConfig, ranks: Ranks) -> float | None:
    """The device's dense rate in the run's precision, FLOP/s; None where it is not known."""
    if config.logging.peak_tflops:
        return config.logging.peak_tflops * 1e12
    if ranks.device.type != "cuda" or config.train.precision == "fp32":
        return None
    known = peak_tflops(torch.cuda.get_device_name(ranks.device))
    return None if known is None else known * 1e12


def _memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return int(psutil.Process().memory_info().rss)
