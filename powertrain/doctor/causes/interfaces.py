"""A library lacks a name or an argument that its caller uses: which of the two is too old, if releases show it."""

from functools import partial

from powertrain.doctor import releases
from powertrain.doctor.assertions import failed_check
from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.frames import called, caller, packages, remote_code
from powertrain.doctor.known_names import RENAMED

_PATTERN = (
    r"cannot import name '(?P<imported>\w+)' from (?:partially initialized module )?'(?P<module>[\w.]+)'|"
    r"module '(?P<of>\w[\w.]{0,80})' has no attribute '(?P<attribute>\w+)'|"
    r"No module named '?(?P<gone>[\w.]{1,80})|"
    r"(?<![\w.])(?P<function>[\w.]{1,100})\(\) got an unexpected keyword argument '(?P<argument>\w+)'|"
    r"(?:type object )?'(?P<class>[\w.]{1,80})' (?:object )?has no attribute '(?P<field>\w+)'"
)


def _change(groups: dict[str, str], excerpt: Excerpt) -> releases.Change | None:
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
        function = called(excerpt.above) or function
    return releases.lacking_parameter(function, groups["argument"], "\n".join(excerpt.above))


def _lacks(side: str, python: bool, groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    change = _change(groups, excerpt)
    if change is None or change.side != side or (change.package == "Python") != python:
        return None
    instead = change.instead or RENAMED.get(change.name, "")
    caller_name = caller(excerpt.above)
    # a library that asks itself has files of two releases
    caller_name = (
        f"{caller_name}'s other files (two releases are mixed)" if caller_name == change.package else caller_name
    )
    return {
        "package": change.package,
        "name": change.name,
        "when": change.when,
        "when_zh": change.when_zh,
        "spec": change.spec,
        "caller": caller_name,
        "instead": f" (now {instead})" if instead else "",
        "instead_zh": f"（现为 {instead}）" if instead else "",
    }


def _both(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    module = groups.get("module") or groups.get("of") or ""
    caller_name = caller(excerpt.above)
    return {"package": releases.package_of(module), "caller": caller_name, **_likely_side(caller_name, excerpt)}


def _likely_side(caller_name: str, excerpt: Excerpt) -> dict[str, str]:
    """A library that asks is newer than what it asks; a program of one's own, or a model's code, is older."""
    own = caller_name.endswith(".py") or remote_code(excerpt.above)
    if own:
        return {
            "likely": "newer",
            "unlikely": "older",
            "likely_zh": "新",
            "remedy": "of that library the release that the program's requirements (or its date) name, an older, or "
            "a newer revision of the program; if it is older: pip install --upgrade",
        }
    return {
        "likely": "older",
        "unlikely": "newer",
        "likely_zh": "旧",
        "remedy": f"pip install --upgrade that library; if it is the newest: upgrade {caller_name}, or the release "
        "that it asks for",
    }


def _class_package(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    owner = groups.get("of") or groups.get("type") or groups.get("config") or ""
    package = releases.package_of_class(owner)
    return {"package": f"{package}'s {owner}" if package else owner, "caller": caller(excerpt.above)}


def _remote(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    return {} if remote_code(excerpt.above) else None


# a frame of these packages does not show which of two libraries is at fault
_NEUTRAL = {"torch", "_pytest", "pluggy", "ray", "IPython", "gradio", "click", "typer", "hydra", "fire", "wandb"}


def _inside(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    inside = [package for package in packages(excerpt.above) if package not in _NEUTRAL]
    if not inside:
        return None
    outer = inside[-2] if len(inside) > 1 else "the code that calls it"
    return {"inner": inside[-1], "outer": outer}


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
    Cause(
        "remote-code-other-release",
        r"^\W{0,9}(?:\[rank\d+\]: )?(?P<error>KeyError|AttributeError|TypeError|NameError|ImportError|IndexError)\b",
        "the code that the model brings along (trust_remote_code) fails in itself: it is of "
        "another time than the installed transformers",
        "the transformers of the model's page or config.json (transformers_version); a newer "
        "revision of the model's files (delete ~/.cache/huggingface/modules); transformers' own class without "
        "trust_remote_code",
        "模型自带的代码（trust_remote_code）自身出错：与所装 transformers 年代不同",
        "安装模型页面或 config.json（transformers_version）所示的 transformers；更新模型文件的 revision（删除 "
        "~/.cache/huggingface/modules）；或不用 trust_remote_code 的内置类",
        "https://github.com/OpenGVLab/InternVL/issues/612",
        confidence="likely",
        derive=_remote,
    ),
)

# what the tables do not tell: a name came later more often than it left
GENERAL = (
    Cause(
        "torch-attribute",
        r"module '(?P<module>torch[\w.]*)' has no attribute '(?P<name>\w+)'|"
        r"cannot import name '(?P<import>\w+)' from '(?P<of>torch(?!vision|audio|text|ao|tune|data)[\w.]*)'",
        "torch is most often too old for {caller} where a name is missing in it; an internal name may have left it",
        "pip install --upgrade torch (and what is compiled for it), or the release of {caller} "
        "that is as old as this torch",
        "torch 中缺少某个名称时，多为 torch 对 {caller} 来说太旧；内部名称也可能已被删除",
        "pip install --upgrade torch（及为其编译的包），或使用与当前 torch 同期的 {caller}",
        "https://github.com/hiyouga/LlamaFactory/issues/4958",
        confidence="likely",
        derive=_both,
        derives=("package", "caller"),
    ),
    Cause(
        "import-name",
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
        "{module} has no {name}: {package} is most often {likely} than {caller} was written for, sometimes {unlikely}",
        "{remedy} (pip show {package})",
        "{module} 中没有 {name}：{package} 多为比 {caller} 所适配的版本{likely_zh}",
        "安装 {caller} 的 requirements 所要求的 {package} 版本；或升级两者",
        "https://github.com/kylesargent/ZeroNVS/issues/35",
        confidence="likely",
        derive=_both,
        derives=("package", "caller", "likely", "unlikely", "likely_zh", "remedy"),
    ),
    Cause(
        "module-attribute",
        r"module '(?P<module>\w[\w.]{0,80})' has no attribute '(?P<name>\w+)'",
        "{module} has no {name}: {package} is most often {likely} than {caller} was written for, sometimes "
        "{unlikely}, or a file of your own has its name",
        "{remedy}; python -c 'import {module}; print({module}.__file__)' shows which file it is",
        "{module} 中没有 {name}：{package} 多为比 {caller} 所适配的版本{likely_zh}，或您有同名文件",
        "安装 {caller} 所要求的 {package} 版本，或升级两者；python -c 'import {module}; print({module}.__file__)' "
        "显示是哪个文件",
        "https://github.com/kylesargent/ZeroNVS/issues/35",
        confidence="likely",
        derive=_both,
        derives=("package", "caller", "likely", "unlikely", "likely_zh", "remedy"),
    ),
    Cause(
        "call-signature",
        r"\b(?P<call>[\w.]{1,100})\(\) got (?:an unexpected keyword argument|"
        r"multiple values for (?:keyword )?argument) '(?P<name>\w+)'|"
        r"(?P<function>[\w.]{1,100})\(\) takes (?:from )?\d+ (?:to \d+ )?positional arguments? but|"
        r"(?P<missing>[\w.]{1,100})\(\) missing \d+ required (?:positional|keyword-only) argument|"
        r"(?P<callee>[\w.]{1,100})\(\): incompatible function arguments",
        "{caller} calls {call}{function}{missing}{callee} with other arguments than it takes "
        "in the installed release: the library called is most often {likely} than {caller} was written for, sometimes "
        "{unlikely} (an extension: older than its Python part)",
        "{remedy}; an extension: build it again",
        "{caller} 调用 {call}{function}{missing}{callee} 时的参数与所装版本不符：被调用的库多为比 {caller} "
        "所适配的版本{likely_zh}（扩展：比其 Python 部分旧）",
        "安装 {caller} 所要求的该库版本，或升级两者；扩展需重新编译",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="likely",
        derive=_both,
        derives=("package", "caller", "likely", "unlikely", "likely_zh", "remedy"),
    ),
    Cause(
        "object-attribute",
        r"AttributeError: '(?P<of>(?!NoneType)\w+)' object has no attribute '(?P<name>\w+)'|"
        r"AttributeError: type object '(?P<type>\w+)' has no attribute '(?P<field>\w+)'|"
        r"'(?P<config>\w*Config)' object has no attribute '(?P<key>\w+)'",
        "{package} has no {name}{field}{key} in the installed release: {caller} was written for another one, or the "
        "object is wrapped (DDP, PEFT: .module, .base_model)",
        "the release of that class's library that {caller} asks for; upgrade {caller}; "
        "model.module for a wrapped model",
        "所装版本的 {package} 没有 {name}{field}{key}：{caller} 面向另一版本，或对象被包装（DDP、PEFT：.module、"
        ".base_model）",
        "安装 {caller} 所要求的该库版本；升级 {caller}；包装的模型用 model.module",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="possible",
        derive=_class_package,
        derives=("package", "caller"),
    ),
)

# where nothing else is known
LAST = (
    Cause(
        "bare-assertion",
        r"AssertionError\b",
        "the program's own check `{check}` failed: {meaning}",
        "{advice}",
        "程序自己的检查 `{check}` 未通过",
        "打印该条件中的各个值；若涉及文件则检查路径与文件名；若涉及大小则与配置比较",
        "https://docs.python.org/3/reference/simple_stmts.html#the-assert-statement",
        confidence="likely",
        derive=failed_check,
        derives=("check", "meaning", "advice"),
        fallback=True,
    ),
    Cause(
        "error-inside-library",
        r"^\W{0,9}(?:\[rank\d+\]: )?(?P<error>KeyError|AttributeError|TypeError|NameError|StopIteration|IndexError)\b",
        "the {error} arises inside {inner}, called by {outer}: most often the two are of "
        "different times, or {inner} is given what its release does not take",
        "pip install --upgrade {outer} {inner} together, or the releases that {outer} names in its requirements",
        "{error} 发生在 {inner} 内部，由 {outer} 调用：多为两者年代不同，或传入了该版本 {inner} 不接受的内容",
        "一起升级 {outer} 与 {inner}，或安装 {outer} 的 requirements 所要求的版本",
        "https://docs.python.org/3/library/exceptions.html",
        confidence="possible",
        derive=_inside,
        derives=("inner", "outer"),
    ),
)
