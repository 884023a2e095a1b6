"""`python scripts/trl_losses.py`: TRL's losses and gradients of a seeded batch, into tests/losses/trl.json.

Needs TRL (the version is written into the file). Its trainers' own methods are called, with a stand-in for the trainer
and for the model, whose logits are the batch. In float64, so that the numbers are the formulas'.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PAIRS, LENGTH, VOCABULARY = 3, 6, 11


class _Accelerator:
    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather_for_metrics(self, x: Any) -> Any:
        return x

    gather = unwrap_model = gather_for_metrics

    def reduce(self, x: Any, reduction: str) -> Any:
        return x


def batch() -> dict[str, Tensor]:
    """Logits of policy and reference, tokens, which of them are completions; chosen first, then rejected."""
    generator = torch.Generator().manual_seed(7)
    shape = (2 * PAIRS, LENGTH, VOCABULARY)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]] * 2)
    mask[4] = torch.tensor([0, 1, 1, 1, 1, 0])
    return {
        "logits": torch.randn(shape, generator=generator, dtype=torch.float64),
        "ref_logits": torch.randn(shape, generator=generator, dtype=torch.float64),
        "tokens": torch.randint(VOCABULARY, (2 * PAIRS, LENGTH), generator=generator),
        "mask": mask,
        "old_noise": torch.randn(2 * PAIRS, LENGTH - 1, generator=generator, dtype=torch.float64) * 0.3,
        "advantages": torch.randn(2 * PAIRS, generator=generator, dtype=torch.float64),
    }


def _with_gradient(loss: Callable[[Tensor], Tensor], given: Tensor) -> dict[str, Any]:
    leaf = given.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.item(), "gradient": gradient.flatten().tolist()}


class _Model:
    training = True
    is_gradient_checkpointing = False

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits, aux_loss=None)


def _trainer(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(
        accelerator=_Accelerator(), aux_loss_enabled=False, _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, args=SimpleNamespace(gradient_checkpointing_kwargs=None, **facts.pop("args", {})),
        **facts,
    )  # fmt: skip


def dpo(found: dict[str, Tensor], loss_type: str, label_smoothing: float = 0.0) -> dict[str, Any]:
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        ld_alpha=None, precompute_ref_logps=False, ref_model=_Model(found["ref_logits"]), beta=0.3,
        f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], label_smoothing=label_smoothing,
        use_weighting=False, model=_Model(found["logits"]),
    )  # fmt: skip
    inputs = {"input_ids": found["tokens"], "attention_mask": torch.ones_like(found["mask"])}
    inputs["completion_mask"] = found["mask"]

    def loss(logits: Tensor) -> Tensor:
        return DPOTrainer._compute_loss(trainer, _Model(logits), inputs, False)

    return _with_gradient(loss, found["logits"])


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]


def per_sequence(found: dict[str, Tensor], average: bool) -> Tensor:
    mask = found["mask"][:, 1:]
    total = (log_probs(found["logits"], found["tokens"]) * mask).sum(1)
    return total / mask.sum(1) if average else total


def cpo(found: dict[str, Tensor], loss_type: str, label_smoothing: float = 0.0) -> dict[str, Any]:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0, accelerator=_Accelerator(), loss_type=loss_type, beta=0.3, simpo_gamma=0.4,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    given = per_sequence(found, loss_type == "simpo")
    return _with_gradient(lambda x: CPOTrainer.cpo_loss(trainer, *x.chunk(2))[0].mean(), given)


def orpo(found: dict[str, Tensor]) -> dict[str, Any]:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    trainer = SimpleNamespace(accelerator=_Accelerator(), beta=0.3)
    # in float32: TRL casts
    return _with_gradient(
        lambda x: -ORPOTrainer.odds_ratio_loss(trainer, *x.chunk(2))[0].mean().double(), per_sequence(found, True)
    )


def kto(found: dict[str, Tensor]) -> dict[str, Any]:
    from trl.trainer.kto_trainer import KTOTrainer

    kl = {"policy": torch.tensor([0.4, 0.9], dtype=torch.float64), "ref": torch.tensor([0.2, 0.3], dtype=torch.float64)}
    policy, reference = _Model(torch.empty(0)), _Model(found["ref_logits"])
    trainer = _trainer(
        precompute_ref_logps=False, ref_model=reference, model=policy, beta=0.3, calculate_KL=True, loss_type="kto",
        desirable_weight=1.5, undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: kl["ref" if model is reference else "policy"],
    )  # fmt: skip
    inputs = {"input_ids": found["tokens"], "attention_mask": torch.ones_like(found["mask"])}
    inputs |= {"completion_mask": found["mask"], "label": torch.tensor([True, True, False, False, True, False])}

    def loss(logits: Tensor) -> Tensor:
        policy.logits = logits
        return KTOTrainer._compute_loss(trainer, policy, inputs, False)

    return _with_gradient(loss, found["logits"])


def reward(found: dict[str, Tensor], center: float | None, with_margin: bool) -> dict[str, Any]:
    from trl.trainer.reward_trainer import RewardTrainer

    trainer = _trainer(args={"center_rewards_coefficient": center}, model=_Model(found["logits"]))
    inputs: dict[str, Any] = {"attention_mask": torch.ones(1)}
    if with_margin:
        inputs["margin"] = found["advantages"][:PAIRS]

    def loss(rewards: Tensor) -> Tensor:
        return RewardTrainer.compute_loss(trainer, _Model(rewards[:, None]), dict(inputs))

    return _with_gradient(loss, found["logits"][:, 0, 0])


def policy(found: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    given = log_probs(found["logits"], found["tokens"])
    inputs = {
        "prompt_ids": found["tokens"][:, :1], "prompt_mask": torch.ones_like(found["mask"][:, :1]),
        "completion_ids": found["tokens"][:, 1:], "completion_mask": found["mask"][:, 1:],
        "advantages": found["advantages"], "old_per_token_logps": given + found["old_noise"],
        "ref_per_token_logps": log_probs(found["ref_logits"], found["tokens"]),
        "num_items_in_batch": found["mask"][:, 1:].sum(),
    }  # fmt: skip

    def loss(leaf: Tensor) -> Tensor:
        trainer = _trainer(
            args={"use_bias_correction_kl": False, "delta": None}, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, use_vllm=False, max_completion_length=LENGTH,
            current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None), **options,
        )  # fmt: skip
        trainer.model = _Model(leaf)
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

    return _with_gradient(loss, given)


def distillation(found: dict[str, Tensor], beta: float) -> dict[str, Any]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    labels = torch.where(found["mask"].bool(), found["tokens"], -100)

    def loss(logits: Tensor) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(logits, found["ref_logits"], labels, beta=beta, temperature=1.5)

    return _with_gradient(loss, found["logits"])


def main() -> None:
    # GRPO's module imports it, and it needs a package that nothing here calls
    sys.modules["trl.generation.vllm_client"] = MagicMock()
    import trl

    found = batch()
    grpo = dict(beta=0.0, epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token", loss_type="grpo")
    fixtures = {
        "dpo": dpo(found, "sigmoid"), "dpo-robust": dpo(found, "robust", 0.1), "ipo": dpo(found, "ipo"),
        "cpo": cpo(found, "sigmoid"), "cpo-smoothed": cpo(found, "sigmoid", 0.1), "simpo": cpo(found, "simpo"),
        "orpo": orpo(found), "kto": kto(found),
        "reward": reward(found, None, False), "reward-margin-center": reward(found, 0.01, True),
        "grpo": policy(found, **grpo), "grpo-kl": policy(found, **grpo | {"beta": 0.04}),
        "gspo": policy(found, **grpo | {"importance_sampling_level": "sequence", "epsilon_low": 3e-2}),
        "dapo": policy(found, **grpo | {"loss_type": "dapo", "epsilon_high": 0.28}),
        "dr-grpo": policy(found, **grpo | {"loss_type": "dr_grpo"}),
        **{f"distillation-{beta}": distillation(found, beta) for beta in (0.0, 0.3, 1.0)},
    }  # fmt: skip
    # a source tree has no installed version
    beside = Path(trl.__file__).parent.parent / "VERSION"
    version = beside.read_text().strip() if beside.exists() else trl.__version__
    content = {"trl": version, "losses": fixtures}
    (ROOT / "tests" / "losses" / "trl.json").write_text(json.dumps(content) + "\n")
    subprocess.run(["git", "diff", "--stat", "tests/losses/trl.json"], check=True)


if __name__ == "__main__":
    main()
