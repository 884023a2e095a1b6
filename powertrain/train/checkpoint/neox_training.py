"""The state of a training in a GPT-NeoX checkpoint: step, schedule, loss scale, and the optimizer by our names.

    global_step500/mp_rank_00_model_states.pt                       a file per pipeline stage and tensor-parallel rank
    global_step500/zero_pp_rank_1_mp_rank_00_optim_states.pt        beside it, of each data-parallel rank: ZeRO 1 and 2
    global_step500/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt   the same of its bf16 engine, with any stage

An optimizer has one or two groups of parameters (with and without weight decay), flat one after the other and cut into
a partition for each data-parallel rank. fp16 without ZeRO keeps them in the first file, flat or one by one; fp32 one by
one. A rank's number counts tensor-parallel ranks, then stages.
Facts from DeepSpeed (Apache-2.0; no code), 0.3 to 0.18: runtime/engine.py, bf16_optimizer.py, fp16/fused_optimizer.py,
fp16/unfused_optimizer.py, fp16/loss_scaler.py, zero/stage_1_and_2.py, zero/stage1.py, pipe/module.py, pipe/topology.py.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.models.pickles import load_pickle
from powertrain.runtime.reading import reading
from powertrain.train.checkpoint.neox import NeoXCheckpoint, rank_files
from powertrain.train.checkpoint.neox_names import is_buffer
from powertrain.train.config.schema import LossScale

Shards = list[dict[int, dict[str, Tensor]]]  # of each tensor-parallel rank: layer -> name in it -> tensor

_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_NAME = re.compile(r"(?:module\.)?(?:(?:sequential\.)?(\d+)|tied_modules\.embed)\.(.+)")
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "sgu.norm")
_ADVICE = "set no_load_optim: true to continue with a new optimizer, or finetune: true to begin at step 0"


class Place(NamedTuple):
    """Position of a GPT-NeoX parameter: its layer, its name in the layer, its shape."""

    layer: int
    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        module, _, kind = self.name.rpartition(".")
        return kind != "bias" and module not in _NORMS


@dataclass(frozen=True)
class _Parameters:
    """Parameters of one group of an optimizer, on one rank of tensor parallelism and one pipeline stage.

    kinds    of state ("master", "exp_avg" ...) -> partitions, flat one after the other; a tensor each where `is_flat`
             is false
    step     how often the optimizer has updated them
    """

    kinds: Mapping[str, Sequence[Tensor]]
    is_flat: bool
    step: float


class NeoXTraining:
    """The state of the training that wrote a global_step folder.

    step            iterations done;  samples: DeepSpeed's count, or None
    schedule        of its learning rate, as saved: start_lr, num_iters ...
    Raises FileNotFoundError or ValueError naming the file and the entry that it must hold.
    """

    def __init__(self, opened: NeoXCheckpoint) -> None:
        self.opened, self.folder = opened, opened.folder
        files = rank_files(self.folder)
        if not files or len(files) % opened.num_ranks or len(files) != max(files) + 1:
            raise ValueError(
                f"{self.folder} must hold mp_rank_XX_model_states.pt for each of {opened.num_ranks} tensor-parallel "
                f"ranks and each pipeline stage, got {len(files)}"
            )
        self.num_stages = len(files) // opened.num_ranks
        with reading(files[0], "describe a training"):
            # every rank's: param_shapes and, without ZeRO, the optimizer differ by rank
            self._ranks: list[dict[str, Any]] = [load_pickle(files[rank]) for rank in range(len(files))]
            first = self._ranks[0]
            self.step = _natural(first.get("iteration", first.get("total_iters")), f"{files[0]}: iteration")
            # a folder without a count is read as well
            samples = first.get("global_samples")
            self.samples = samples if isinstance(samples, int) else None
            self.schedule: dict[str, Any] = dict(first.get("lr_scheduler") or {})

    @property
    def scheduled(self) -> int:
        """The schedule's steps: fewer than `step` by those that were skipped."""
        return _natural(self.schedule.get("num_iters"), f"{self.folder}: lr_scheduler.num_iters")

    def scaler(self, config: LossScale) -> dict[str, float] | None:
        """fp16's loss scale as our scaler's tensors; None if the training had none."""
        with reading(self.folder, "hold a loss scale"):
            if self._zero:
                found = self._zero[0][0].get("loss_scaler")
                scaler, ahead = {} if found is None else vars(found), 1
            else:
                # where the scale grows a step later than ZeRO's
                scaler, ahead = self._ranks[0].get("optimizer") or {}, 2
            if "cur_scale" not in scaler or scaler["cur_scale"] == 1:
                return None
            scale, last = float(scaler["cur_scale"]), scaler.get("last_overflow_iter")
            # their counter is of iterations since the last overflow, ours of good steps since the scale changed
            good = 0 if last is None else int(scaler["cur_iter"]) - ahead - int(last)
            return {
                "scale": scale,
                "good": float(good % int(scaler["scale_window"]) if good > 0 else good),
                "patience": float(scaler.get("cur_hysteresis", config.hysteresis)),
            }

    def tensors(self, kinds: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(`KIND.NAME`, tensor) of every parameter of ours: its float32 master as `model.`, its `step.`, and states.

        kinds   of the states, as "exp_avg"
        Memory: partitions are mapped from their files; a tensor that lies in two of them is copied.
        Raises ValueError naming the file and the state that is missing.
        """
        with reading(self.folder, "hold an optimizer"):
            shards, steps = self._shards(kinds)
        for kind, of_kind in shards.items():
            name = "model" if kind == "master" else kind
            for ours, tensor in self.opened.over(of_kind, adds_biases=kind == "master").tensors():
                yield f"{name}.{ours}", tensor
                if kind == "master":
                    yield f"step.{ours}", torch.tensor([steps], device="cpu")

    @cached_property
    def _zero(self) -> list[list[dict[str, Any]]]:
        """For each mp_rank, the optimizer state of each data-parallel rank; empty without such files."""
        found: dict[tuple[int, int], Path] = {}
        for file in self.folder.iterdir():
            if match := _ZERO_FILE.fullmatch(file.name):
                found[int(match[2]), int(match[1])] = file
        if not found:
            return []
        # by the greater of the two: a file that is lost must not make the world look smaller
        world = max(self._ranks[0].get("dp_world_size") or 0, max(dp for _, dp in found) + 1)
        for mp in range(len(self._ranks)):
            for dp in range(world):
                if (mp, dp) not in found:
                    raise ValueError(
                        f"{self.folder} must hold zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt, got "
                        f"{len(found)} others; {_ADVICE}"
                    )
        return [[self._zero_state(found[mp, dp]) for dp in range(world)] for mp in range(len(self._ranks))]

    def _zero_state(self, file: Path) -> dict[str, Any]:
        content = load_pickle(file)
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            raise ValueError(f"{file} must hold optimizer_state_dict, got none")
        return state

    def _shards(self, kinds: Sequence[str]) -> tuple[dict[str, Shards], float]:
        """Kind of state -> a tensor for each of their parameters; and how often the optimizer has updated."""
        wanted, tp = ("master", *kinds), self.opened.num_ranks
        shards: dict[str, Shards] = {kind: [{} for _ in range(tp)] for kind in wanted}
        steps = set()
        for mp in range(len(self._ranks)):
            groups = self._groups(mp)
            for group, places in zip(groups, self._places(mp, len(groups)), strict=True):
                # one number of steps is read back, so groups that differ are refused below
                steps.add(group.step)
                self._refuse_other_optimizer(kinds, group.kinds.keys() - {"master"})
                for kind in wanted:
                    tensors = _cut(group.kinds[kind], places) if group.is_flat else group.kinds[kind]
                    for place, tensor in zip(places, tensors, strict=True):
                        # an embedding that is tied is in the first stage and in the last
                        shards[kind][mp % tp].setdefault(place.layer, {}).setdefault(place.name, tensor)
        if len(steps) != 1:
            raise ValueError(
                f"{self.folder}: all parameters must have the same number of optimizer steps, got {sorted(steps)}"
            )
        return shards, steps.pop()

    def _refuse_other_optimizer(self, wanted: Sequence[str], held: Set[str]) -> None:
        got = ", ".join(sorted(held)) or "none"
        for kind in wanted:
            if kind not in held:
                raise ValueError(
                    f"{self.folder}: the optimizer must have {kind} for each parameter, got {got}; {_ADVICE}"
                )
        # Adam's average of gradients has the name of Lion's
        if wanted and "exp_avg_sq" in held and "exp_avg_sq" not in wanted:
            raise ValueError(
                f"{self.folder}: the optimizer must have {', '.join(wanted)} alone for each parameter, as this "
                f"optimizer.type has, got {got}; {_ADVICE}"
            )

    def _groups(self, mp: int) -> list[_Parameters]:
        if self._zero:
            return _zero_groups(self._zero[mp])
        state = self._ranks[mp].get("optimizer")
        if not isinstance(state, dict) or not state:
            raise ValueError(f"{self.folder} must hold an optimizer's state, got weights alone; {_ADVICE}")
        # DeepSpeed's fused FP16 optimizer, then its unfused one
        if "fp32_groups_flat" in state:
            inner = state["optimizer_state_dict"]
            masters = [[flat] for flat in state["fp32_groups_flat"]]
            return _torch_groups(inner, masters, is_flat=True)
        if "fp32_groups" in state:
            return _torch_groups(state["optimizer_state_dict"], state["fp32_groups"], is_flat=False)
        return _torch_groups(state, self._weights_as_masters(mp, state), is_flat=False)

    def _weights_as_masters(self, mp: int, state: Mapping[str, Any]) -> list[list[Tensor]]:
        """In fp32 there are no separate master weights: the optimizer updates the weights."""
        if self.opened.dtype is not torch.float32:
            raise ValueError(
                f"{self.folder}: fp32 masters must be in an optimizer of 16-bit weights, got "
                f"{', '.join(sorted(map(str, state)))}; {_ADVICE}"
            )
        # files are numbered stage by stage
        shard = mp % self.opened.num_ranks
        groups = self._places_of_weights(mp, len(state["param_groups"]))
        return [[self.opened.shard(place.layer, shard)[place.name] for place in group] for group in groups]

    def _places(self, mp: int, num_groups: int) -> list[list[Place]]:
        """The parameters of each group in their order there."""
        # the order in which the optimizer's groups were flattened, where it was saved
        shapes = self._ranks[mp].get("param_shapes")
        if shapes:
            return [[_place(name, tuple(shape)) for name, shape in group.items()] for group in shapes]
        return self._places_of_weights(mp, num_groups)

    def _places_of_weights(self, mp: int, num_groups: int) -> list[list[Place]]:
        """The same from the weights, which a module lists in the order in which an optimizer takes them."""
        stage, shard = divmod(mp, self.opened.num_ranks)
        places = self._places_of_stages(shard)[stage]
        # without weight decay there is one
        if num_groups == 1:
            return [places]
        return [[place for place in places if place.decays], [place for place in places if not place.decays]]

    def _places_of_stages(self, shard: int) -> list[list[Place]]:
        """The parameters of each pipeline stage: whole layers, as many as its optimizer has values for."""
        layers = [
            [Place(i, n, tuple(t.shape)) for n, t in self.opened.shard(i, shard).items() if not is_buffer(n)]
            for i in self.opened.layer_indices()
        ]
        if self.num_stages == 1:
            return [[place for layer in layers for place in layer]]
        stages, tied = [], layers[0] if self.opened.config.tie_embeddings else []
        for stage in range(self.num_stages):
            size, is_flat = self._size(stage * self.opened.num_ranks + shard)
            # modules that are tied come first, in the last stage too
            places = list(tied) if stage and stage == self.num_stages - 1 else []
            # files name no stage of a layer; sizes tell how many layers a stage has
            while layers and _size_of(places + layers[0], is_flat) <= size:
                places += layers.pop(0)
            stages.append(places)
        if layers:
            raise ValueError(
                f"{self.folder}: the optimizers of {self.num_stages} pipeline stages must have every layer, got none "
                f"for layer {layers[0][0].layer}; {_ADVICE}"
            )
        return stages

    def _size(self, mp: int) -> tuple[int, bool]:
        """Contents of an optimizer: so many values, true; or so many parameters, false."""
        state = self._ranks[mp].get("optimizer") or {}
        if self._zero:
            return sum(t.numel() for group in _zero_groups(self._zero[mp]) for t in group.kinds["master"]), True
        if "fp32_groups_flat" in state:
            return sum(t.numel() for t in state["fp32_groups_flat"]), True
        inner = state.get("optimizer_state_dict", state)
        return sum(len(group["params"]) for group in inner["param_groups"]), False


def _size_of(places: Sequence[Place], is_flat: bool) -> int:
    return sum(place.numel for place in places) if is_flat else len(places)


def _zero_groups(ranks: Sequence[Mapping[str, Any]]) -> list[_Parameters]:
    """The groups of ZeRO 1 and 2 and of the bf16 engine, from the files of all data-parallel ranks.

    A rank has one partition of a group; ZeRO 1 before 2021-05 several, which alternate between the ranks.
    """
    # the later layout's name; the earlier one has several partitions a rank
    key = "single_partition_of_fp32_groups"
    masters = [
        [[part] for part in rank[key]] if key in rank else rank["local_sub_partitions_of_fp32_groups"] for rank in ranks
    ]
    states = [_partition_states(rank["base_optimizer_state"]) for rank in ranks]
    groups = []
    for number in range(len(masters[0])):
        kinds: dict[str, list[Tensor]] = {"master": []}
        steps = set()
        for index in range(len(masters[0][number])):
            for master, (state, step_of_groups) in zip(masters, states, strict=True):
                kinds["master"].append(master[number][index].detach())
                found = state[number][index]
                for kind, value in found.items():
                    if isinstance(value, Tensor) and kind != "step":
                        kinds.setdefault(kind, []).append(value.detach())
                steps.add(_count(found, step_of_groups[number], ranks[0].get("base_optimizer_state_step")))
        if len(steps) != 1:
            raise ValueError(f"the ranks of a group must have the same step, got {sorted(steps)}")
        groups.append(_Parameters(kinds, True, steps.pop()))
    return groups


def _partition_states(base: Any) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    """(group -> partition -> state, group -> its step): of torch's state_dict, or a list of states without padding."""
    if isinstance(base, list):
        # one state a group, or a list of them where a rank has several partitions
        groups = [group if isinstance(group, list) else [group] for group in base]
        return groups, [None] * len(groups)
    groups = [[base["state"].get(i, {}) for i in group["params"]] for group in base["param_groups"]]
    return groups, [group.get("step") for group in base["param_groups"]]


def _torch_groups(state: Mapping[str, Any], masters: Sequence[Sequence[Tensor]], *, is_flat: bool) -> list[_Parameters]:
    """The groups of a torch optimizer's state_dict, whose parameters are `masters`."""
    groups = []
    for group, of_group in zip(state["param_groups"], masters, strict=True):
        states = [state["state"].get(i, {}) for i in group["params"]]
        kinds: dict[str, Sequence[Tensor]] = {"master": [t.detach() for t in of_group]}
        for kind in set.intersection(*(set(each) for each in states)) if states else ():
            # a step may be a tensor too, but is a number of the group
            if kind != "step" and isinstance(states[0][kind], Tensor):
                kinds[kind] = [each[kind].detach() for each in states]
        steps = {_count(each, group.get("step"), None) for each in states}
        if len(steps) > 1:
            raise ValueError(f"the parameters of a group must have the same step, got {sorted(steps)}")
        groups.append(_Parameters(kinds, is_flat, steps.pop() if steps else 0.0))
    return groups


def _count(state: Mapping[str, Any], *others: Any) -> float:
    """An Adam's step: in its state, in its group (Apex's), or beside both."""
    step = next((value for value in (state.get("step"), *others) if value is not None), 0)
    return float(step)


def _cut(partitions: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
    """The tensors of a group out of its flat partitions; the rest at the end is padding."""
    held, wanted = sum(t.numel() for t in partitions), sum(place.numel for place in places)
    # more is padding
    if held < wanted:
        raise ValueError(f"a group of parameters must have {wanted} values, got {held}")
    tensors, index, start = [], 0, 0
    for place in places:
        parts, left = [], place.numel
        while left:
            # a parameter may begin in one rank's partition and end in the next one's
            part = partitions[index][start : start + left]
            parts.append(part)
            left -= part.numel()
            start += part.numel()
            if start == partitions[index].numel():
                index, start = index + 1, 0
        tensors.append((torch.cat(parts) if len(parts) > 1 else parts[0]).view(place.shape))
    return tensors


def _place(name: str, shape: tuple[int, ...]) -> Place:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"param_shapes must name parameters as LAYER.NAME, got {name}")
    return Place(int(match[1] or 0), match[2], shape)


def _natural(value: Any, entry: str) -> int:
    # True is an int in Python
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{entry} must be a number of steps, got {value!r}")
    return value
