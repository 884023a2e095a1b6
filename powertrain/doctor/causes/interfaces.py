"""A library lacks a name or an argument that its caller wants: which of the two is too old, where releases tell it."""

from functools import partial

from powertrain.doctor import releases
from powertrain.doctor.causes.cause import Cause, Passage
from powertrain.doctor.frames import called, caller
from powertrain.doctor.known_names import RENAMED

_PATTERN = (
    r"cannot import name '(?P<imported>\w+)' from (?:partially initialized module )?'(?P<module>[\w.]+)'|"
    r"module '(?P<of>\w[\w.]{0,80})' has no attribute '(?P<attribute>\w+)'|"
    r"No module named '?(?P<gone>[\w.]{1,80})|"
    r"(?<![\w.])(?P<function>[\w.]{1,100})\(\) got an unexpected keyword argument '(?P<argument>\w+)'|"
    r"(?:type object )?'(?P<class>\w{1,80})' (?:object )?has no attribute '(?P<field>\w+)'"
)


def _change(groups: dict[str, str], passage: Passage) -> releases.Change | None:
    if "imported" in groups:
        return releases.lacking_name(groups["module"], groups["imported"])
    if "attribute" in groups:
        return releases.lacking_name(groups["of"], groups["attribute"])
    if "gone" in groups:
        return releases.lacking_module(groups["gone"])
    if "field" in groups:
        return releases.lacking_attribute(groups["class"], groups["field"])
    function = groups["function"]
    if function == "__init__":
        # before Python 3.10 the message does not name the class
        function = called(passage.above) or function
    return releases.lacking_parameter(function, groups["argument"], "\n".join(passage.above))


def _lacks(side: str, python: bool, groups: dict[str, str], passage: Passage) -> dict[str, str] | None:
    found = _change(groups, passage)
    if found is None or found.side != side or (found.package == "Python") != python:
        return None
    instead = found.instead or RENAMED.get(found.name, "")
    return {
        "package": found.package,
        "name": found.name,
        "when": found.when,
        "when_zh": found.when_zh,
        "spec": found.spec,
        "caller": caller(passage.above),
        "instead": f" (now {instead})" if instead else "",
        "instead_zh": f"（现为 {instead}）" if instead else "",
    }


_DERIVES = ("package", "name", "when", "when_zh", "spec", "caller", "instead", "instead_zh")

CAUSES = (
    Cause(
        "library-older",
        _PATTERN,
        "{package} is too old for {caller}: {name} {when}",
        "pip install --upgrade '{spec}', or a release of {caller} that is as old",
        "{package} 对 {caller} 来说太旧：{name} {when_zh}",
        "pip install --upgrade '{spec}'，或使用同样旧的 {caller}",
        "https://github.com/huggingface/trl/issues/2207",
        confidence="likely",
        derive=partial(_lacks, "older", False),
        derives=_DERIVES,
    ),
    Cause(
        "library-newer",
        _PATTERN,
        "{package} is newer than {caller} was written for: {name} {when}{instead}",
        "upgrade {caller} or change its call; or pip install '{spec}'",
        "{package} 比 {caller} 所适配的版本新：{name} {when_zh}{instead_zh}",
        "升级 {caller} 或修改其调用；或 pip install '{spec}'",
        "https://github.com/huggingface/peft/issues/2663",
        confidence="likely",
        derive=partial(_lacks, "newer", False),
        derives=_DERIVES,
    ),
    Cause(
        "python-lacks",
        _PATTERN,
        "the Python that runs here is too old for {caller}: {name} {when}",
        "a newer Python (conda create -n new python=3.11, uv venv -p 3.11), or an older release of {caller}",
        "当前 Python 对 {caller} 来说太旧：{name} {when_zh}",
        "使用更新的 Python（conda create -n new python=3.11、uv venv -p 3.11），或较旧的 {caller}",
        "https://docs.python.org/3/whatsnew/index.html",
        derive=partial(_lacks, "older", True),
        derives=_DERIVES,
    ),
    Cause(
        "python-dropped",
        _PATTERN,
        "the Python that runs here is too new for {caller}: {name} {when}{instead}",
        "a newer release of {caller}, or an older Python ({spec}: conda create -n old python=..., uv venv -p ...)",
        "当前 Python 对 {caller} 来说太新：{name} {when_zh}{instead_zh}",
        "升级 {caller}，或使用更旧的 Python（{spec}）",
        "https://docs.python.org/3/whatsnew/index.html",
        derive=partial(_lacks, "newer", True),
        derives=_DERIVES,
    ),
)  # fmt: skip
