"""lm_eval's view of a model of ours: import it where lm_eval is installed (the extra `evaluate`)."""

from typing import Any

from lm_eval.api.model import LM

from powertrain.train.evaluation import Scorer


class LmEvalModel(LM):  # type: ignore[misc]
    """An `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(LmEvalModel(scorer), tasks=[...])`."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self._device = scorer.device

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.scorer.loglikelihood([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self.scorer.loglikelihood_rolling([request.args[0] for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self.scorer.generate_until([request.args for request in requests])
