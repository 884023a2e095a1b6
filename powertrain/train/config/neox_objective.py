"""Objective of a GPT-NeoX config (train_impl), translated to ours. Facts from megatron/training.py."""

from typing import Any

from powertrain.train.config.neox_source import NeoXKeys

ONLINE = (
    "no server is asked for samples. Write completions with their advantages to files (powertrain preprocess "
    "--completions advantages) and name them with dataset_impl gpt2, train_data_paths, train_label_data_paths and "
    "train_reward_data_paths"
)


def objective(keys: NeoXKeys) -> str:
    """train.objective of train_impl."""
    known = {"normal": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward", "reinforce": "policy"}
    return str(keys.choice("train_impl", "normal", known))


def objective_section(keys: NeoXKeys) -> dict[str, Any]:
    """Keys of our section `train` that train_impl decides. GPT-NeoX's defaults of beta are 0.1, as ours."""
    name = objective(keys)
    if name == "dpo":
        free = bool(keys.get("dpo_reference_free"))
        return {"objective": name, "preference": {"beta": keys.get("dpo_beta", 0.1), "reference_free": free}}
    if name == "kto":
        words = "the sign of a reward decides; GPT-NeoX multiplies by its value, which is 1 or -1 in its own data"
        keys.add_row("train_impl", "changes numerics", words)
        settings = {
            "beta": keys.get("kto_beta", 0.1),
            "desirable_weight": keys.get("kto_desirable_weight", 1.0),
            "undesirable_weight": keys.get("kto_undesirable_weight", 1.0),
        }
        return {"objective": name, "kto": settings}
    if name == "policy":
        return {"objective": name, "policy": _reinforce(keys)}
    return {"objective": name}


# kl_impl -> train.policy.kl
_DIVERGENCES = {"abs": "abs", "mse": "k2", "kl": "k1"}


def _reinforce(keys: NeoXKeys) -> dict[str, Any]:
    """Rewards of files times log-probabilities: the ratio to the sampler is 1, so nothing is clipped."""
    full = {"full": "use mse, abs or kl: the divergence over the whole vocabulary is not part of train.policy"}
    weight = keys.number("kl_div_beta", 0.1, least=0)
    if keys.get("reinforce_leave_one_out"):
        todo = "subtract the mean reward of a prompt's other completions before they are written"
        keys.unsupported("reinforce_leave_one_out", True, todo)
    words = (
        "objective policy: rewards are advantages as they are in the files, where GPT-NeoX's server's have a mean "
        "subtracted; the mean over all tokens of a step, which GPT-NeoX divides by the rows of a micro-batch again; "
        "the gradient is theirs but for that factor, the printed loss another number"
    )
    keys.add_row("train_impl", "changes numerics", words)
    return {
        "ratio": "token", "average": "token", "kl_weight": weight,
        "kl": keys.choice("kl_impl", "mse", _DIVERGENCES, full),
    }  # fmt: skip
