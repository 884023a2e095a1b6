"""Builds and starts a run from a config: ranks, kernels, data, model, trainer, and the sinks of its metrics."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from powertrain.runtime import tracing
from powertrain.runtime.atomic_file import write_whole
from powertrain.runtime.compile import prebuild
from powertrain.runtime.reading import why
from powertrain.runtime.target import Target
from powertrain.train.agreement import decided_by_first, done_by_all
from powertrain.train.checkpoint.load import kinds_at, model_of
from powertrain.train.checkpoint.store import claim, find, read_facts, verify, write_json
from powertrain.train.config.reader import Run
from powertrain.train.config.schema import RunConfig, size_to_train
from powertrain.train.data.completion_sources import open_completions
from powertrain.train.data.sources import Data, open_data, open_tokenizer, user_cache
from powertrain.train.data.tokenizer import FILES, Tokenizer, load_tokenizer, padded_vocab_size, tokenizer_in
from powertrain.train.host_memory import keep_freed_memory
from powertrain.train.lint import record_step
from powertrain.train.mesh_shape import check_parallel
from powertrain.train.objective import FORMATS
from powertrain.train.ranks import LaunchEnv, Ranks, be_deterministic, connect, disconnect, naming_lost_ranks
from powertrain.train.reporting.metrics import CONFIG, METRICS, RESOLVED, Sink, evaluated_at
from powertrain.train.signals import ENDING
from powertrain.train.slow_precision import warn_if_slow
from powertrain.train.tasks import manager_of
from powertrain.train.trainer import Trainer
from powertrain.train.update_rules import require_package

MakeSinks = Callable[[Trainer], Sequence[Sink]]


def with_vocabulary(config: RunConfig, size: int, rows: int = 0) -> RunConfig:
    """The config with model.vocab_size filled in where it is 0: the tokenizer's `size`, padded to data.vocab_multiple.

    rows   of the checkpoint that the run begins with, which are taken as they are if the tokenizer's ids are among them
    Raises ValueError if the model's vocabulary is smaller than the tokenizer's.
    """
    wanted = config.model.vocab_size
    # a token beyond the embedding would be found only by a step
    if wanted and wanted < size:
        raise ValueError(f"model.vocab_size must be at least the tokenizer's {size}, got {wanted}")
    if wanted:
        return config
    padded = padded_vocab_size(size, config.data.vocab_multiple, config.parallel.tensor)
    filled = rows if rows >= size else padded
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": filled})})


def build_kernels(config: RunConfig, device: torch.device, world_size: int) -> prebuild.Report | None:
    """Compile, or find, every kernel that a step will launch on this GPU: before any process waits for another.

    Ranks of one machine share the work through the store's locks. Nothing on a CPU.
    """
    if device.type != "cuda":
        return None
    specs = record_step(config, Target.of(device), world_size=world_size, layers=2)
    # the time of the builds, without that of recording the step
    started = time.monotonic()
    report = prebuild.build(specs)
    sources = ", ".join(f"{count} {source}" for source, count in sorted(report.sources.items()))
    tracing.event("prebuild", f"{len(specs)} kernels in {time.monotonic() - started:.1f} s: {sources}")
    # after the others were built: they are found in the store by the next start
    for failure in report.failures.values():
        raise failure
    return report


def open_run_data(config: RunConfig, tokenizer: Tokenizer, dp_size: int, taken: tuple[int, int] = (0, 0)) -> Data:
    """The samples that a run of this config reads. taken: steps and samples behind it, where it is resumed."""
    train, evaluation = config.train, config.evaluation
    per_step = train.micro_batch_size * train.gradient_accumulation_steps * dp_size
    evaluated = evaluation.steps * train.micro_batch_size * dp_size
    held_out = (evaluated if evaluation.every or evaluation.at_end else 0, evaluated if evaluation.at_end else 0)
    # those behind a resumed run may be more than its steps have now, with smaller batches
    trained = max(train.steps * per_step, taken[1] + max(0, train.steps - taken[0]) * per_step)
    wanted = (trained, *held_out)
    sizes: dict[str, Any] = dict(seq_length=train.seq_length, num_samples=wanted, seed=train.seed, tokenizer=tokenizer)
    try:
        if train.objective == "pretrain":
            return open_data(config.data, **sizes)
        return open_completions(config.data, FORMATS[train.objective], **sizes)
    except OSError as error:
        # of a full disk it names no file, and nothing but the cache is written here
        if error.errno is None or error.filename is not None:
            raise
        folder = config.data.cache_folder or user_cache()
        raise ValueError(
            f"data.cache_folder must name a folder that can be written, got {folder} ({error.strerror})"
        ) from None


def check_packages(config: RunConfig) -> None:
    """Raise MissingExtra for a package that the optimizer or evaluation.tasks need, ValueError for unknown tasks."""
    require_package(config.optimizer)
    if tasks := config.evaluation.tasks:
        folder = config.evaluation.tasks_folder
        manager_of(tasks, Path(folder) if folder else None, argument="evaluation.tasks")


def start(run: Run, launch_env: LaunchEnv, make_sinks: MakeSinks, *, fresh: bool = False) -> Trainer:
    """A trainer that stands where its newest checkpoint left it, or at the beginning.

    Kernels are built before the ranks meet, so that no collective waits for a compiler.
    make_sinks  (trainer, where it resumed) -> sinks of its metrics; called on the first rank only
    fresh       a checkpoint in the run's folder is an error
    An error on one rank after the rendezvous is raised on all, a lost rank as PeerTimeout.
    """
    tokenizer = _tokenizer(run.config)
    config = with_vocabulary(unpadded(run), tokenizer.vocab_size, _rows(run.config))
    # checks first: they need neither the other ranks nor a GPU
    check_parallel(config, launch_env.world_size)
    check_packages(config)
    if config.train.deterministic:
        be_deterministic(launch_env.device)
    # a step on the CPU frees and takes the same memory, which the system would map anew
    if launch_env.device.type == "cpu":
        keep_freed_memory()
    if launch_env.rank == 0:
        warn_if_slow(config.train.precision, launch_env.device)
    # before the rendezvous: afterwards a rank that compiles would hold up the others' collectives
    build_kernels(config, launch_env.device, launch_env.world_size)
    ranks = connect(launch_env, config)
    try:
        # a rank may be lost from here on
        with naming_lost_ranks(ranks):
            return _begin(run, config, tokenizer, ranks, make_sinks, fresh=fresh)
    except Exception:
        # other ranks get an error instead of waiting, and this process can start another run
        disconnect(ranks)
        raise


def _begin(
    run: Run, config: RunConfig, tokenizer: Tokenizer, ranks: Ranks, make_sinks: MakeSinks, *, fresh: bool
) -> Trainer:
    """`start` from the rendezvous on."""
    group = ranks.checkpoint_group
    if fresh:
        decided_by_first(lambda: _refuse_checkpoint(config), group)
    decided_by_first(lambda: _need_load(run, config), group)
    taken = decided_by_first(lambda: _taken(config), group)
    data = done_by_all(lambda: open_run_data(config, tokenizer, ranks.dp_size, taken), group)
    # after the data: an error in its files needs no model
    trainer = Trainer(config, ranks, data)
    try:
        _stand(run, trainer, make_sinks)
    except Exception:
        # not left to the garbage collector, which would end the lock of the run after it (Checkpoints.release)
        trainer.checkpoints.release()
        raise
    return trainer


def _stand(run: Run, trainer: Trainer, make_sinks: MakeSinks) -> None:
    """Take the trainer to where its newest checkpoint left it, or to its weights to begin with; open its sinks."""
    config, group = trainer.config, trainer.ranks.checkpoint_group
    path = Path(config.checkpoint.load) if config.checkpoint.load else None
    resumed = trainer.resume()
    begun = resumed or path is None or decided_by_first(lambda: bool(kinds_at(path)), group)
    if resumed:
        metrics = config.folder() / METRICS
        trainer.evaluated = decided_by_first(lambda: evaluated_at(metrics, trainer.progress.step), group)
    # a resumed run has gone on from these weights already
    if path is not None and begun and not resumed:
        trainer.start_from(path)

    def open_sinks_here() -> None:
        with _naming_folder():
            config.folder().mkdir(parents=True, exist_ok=True)
            # two runs at once would write into each other's metrics and report, also where neither saves a checkpoint
            if not (config.checkpoint.save and _same(config.folder(), config.checkpoint_folder())):
                trainer.claim = claim(config.folder(), "logging.folder")
        with _naming_folder():
            trainer.sinks = make_sinks(trainer)
        # after the sinks, which keep those of an earlier run
        keep_texts(config.folder() / CONFIG, run, config)

    decided_by_first(open_sinks_here, group)
    if not begun:
        tracing.warn(f"checkpoint.load: no checkpoint at {path}; the run starts at step 0")


def _begins_at(config: RunConfig) -> Path | None:
    """The checkpoint of ours that a run of this config begins with: its own newest, else that of checkpoint.load."""
    checkpoint, load = find(config.checkpoint_folder()), config.checkpoint.load
    if checkpoint is None and load is not None:
        try:
            checkpoint = find(Path(load)) or find(Path(load) / "checkpoints")
        except OSError as error:
            raise ValueError(f"checkpoint.load must name a checkpoint, got {load} ({error.strerror})") from None
    return checkpoint


def _tokenizer(config: RunConfig) -> Tokenizer:
    """The one that data.tokenizer names; for train:SIZE that of the checkpoint that the run begins with. Text that has
    grown since would train another one, whose ids mean other words to the same weights."""
    name, checkpoint = config.data.tokenizer, _begins_at(config)
    size = size_to_train(name)
    if size is None or checkpoint is None:
        return open_tokenizer(config.data)
    facts, kept = read_facts(checkpoint), tokenizer_in(checkpoint)
    # an earlier version kept none
    if kept is None:
        return open_tokenizer(config.data)
    # these files alone: the weights are compared when they are loaded
    verify(checkpoint, facts | {"files": {name: size for name, size in facts["files"].items() if name in FILES}})
    tokenizer = load_tokenizer(kept)
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"data.tokenizer must be train:SIZE with at least the {tokenizer.vocab_size} ids of the tokenizer in "
            f"{checkpoint}, which the run goes on with, got {name}"
        )
    return tokenizer


def unpadded(run: Run) -> RunConfig:
    """The config without a size of the vocabulary that was computed as a GPT-NeoX config was read, for its ranks."""
    config = run.config
    if run.format != "gpt_neox" or any(row.key == "padded_vocab_size" for row in run.table):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 0})})


def _rows(config: RunConfig) -> int:
    """Rows of vocabulary in the checkpoint of ours that a run of this config begins with; 0: none. Padding for
    parallel.tensor of one run would be refused in the next, whose ranks may be arranged otherwise."""
    checkpoint = _begins_at(config)
    return 0 if checkpoint is None else model_of(read_facts(checkpoint), checkpoint).vocab_size


def _taken(config: RunConfig) -> tuple[int, int]:
    """Steps and samples of the checkpoint that a run of this config resumes; 0 for none."""
    checkpoint = find(config.checkpoint_folder()) if config.checkpoint.finetune else _begins_at(config)
    facts = {} if checkpoint is None else read_facts(checkpoint)
    steps, samples = facts.get("step"), facts.get("samples")
    # the restorer reports damaged facts
    return (steps, samples) if isinstance(steps, int) and isinstance(samples, int) else (0, 0)


def _acknowledged(number: signal.Signals) -> str:
    again = "; Ctrl-C once more ends it at once" if number is signal.SIGINT else ""
    return f"\npowertrain: {number.name}: the run ends after the current step{again}\n"


def _need_load(run: Run, config: RunConfig) -> None:
    """Weights that a run of ours asks for must be there: it would train from random ones. GPT-NeoX's begin with those,
    as there, but for `finetune`; so does a run that saves where it loads."""
    load, own = config.checkpoint.load, config.checkpoint_folder()
    if load is None or (run.format == "gpt_neox" and not config.checkpoint.finetune):
        return
    if find(own) is not None or kinds_at(Path(load)) or (Path(load).absolute() == own.absolute()):
        return
    got = "no checkpoint there" if Path(load).exists() else "no such folder"
    raise ValueError(f"checkpoint.load must name a checkpoint to begin with, got {load} ({got}); null: random weights")


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _refuse_checkpoint(config: RunConfig) -> None:
    folder = config.checkpoint_folder()
    if find(folder) is not None:
        raise ValueError(f"--fresh: {folder} holds a checkpoint; without --fresh the run resumes it")


def keep_texts(folder: Path, run: Run, config: RunConfig) -> None:
    """The config files, unchanged and resolved, in the run's folder."""
    made = {RESOLVED: config.model_dump(mode="json"), "overrides.json": list(run.overrides)}
    with _naming_folder():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in run.texts.items():
            # a config file may be called run.json itself
            write_whole(folder / (f"{name}.given" if name in made else name), text.encode())
        for name, content in made.items():
            write_json(folder / name, content)


@contextmanager
def _naming_folder() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise
        got = f"{error.filename} ({why(error)})"
        raise ValueError(f"logging.folder must name a folder that can be written, got {got}") from None


# seconds within which a second SIGINT is the same Ctrl-C, from the terminal and from torchrun
_SAME = 2.0


@contextmanager
def stop_on_signals(trainer: Trainer, *, is_last: bool = False, quiet: bool = False) -> Iterator[None]:
    """Signals that ask the process to end, once or repeated, end the run after the current step, with a checkpoint.

    Only a second Ctrl-C, two seconds after the first, ends it at once. A signal that the program handles, or that is
    ignored (nohup), is left alone; SIGTERM and SIGINT are not.
    is_last   the process ends after it: a signal that comes once more while it does must not make a failure of it
    quiet     the first signal, and a first Ctrl-C behind it, are not acknowledged on stderr
    """
    # where Python takes no handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, interrupted = 0.0, 0.0  # times of the first signal, and of the first Ctrl-C

    def stop(number: int, _frame: Any) -> None:
        nonlocal asked, interrupted
        now, is_news = time.monotonic(), not asked
        if number == signal.SIGINT:
            # within that time it is the same Ctrl-C, sent by terminal and launcher
            if interrupted and now - interrupted > _SAME:
                raise KeyboardInterrupt
            is_news = is_news or (not interrupted and now - asked > _SAME)
            interrupted = interrupted or now
        # None: the descriptor was closed when the process started, and may be another file's now
        if is_news and trainer.ranks.is_first and not quiet and sys.stderr is not None:
            # a step may take minutes. Not by print: the signal may have come in the middle of one
            with suppress(OSError):  # a terminal that hung up, a `tee` that Ctrl-C ended first
                os.write(2, _acknowledged(signal.Signals(number)).encode())
        asked = asked or now
        # the first signal is the reason; later ones follow from it
        trainer.stop_reason = trainer.stop_reason or signal.Signals(number).name
        trainer.should_stop = True

    ours = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, stop) for n in ENDING if n in ours or signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_last and asked else handler)
