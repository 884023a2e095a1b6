"""Names that a compiler does not find in a header: the library whose release does not match the source."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.frames import own_module

# beginnings of names, and the library that declares them
_LIBRARIES = (
    (r"cudnn", "cuDNN"),
    (r"nccl", "NCCL"),
    (r"cublas|cusparse|cusolver|cufft|curand", "CUDA"),
    (
        r"cuda|cu[A-Z]|CU_|CUDA_|cub\b|thrust|cooperative_groups|__nv_|nvtx|tex\dD|texture|__shfl|__ballot|CUtensor",
        "CUDA",
    ),
    (r"hip|roc|miopen", "ROCm"),
    (r"at\b|c10|torch|THC|TH[A-Z]|AT_|TORCH_|Tensor\b|caffe2|ScalarType|AutoDispatch", "torch"),
    (r"_?Py|tstate|PyThread|PyFrame|PyCode", "Python"),
    (r"npy_|NPY_|PyArray", "NumPy"),
    (r"cutlass|cute\b", "CUTLASS"),
    (r"llvm|mlir", "LLVM"),
)


def _library(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    names = [value.split("::")[0] for value in groups.values()] + list(groups.values())
    found = next((library for name in names for start, library in _LIBRARIES if re.match(start, name)), None)
    return None if found is None else {"library": found}


def _own(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    return {} if own_module(groups["module"].split(".")[0], excerpt.above) else None


CAUSES = (
    Cause(
        "headers-of-another-release",
        r"error: \W{0,3}(?:const |class |struct |union ){0,2}(?P<type>\w[\w:]{1,60})\W.{0,60}has no member(?: named)? "
        r"\W?(?P<member>\w+)|"
        r"error: .(?P<name>[A-Za-z_][\w:]{1,60}). (?:was not declared in this scope|"
        r"has not been declared|does not name a type|"
        r"is not a member of)|"
        r"error: identifier \"(?P<identifier>\w{2,60})\" is undefined|"
        r"error: no member named '(?P<missing>\w+)' in (?:namespace )?'(?P<space>[\w:]+)|"
        r"error: too (?:few|many) arguments (?:to|in) (?:function|call to) .(?P<call>[\w:]+)|"
        r"error: namespace \"(?P<place>[\w:]+)\" has no member",
        "the source and the installed {library} are of different times: {library}'s headers do not have what it uses",
        "a newer release of what is built (it follows new {library} releases), or the {library} "
        "of its time; git submodule "
        "update --init where it brings headers of its own",
        "源码与所装的 {library} 年代不同：{library} 的头文件没有其使用的内容",
        "使用更新的源码版本（适配新 {library}），或与源码同期的 {library}；自带头文件时 git submodule update --init",
        "https://github.com/nagadomi/distro/issues/11",
        confidence="likely",
        derive=_library,
        derives=("library",),
    ),
    Cause(
        "own-module-path",
        r"No module named '?(?P<module>[\w.]{1,80})",
        "{module} is a folder or file of the program itself, and Python does not look where it "
        "lies: the program was started "
        "from another folder, or as a file instead of a module",
        "start it from the repository's root: PYTHONPATH=. python path/script.py, or python -m "
        "package.script; pip install -e . "
        "where it has a setup.py or pyproject.toml",
        "{module} 是程序自己的目录或文件，而 Python 没有在其所在处查找：从别的目录启动，或以文件而非模块方式启动",
        "在仓库根目录启动：PYTHONPATH=. python path/script.py，或 python -m package.script；有 "
        "setup.py 或 pyproject.toml 时 "
        "pip install -e .",
        "https://docs.python.org/3/library/sys_path_init.html",
        confidence="likely",
        derive=_own,
    ),
)
