"""Evaluation of a Powertrain model on lm_eval's tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.runtime.extras import require
from powertrain.train.config.files import check_tasks
from powertrain.train.config.yaml_source import did_you_mean
from powertrain.train.evaluation import Scorer, evaluating


def run_tasks(
    scorer: Scorer,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Task -> metric -> value, by lm_eval; groups of tasks have a line of their own where lm_eval gives one.

    folder   of YAML files that define further tasks;  limit: documents of each task
    Raises MissingExtra without lm_eval, ValueError for a task that it does not know.
    """
    if not tasks:
        raise ValueError("tasks must name at least one task of lm_eval, got none")
    manager = manager_of(tasks, folder)
    from lm_eval import simple_evaluate

    with evaluating(scorer.model):
        results = simple_evaluate(
            lm_eval_model(scorer), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager,
            random_seed=None, numpy_random_seed=None, torch_random_seed=None, log_samples=False, bootstrap_iters=1000,
        )  # fmt: skip
    assert results is not None
    return {task: _numbers(values) for task, values in results["results"].items()}


def manager_of(tasks: Sequence[str], folder: Path | None = None, *, argument: str = "tasks") -> Any:
    """lm_eval's TaskManager, which knows these tasks. Raises as `run_tasks`, calling the tasks `argument`."""
    require("evaluate", argument)
    from lm_eval.tasks import TaskManager

    if folder is not None:
        check_tasks(folder)
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        where = "" if folder is None else f" or in {folder}"
        near = did_you_mean(unknown[0], manager.all_tasks)
        other = None if folder is None else next(folder.rglob("*.yml"), None)
        ending = "" if other is None else f"; lm_eval reads files whose names end in .yaml, and not {other}"
        raise ValueError(f"{argument} must be known to lm_eval{where}, got {', '.join(unknown)}{near}{ending}")
    return manager


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """`acc,none` -> acc; standard errors that are not known are left out."""
    kept = {name: value for name, value in values.items() if isinstance(value, (int, float)) and "," in name}
    return {name.removesuffix(",none"): float(value) for name, value in kept.items()}


def lm_eval_model(scorer: Scorer) -> Any:
    """The scorer as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(lm_eval_model(scorer), tasks=[...])`.

    Raises MissingExtra without lm_eval.
    """
    require("evaluate", "a model for lm_eval")
    from lm_eval.api.model import LM

    class PowertrainModel(LM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._device = scorer.device

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return scorer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return scorer.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate_until([request.args for request in requests])

    return PowertrainModel()
