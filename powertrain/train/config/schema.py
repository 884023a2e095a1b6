"""The typed configuration of a run, section by section."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import PydanticCustomError

from powertrain.models.config import ModelConfig, as_yaml
from powertrain.models.registry import configure
from powertrain.train.config.objectives import (
    DistillConfig,
    KTOConfig,
    LoRAConfig,
    ObjectiveName,
    PolicyConfig,
    PreferenceConfig,
    RewardConfig,
)
from powertrain.train.config.section import Above0, FilePath, Natural, NonNegative, Positive, Section
from powertrain.train.config.split import shares_of


class DataSource(Section):
    """One corpus: a file or folder of text, jsonl(.zst), parquet, hf:ORG/NAME, a .bin/.idx prefix, or `quickstart`.

    subset, split, revision   as `datasets.load_dataset` takes them, for the Hub and folders of that library
    streaming                 the Hub's rows are tokenized as they arrive, and not kept
    documents                 so many of the first; None: all
    labels, rejected, rejected_labels, rewards, log_probs   prefixes beside a .bin/.idx prefix (docs/fine-tuning.md):
                              labels of its tokens; rejected completions, with labels; a float for each document; a
                              float for each token
    """

    path: FilePath
    weight: NonNegative = 1.0
    labels: FilePath | None = None
    rejected: FilePath | None = None
    rejected_labels: FilePath | None = None
    rewards: FilePath | None = None
    log_probs: FilePath | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    documents: Positive | None = None

    @field_validator("path")
    @classmethod
    def _named(cls, path: str) -> str:
        if path.strip() == "hf:":
            raise PydanticCustomError("no_name", "Input should name a data set of the Hub, as in hf:ORG/NAME")
        return path


def size_to_train(tokenizer: str) -> int | None:
    """SIZE of "train:SIZE"; None for a tokenizer that is there. Raises ValueError."""
    if not tokenizer.startswith("train:"):
        return None
    size = tokenizer.removeprefix("train:")
    # 257: the bytes and the end of a document. Nine digits at most: Python refuses to read thousands of them
    if not size.isdecimal() or len(size) > 9 or int(size) < 257:
        raise ValueError(f"data.tokenizer must be train:SIZE with 257 to 999999999 ids, got {tokenizer!r}")
    return int(size)


class DataConfig(Section):
    """train, validation, test   sources; a plain string is one of weight 1
    split            shares of train, validation and test where only `train` is given
    tokenizer        tokenizer.json, a folder with one, "hf:ORG/NAME", "gpt2:VOCAB.json:MERGES.txt", "bytes";
                     "train:SIZE" trains one
    text_key         of jsonl and rows: text, or messages for the tokenizer's chat template
    document_mask    documents do not see each other, and positions restart in each
    eod_mask_loss    no loss at end-of-document tokens
    packing          packed: documents end to end; unpacked: one in each sample, padded or cut; until_overflow: as many
                     whole ones as fit;  allow_chopped: else documents that are longer than a sample are left out
    """

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    validation: tuple[DataSource, ...] = ()
    test: tuple[DataSource, ...] = ()
    split: str = "969, 30, 1"
    tokenizer: FilePath = "bytes"
    vocab_multiple: Positive = 128
    text_key: str = "text"
    append_eod: bool = True
    document_mask: bool = False
    eod_mask_loss: bool = False
    packing: Literal["packed", "unpacked", "until_overflow"] = "packed"
    allow_chopped: bool = True
    weight_by_num_documents: bool = False
    weighted_sampler_alpha: float = 1.0
    order: Literal["neox", "sequential"] = "neox"
    # each is a process; with millions the run would never start
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 2
    cache_folder: FilePath | None = None

    @field_validator("split")
    @classmethod
    def _shares(cls, split: str) -> str:
        # here and not where documents are split: that comes after all text has been tokenized
        shares_of(split)
        return split

    @field_validator("tokenizer")
    @classmethod
    def _has_size_and_name(cls, tokenizer: str) -> str:
        size_to_train(tokenizer)
        if tokenizer.strip() == "hf:":
            raise ValueError(f"data.tokenizer must be hf:ORG/NAME with a name of the Hub, got {tokenizer!r}")
        return tokenizer

    @model_validator(mode="after")
    def _whole_documents_are_shuffled(self) -> "DataConfig":
        # the two ways of whole documents are defined on GPT-NeoX's shuffle
        if self.packing != "packed" and self.order != "neox":
            raise ValueError(f"data.order must be neox where data.packing is {self.packing}, got {self.order}")
        return self

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        # one source may be written without a list
        values = [value] if isinstance(value, (str, os.PathLike, dict)) else value or []
        if not isinstance(values, (list, tuple)):
            raise PydanticCustomError("no_sources", "Input should be a source or a list of them")
        # "hf:" without a name is a mapping to YAML
        values = ["hf:" if v == {"hf": None} else v for v in values]
        return [{"path": v} if isinstance(v, (str, os.PathLike)) else v for v in values]


# the largest power of two in float32: the next doubling is inf, which no halving brings back
MAX_SCALE = 2.0**127


class LossScale(Section):
    """fp16's loss scaling: a fixed scale, or None for a dynamic one (GPT-NeoX's names and rules)."""

    static: Annotated[float | None, Field(gt=0, le=MAX_SCALE)] = None
    initial_power: Annotated[int, Field(ge=0, le=127)] = 16
    window: Positive = 1000
    hysteresis: Positive = 2
    minimum: Annotated[float, Field(gt=0, le=MAX_SCALE)] = 1.0

    @model_validator(mode="after")
    def _can_fall(self) -> "LossScale":
        if self.static is None and self.minimum > 2.0**self.initial_power:
            raise ValueError(
                f"train.loss_scale.minimum must be at most 2 ** initial_power ({2.0**self.initial_power:g}), "
                f"got {self.minimum:g}"
            )
        return self


class ProfileConfig(Section):
    """A trace of torch.profiler for Perfetto or chrome://tracing, and on a GPU a snapshot of the allocator.

    start, steps   the trace begins before step `start` and holds so many; steps 0: none
    folder         where every rank writes its files; None: `profile` in the run's folder
    memory         the snapshot, for pytorch.org/memory_viz
    """

    start: Positive = 10
    steps: Natural = 0
    folder: FilePath | None = None
    memory: bool = True


class TrainConfig(Section):
    """steps             optimizer steps
    exit_interval        the process ends, with a checkpoint, after each step divisible by it; 0: never
    objective            pretrain: the next token of documents. The others use prompts with completions
                         (docs/fine-tuning.md)
    reference            checkpoint of the reference model of dpo, kto and policy; None: the weights at the start of
                         the run, which need no copy with lora
    reference_cache      compute the reference's log-probabilities once, before training, into files of the run's
                         folder, and free the reference
    lora                 train adapters only
    preference, kto, reward, policy, distill   settings of the objectives dpo, kto, reward, policy and distill
    micro_batch_size     sequences in one forward, per data-parallel rank
    activation_checkpointing   none; selective: all but matmuls and attention is computed again; full: whole layers
    z_loss               so many times the square of the logits' log-sum-exp is added to each token's loss, in training;
                         losses of evaluations are without it
    deterministic        the same bits every run, on a GPU too
    cuda_graphs          replay micro-batches from CUDA graphs where the GPU waits for Python; the same kernels. On one
                         GPU, without logging.phase_timers and without dropout where activations are recomputed.
                         Takes the memory of a micro-batch's forward and backward a second time; left out where
                         that is not free
    batch_invariant      forward passes whose bits do not depend on the batch (powertrain.batch_invariant); slower
    spike_factor         a loss so many times the median of the last 100 steps stops the run, from the 21st step on; 0:
                         never. For pretrain, sft and distill: the other objectives' losses are near 0 or below
    profile              steps to trace, and the folder of the traces
    recompiles           on a kernel's compile after the first step: a warning, or an error
    """

    steps: Positive
    exit_interval: Natural = 0
    seq_length: Positive
    objective: ObjectiveName = "pretrain"
    reference: FilePath | None = None
    reference_cache: bool = False
    lora: LoRAConfig | None = None
    preference: PreferenceConfig = PreferenceConfig()
    kto: KTOConfig = KTOConfig()
    reward: RewardConfig = RewardConfig()
    policy: PolicyConfig = PolicyConfig()
    distill: DistillConfig = DistillConfig()
    micro_batch_size: Positive = 1
    gradient_accumulation_steps: Positive = 1
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScale = LossScale()
    gradient_clipping: NonNegative = 1.0
    # NumPy's seeds have 32 bits
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    deterministic: bool = False
    cuda_graphs: bool = True
    batch_invariant: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    z_loss: NonNegative = 0.0
    spike_factor: NonNegative = 3.0
    recompiles: Literal["warn", "error"] = "warn"
    profile: ProfileConfig = ProfileConfig()

    @property
    def has_reference(self) -> bool:
        """Whether the objective reads log-probabilities of a reference model."""
        preference = self.preference.loss in ("dpo", "robust", "ipo") and not self.preference.reference_free
        # the losses without a reference need no second model
        return {"dpo": preference, "kto": True, "policy": self.policy.kl_weight > 0}.get(self.objective, False)

    @model_validator(mode="after")
    def _of_the_objective(self) -> "TrainConfig":
        if self.reference is not None and not self.has_reference:
            raise ValueError(
                f"train.reference must be null where objective {self.objective} reads no reference, "
                f"got {self.reference}"
            )
        if self.reference_cache and not self.has_reference:
            raise ValueError(
                f"train.reference_cache must be false where objective {self.objective} reads no reference, got true"
            )
        if self.batch_invariant and self.activation_checkpointing != "none":
            # the forward in backward runs on a thread of autograd, which is not in the context
            raise ValueError(
                f"train.activation_checkpointing must be none with train.batch_invariant, "
                f"got {self.activation_checkpointing}"
            )
        # the z-loss is of the full softmax over the vocabulary
        if self.z_loss and self.objective not in ("pretrain", "sft"):
            raise ValueError(f"train.z_loss must be 0 for objective {self.objective}, got {self.z_loss:g}")
        if self.objective == "distill" and self.distill.teacher is None:
            raise ValueError("train.distill.teacher must name a checkpoint for objective distill, got none")
        return self


_LEAST_FLOAT32 = 2.0**-126


class OptimizerConfig(Section):
    """kind     adamw and lion: decoupled weight decay; sgd: torch.optim.SGD; adamw8bit: AdamW with moments in 8 bits
               (pip install 'powertrain[optimizers]')
    momentum   of sgd
    betas      of adamw, adamw8bit and lion; lion's usual ones are [0.9, 0.99]
    eps        of adamw and adamw8bit
    decay_norms_and_biases   apply weight decay to norms and biases too, as torch does by default; GPT-NeoX does not
    state_dtype   of adamw's moments
    """

    kind: Literal["adamw", "adamw8bit", "lion", "sgd"] = "adamw"
    lr: Above0 = 3e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Above0 = 1e-8
    weight_decay: NonNegative = 0.1
    decay_norms_and_biases: bool = False
    state_dtype: Literal["fp32", "bf16"] = "fp32"

    @field_validator("betas")
    @classmethod
    def _below_1(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer.betas must be in [0, 1), got {list(betas)}")
        return betas

    @field_validator("eps")
    @classmethod
    def _in_float32(cls, eps: float) -> float:
        # it would be added as 0, and a weight without a gradient become 0 / 0
        if eps < _LEAST_FLOAT32:
            raise ValueError(f"optimizer.eps must be at least {_LEAST_FLOAT32:g}, float32's smallest, got {eps:g}")
        return eps

    @model_validator(mode="after")
    def _of_its_kind(self) -> "OptimizerConfig":
        for name, kind in (("momentum", "sgd"), ("state_dtype", "adamw")):
            # a field of another optimizer that was set would be silently ignored
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.kind != kind and value != default:
                raise ValueError(
                    f"optimizer.{name} must be {as_yaml(default)} unless optimizer.kind is {kind}, "
                    f"got {as_yaml(value)} for {self.kind}"
                )
        return self


class ScheduleConfig(Section):
    """Warm-up, then a decay from optimizer.lr to min_lr, which is not above it.

    decay_steps   None: train.steps. wsd: the last `wsd_decay_steps` of them decay, the rest is flat
    clamp         safe: past decay_steps the rate stays at min_lr. Or GPT-NeoX's formulas: neox of today, neox-2023 of
                  2023-09 to 2026-05 (in both a cosine rises again past the end), neox-2022 before 2023-08 (Pythia, 20B)
    """

    kind: Literal["constant", "cosine", "linear", "exponential", "wsd"] = "cosine"
    warmup_steps: NonNegative = 0.0
    decay_steps: Positive | None = None
    wsd_decay_steps: Natural = 0
    min_lr: NonNegative = 0.0
    clamp: Literal["safe", "neox", "neox-2023", "neox-2022"] = "safe"


class ParallelConfig(Section):
    """pipeline x replicate x shard x context x tensor = world size; shard -1: the remaining factor.

    fsdp   parameters, gradients and optimizer are sharded over `shard` ranks and replicated over `replicate` (HSDP)
    ddp    nothing is sharded; the same as replicate = all, shard = 1
    pipeline                so many ranks have different layers (docs/pipeline_parallel.md)
    virtual_stages          groups of layers of each of them; above 1 the bubble is as many times shorter
    context                 so many ranks share each sequence (docs/context_parallel.md), and the shards of parameters
    expert                  so many of the shard ranks share each layer's experts (docs/expert_parallel.md)
    reshard_after_forward   False: parameters stay gathered from forward to backward (ZeRO 1 and 2)
    transport               of states between tensor ranks and rows to experts: auto takes the best (docs/overlap.md)
    """

    strategy: Literal["fsdp", "ddp"] = "fsdp"
    pipeline: Positive = 1
    virtual_stages: Positive = 1
    replicate: Positive = 1
    shard: int = -1
    context: Positive = 1
    tensor: Positive = 1
    expert: Positive = 1
    reshard_after_forward: bool = True
    transport: Literal["auto", "symmetric", "pipelined", "sequential"] = "auto"
    # two years; C's clocks cannot count to much more
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 30.0

    @field_validator("shard")
    @classmethod
    def _of_ranks(cls, shard: int) -> int:
        if shard != -1 and shard < 1:
            raise ValueError(f"parallel.shard must be at least 1, or -1 for the remaining factor, got {shard}")
        return shard


class FP8Config(Section):
    """FP8 training of linear layers (docs/fp8.md).

    recipe        none; tensor: one scale for a tensor, from its own values; tensor-delayed: from the values of the last
                  steps; row: one scale for a row; block: one for 1x128 or 128x128 elements
    keep          layers that stay in `train.precision`: lm_head, router, first_block, last_block, and patterns of
                  module names (*.down). fp8 holds none back: gated MLPs keep gate and up in FP8 for backward; alone it
                  adds to the default
    format        of gradients: hybrid (e5m2) or e4m3; None: hybrid for tensor and tensor-delayed, e4m3 for the others
    history       tensor-delayed: number of steps whose largest values are kept
    most_recent   tensor-delayed: the last step's largest value counts, not the largest of the history
    margin        tensor-delayed: scales are divided by 2 ** margin
    watch         every so many steps the operands of each layer are measured, and the worst are logged; 0: never
    rescue        a layer whose three last readings were bad is moved to the next safer recipe (tensor, row, block,
                  16 bits), which is logged and saved with the run
    wire          fp8: FSDP gathers the weights of these layers in FP8, half the bytes, with the same results; with row
                  and block, rows are sent in FP8 to experts on other ranks, which compute with the rounded rows; bf16:
                  in `train.precision`, as all else. Gradients are exchanged in `train.reduce_dtype`
    """

    recipe: Literal["none", "tensor", "tensor-delayed", "row", "block"] = "none"
    keep: tuple[str, ...] = ("lm_head", "router")
    format: Literal["hybrid", "e4m3"] | None = None
    history: Positive = 1024
    most_recent: bool = False
    margin: Natural = 0
    watch: Natural = 0
    rescue: bool = True
    wire: Literal["bf16", "fp8"] = "bf16"

    @field_validator("keep", mode="before")
    @classmethod
    def _one_entry(cls, keep: Any) -> Any:
        return ("lm_head", "router", "fp8") if keep == "fp8" else keep

    @model_validator(mode="after")
    def _of_its_recipe(self) -> "FP8Config":
        for name in ("history", "most_recent", "margin"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.recipe != "tensor-delayed" and value != default:
                raise ValueError(
                    f"fp8.{name} must be {as_yaml(default)} unless fp8.recipe is tensor-delayed, "
                    f"got {as_yaml(value)} for {self.recipe}"
                )
        # a layer's shards may not be whole blocks of the recipe that it would be moved to
        if self.wire == "fp8" and self.watch and self.rescue:
            raise ValueError("fp8.rescue must be false with fp8.watch and fp8.wire fp8, got true")
        # nothing is quantized, so nothing is sent in FP8
        if self.wire == "fp8" and self.recipe == "none":
            raise ValueError("fp8.wire must be bf16 with fp8.recipe none, got fp8")
        return self


class CheckpointConfig(Section):
    """save      False: none are written.   folder: where; None: `checkpoints` in the run's folder
    load        where to start from, if `folder` holds none;   finetune: at step 0, with nothing but the weights there
    load_optimizer   False: `load` gives weights, step and place in the data; the optimizer's state is new
    load_schedule    True: where the optimizer's state is a checkpoint's, the rate and its schedule are so too
    load_rng    False: dropout may use other random states than the checkpoint's; needed with dropout to resume a
                GPT-NeoX checkpoint, whose random states cannot be used
    every       steps between checkpoints, 0: at the end only; scale log: after 1, every, every^2 ... steps (GPT-NeoX's)
    keep_last   how many stay; None: all in a `folder` that is named here, else 2
    """

    save: bool = True
    folder: FilePath | None = None
    load: FilePath | None = None
    finetune: bool = False
    load_optimizer: bool = True
    load_schedule: bool = False
    load_rng: bool = True
    every: Natural = 0
    scale: Literal["linear", "log"] = "linear"
    extra_steps: tuple[int, ...] = ()
    keep_last: Positive | None = None
    asynchronous: bool = True

    @field_validator("extra_steps")
    @classmethod
    def _of_the_run(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        # no step has such a number, and its checkpoint would be missed at the end only
        if any(step < 0 for step in steps):
            raise ValueError(f"checkpoint.extra_steps must be at least 0, got {list(steps)}")
        return steps

    @property
    def kept(self) -> int | None:
        """How many stay; None: all."""
        # a folder named by the user keeps everything; the run's own keeps two
        return self.keep_last or (None if self.folder else 2)


class EvaluationConfig(Section):
    """every 0: never; steps: batches of each evaluation
    advance  each evaluation takes the next batches of the set, around and around; else always its first ones
    tasks    names of lm_eval tasks, run at each evaluation;  tasks_folder: YAML files that define more of them
    task_limit   number of documents of each task; None: all
    at_end   validation after the last step, and test: data.test, or the third share of data.split
    """

    every: Natural = 0
    steps: Positive = 10
    advance: bool = False
    at_end: bool = True
    tasks: tuple[str, ...] = ()
    tasks_folder: FilePath | None = None
    task_limit: Positive | None = None


class LoggingConfig(Section):
    """folder        metrics.jsonl, report.html, TensorBoard's events
    phase_timers  how long data, forward, backward and optimizer take, in every step's numbers
    """

    folder: FilePath | None = None
    every: Positive = 10
    tensorboard: bool = True
    wandb: dict[str, Any] | None = None
    report: bool = True
    peak_tflops: Annotated[float | None, Field(gt=0)] = None
    phase_timers: bool = False


MOST_TOKENS = 1 << 26  # of one forward: a residual stream of hundreds of GB


class RunConfig(Section):
    model: SerializeAsAny[ModelConfig]
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    fp8: FP8Config = FP8Config()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @field_validator("model", mode="before")
    # a preset's name is enough: `model: llama-1b`
    @classmethod
    def _architecture(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"preset": value}
        return configure(**value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits(self) -> "RunConfig":
        longest = self.model.max_position_embeddings
        if self.train.seq_length > longest:
            got = self.train.seq_length
            raise ValueError(f"train.seq_length must be at most model.max_position_embeddings ({longest}), got {got}")
        # a slip in a size must not allocate hundreds of gigabytes first
        tokens = self.train.micro_batch_size * self.train.seq_length
        if tokens > MOST_TOKENS:
            raise ValueError(
                f"train.micro_batch_size * seq_length must be at most {MOST_TOKENS} tokens in a forward, got {tokens}"
            )
        if self.parallel.tensor > 1 and self.fp8.recipe != "none":
            self._check_fp8_over_tensor_ranks()
        return self

    def _check_fp8_over_tensor_ranks(self) -> None:
        tensor = self.parallel.tensor
        if self.fp8.recipe == "tensor-delayed":
            raise ValueError(
                f"fp8.recipe must be tensor, row or block with parallel.tensor {tensor}: layers sharded over tensor "
                f"ranks have no delayed scaling, got {self.fp8.recipe}"
            )
        if self.fp8.watch:
            raise ValueError(
                f"fp8.watch must be 0 with parallel.tensor {tensor}: the operands of layers sharded over tensor ranks "
                f"are not measured, got {self.fp8.watch}"
            )

    def checkpoint_folder(self) -> Path:
        """Where checkpoints stand: checkpoint.folder, or `checkpoints` in the run's folder."""
        return Path(self.checkpoint.folder) if self.checkpoint.folder else self.folder() / "checkpoints"

    def profile_folder(self) -> Path:
        """Where traces stand: train.profile.folder, or `profile` in the run's folder."""
        return Path(self.train.profile.folder) if self.train.profile.folder else self.folder() / "profile"

    def folder(self) -> Path:
        """Where the run writes: logging's folder, or the checkpoints', or ./runs/default.

        `read_config` gives a run without either the folder runs/NAME, of its first file NAME.yml.
        """
        return Path(self.logging.folder or self.checkpoint.folder or "runs/default")
