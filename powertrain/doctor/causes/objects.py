"""An object lacks an attribute, is not callable or cannot be indexed: the kind of object tells why."""

import re

from powertrain.doctor import releases
from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.frames import caller, packages

_BUILTIN = {
    "dict", "list", "tuple", "str", "int", "float", "bool", "set", "function", "method", "generator", "bytes", "type",
    "ndarray", "Tensor", "builtin_function_or_method", "property", "PosixPath", "OrderedDict", "Namespace",
}  # fmt: skip
_TRAINER = re.compile(r"\w*Trainer$")


def _builtin(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    kind = groups.get("of") or groups.get("callee") or groups.get("item") or ""
    if kind not in _BUILTIN:
        return None
    name = groups.get("name")
    wants = f"{name} of it" if name else "to call it" if "callee" in groups else "an item of it"
    return {"kind": kind, "wants": wants, "caller": caller(excerpt.above)}


def _private(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    owner = groups.get("of") or groups.get("module") or groups.get("source") or ""
    if owner in _BUILTIN or owner.startswith("_"):
        return None
    package = releases.package_of_class(owner) or (releases.package_of(owner) if "." in owner else "")
    if not package and _TRAINER.match(owner):
        package = "trl" if re.search(r"GRPO|DPO|SFT|PPO|KTO|ORPO|Reward", owner) else "transformers"
    caller_name = caller(excerpt.above)
    return {"package": package or f"the library of {owner}", "caller": caller_name}


def _config(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str]:
    package = releases.package_of_class(groups["of"]) or f"the library of {groups['of']}"
    return {"package": package, "caller": caller(excerpt.above)}


def _inside_package(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    names = packages(excerpt.above)
    return {"package": names[-1]} if names and names[-1] not in ("torch", "IPython") else None


CAUSES = (
    Cause(
        "undefined-in-library",
        r"NameError: name '(?P<name>\w+)' is not defined",
        "{package} itself uses {name}, which it takes from another library that has it elsewhere or no more, or whose "
        "import it passed over: {package} is most often older than the libraries it works on",
        "pip install --upgrade {package}; or the releases of the libraries that {package} names in its requirements "
        "(often an older transformers); the optional package that has {name}",
        "{package} 自身使用的 {name} 来自另一个库，而该库已移动或删除它，或其导入失败被忽略：{package} "
        "多为比所依赖的库旧",
        "pip install --upgrade {package}；或安装 {package} 的 requirements 所要求的库版本；安装提供 {name} 的可选包",
        "https://github.com/unslothai/unsloth/issues/1179",
        confidence="likely",
        derive=_inside_package,
        derives=("package",),
    ),
    Cause(
        "internal-name",
        r"module '(?P<module>[\w.]+)' has no attribute '(?P<a>_[a-z]\w*)'|"
        r"cannot import name '(?P<b>_[a-z]\w*)' from '(?P<source>(?!torch\.)[\w.]+)'|"
        r"AttributeError: '(?P<of>\w+)' object has no attribute '(?P<c>_[a-z]\w*)'",
        "{a}{b}{c} is an internal name of {package}, which changes without notice: the installed {package} is most "
        "often newer than {caller} was written for",
        "upgrade {caller}; or the release of {package} that its requirements name (an older one)",
        "{a}{b}{c} 是 {package} 的内部名称，会随版本变化：所装 {package} 多为比 {caller} 所适配的版本新",
        "升级 {caller}；或安装其 requirements 所要求的（较旧的）{package}",
        "https://github.com/modelscope/ms-swift/issues/4965",
        confidence="likely",
        derive=_private,
        derives=("package", "caller"),
    ),
    Cause(
        "value-of-another-kind",
        r"AttributeError: '(?P<of>dict|list|tuple|str|int|float|bool|set|function|method|generator|ndarray|Tensor|"
        r"OrderedDict|Namespace|PosixPath)' object has no attribute '(?P<name>\w+)'|"
        r"TypeError: '(?P<callee>dict|list|tuple|str|int|float|bool|set|Tensor|property|OrderedDict)' object is not "
        r"callable|"
        r"TypeError: '(?P<item>int|float|bool|function|method|type|set|generator|property|DynamicCache|\w+Output|"
        r"\w+Config|"
        r"BatchEncoding)' object is not subscriptable",
        "a {kind} stands where {caller} expects another kind of object ({wants} is used): the library that made "
        "it is of another release (a method that is a property now, a config or a cache that is an object or a dict "
        "now), or it was given unwrapped",
        "print type() of it there; the release of that library that {caller} names in its requirements; model_dump, "
        "vars or [key] for an object that is a dict now",
        "{caller} 期望另一种对象，得到的却是 {kind}：产生它的库属于另一版本（方法变为属性、配置或缓存变为对象或 dict）"
        "，或未包装",
        "在该处打印 type()；安装 {caller} 的 requirements 所要求的该库版本；现为 dict 的对象用 [key]",
        "https://github.com/meta-llama/llama-cookbook/issues/709",
        confidence="likely",
        derive=_builtin,
        derives=("kind", "wants", "caller"),
    ),
    Cause(
        "cache-form",
        r"'(?:tuple|list|NoneType)' object has no attribute '(?:get_seq_length|get_max_length|get_usable_length|update|"
        r"to_legacy_cache|get_max_cache_shape)'|'DynamicCache' object (?:is not subscriptable|has no attribute '\w+')|"
        r"'\w*Cache' object has no attribute '(?:get_max_length|seen_tokens|get_usable_length|key_cache|"
        r"from_legacy_cache)'",
        "the model's code and transformers disagree about the form of the KV cache: tuples before 4.36, Cache objects "
        "since, methods of which left in 4.48 and 5.0",
        "the transformers that the model's config.json names (transformers_version), or a newer revision of the "
        "model's code; use_cache=False in training",
        "模型代码与 transformers 对 KV 缓存形式的理解不同：4.36 前为元组，之后为 Cache 对象，其方法在 4.48、5.0 有删除",
        "安装模型 config.json 所示的 transformers（transformers_version），或更新模型代码；训练时 use_cache=False",
        "https://github.com/huggingface/transformers/issues/36071",
        confidence="likely",
    ),
    Cause(
        "config-field",
        r"AttributeError: '(?P<of>\w*Config)' object has no attribute '(?P<name>\w+)'",
        "{of} has no {name}: config.json (or a saved adapter) was written for another release of {package}, or the "
        "field is of a class that another release has; newer model code asks for it",
        "the release of {package} and of {caller} that the model's page names; a newer patch release where both are "
        "the newest; write the field into config.json where its value is known",
        "{of} 没有 {name}：config.json（或保存的适配器）面向另一版本的 {package}，或该字段属于另一版本的类",
        "安装模型页面所示的 {package} 与 {caller} 版本；若都已最新，安装更新的补丁版本；已知其值时写入 config.json",
        "https://github.com/huggingface/peft/issues/2477",
        confidence="likely",
        derive=_config,
        derives=("package", "caller"),
    ),
    Cause(
        "binding-mismatch",
        r"Unable to cast Python instance of type|Unregistered type : |incompatible function arguments\. The following "
        r"argument types are supported|generic_type: type \"\w+\" is already registered|"
        r"IndexError: (?:_Map_base|unordered_map)::at",
        "the Python part of a package and its compiled part (or two of its extensions) are of different builds: the "
        "types of one are unknown to the other",
        "uninstall every part of it and install one build: pip uninstall -y transformer-engine transformer-engine-cu12 "
        "transformer-engine-torch; for a source tree: remove build/ and the .so files, build again",
        "某个包的 Python 部分与编译部分（或两个扩展）来自不同构建：一方的类型另一方不认识",
        "卸载其全部组成部分后安装同一构建；源码目录：删除 build/ 与 .so 后重新编译",
        "https://github.com/flagos-ai/TransformerEngine-FL/issues/56",
        confidence="likely",
    ),
    Cause(
        "alias-not-imported",
        r"NameError: name '(?P<name>te|bnb|tex|sp|wandb|deepspeed|amp|xops|xformers|triton|tl|nvml|pynvml|mpu|ray|vllm|"
        r"sentencepiece|DeepSpeedCPUAdam|FusedAdam|FusedLayerNorm|causal_conv1d_fn|selective_scan_fn|LLM|"
        r"SamplingParams|"
        r"PeftModel|peft|apex)' is not defined",
        "the optional package behind `{name}` is not installed or does not load (te: transformer_engine, bnb: "
        "bitsandbytes, sp: sentencepiece), and the importing code passed over that",
        "python -c 'import <that package>' shows the reason; install it, or switch the option that needs it off",
        "`{name}` 对应的可选包未安装或无法加载（te：transformer_engine，bnb：bitsandbytes，sp：sentencepiece），"
        "导入失败被忽略",
        "python -c 'import <该包>' 查看原因；安装它，或关闭需要它的选项",
        "https://github.com/huggingface/accelerate/issues/1276",
        confidence="likely",
    ),
    Cause(
        "server-closed",
        r"RemoteDisconnected|Remote end closed connection without response|ServerDisconnectedError|"
        r"\b50[0234],? (?:Internal Server Error|Bad Gateway|Service Unavailable|Gateway)|"
        r"Server disconnected without sending a response|BadStatusLine",
        "the server that this program talks to (vLLM, an inference or reward server, a proxy) closed the connection: "
        "it crashed, ran out of memory, or was overloaded",
        "the first error in that server's own log; curl its /health; fewer requests at once and a longer timeout; no "
        "proxy for local addresses (NO_PROXY=localhost,127.0.0.1)",
        "所连接的服务（vLLM、推理或奖励服务、代理）关闭了连接：崩溃、内存不足或过载",
        "查看该服务日志中的第一个错误；curl 其 /health；减少并发、加长超时；"
        "本地地址不走代理（NO_PROXY=localhost,127.0.0.1）",
        "https://github.com/huggingface/trl/issues/3622",
        confidence="likely",
    ),
)  # fmt: skip
