"""A shared library, or a symbol, that the loader does not find."""

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.library_names import library_of_symbol, package_of_library


def _package(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    file = groups.get("library") or groups.get("dylib") or groups.get("needed") or ""
    get = package_of_library(file)
    return None if get is None else {"get": get}


def _defining(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    other = library_of_symbol(groups["symbol"])
    return None if other is None else {"other": other}


CAUSES = (
    Cause(
        "library-package",
        r"(?<!dlerror: )(?P<library>lib[\w+.-]{1,60}\.so[.\d]*): cannot open shared object file|"
        r"Library not loaded: \S{0,200}?(?P<dylib>lib[\w+.-]{1,60}\.dylib)|error while loading shared libraries: "
        r"(?P<needed>[\w+.-]{1,60}):",
        "{library}{dylib}{needed} is not installed, or not where the loader looks",
        "{get}; where it is there: add its folder to LD_LIBRARY_PATH (find / -name '{library}{dylib}{needed}*')",
        "没有安装 {library}{dylib}{needed}，或加载器不在其目录中查找",
        "{get}；若已存在：将其目录加入 LD_LIBRARY_PATH（find / -name '{library}{dylib}{needed}*'）",
        "https://man7.org/linux/man-pages/man8/ld.so.8.html",
        derive=_package,
        derives=("get",),
    ),
    Cause(
        "symbol-library",
        r"(?<![\w.+-])(?=[\w.+-]{0,200}\.so)(?P<library>[\w.+-]+): undefined symbol: (?P<symbol>\w+)",
        "another {other} is loaded first than the one {library} was built with, or none: {symbol} is missing",
        "unset LD_LIBRARY_PATH; install {other} and {library} from one source (all conda or all pip) and of one date; "
        "LD_PRELOAD of the right {other} for now; ldd names the one that is found",
        "先加载的 {other} 不是编译 {library} 时所用的，或没有：缺少 {symbol}",
        "unset LD_LIBRARY_PATH；{other} 与 {library} 从同一来源（全部 conda 或全部 "
        "pip）安装同期版本；可先用 LD_PRELOAD 指定"
        "正确的 {other}；ldd 显示实际找到的",
        "https://github.com/pytorch/pytorch/issues/7758",
        confidence="likely",
        derive=_defining,
        derives=("other",),
    ),
    Cause(
        "shared-library",
        r"(?<!dlerror: )(?P<library>lib[\w+-]{1,60}\.so[.\d]*): cannot open shared object file",
        "{library} is not installed, or not where the loader looks",
        "find / -name '{library}*' 2>/dev/null; add its folder to LD_LIBRARY_PATH, or install the package that has it",
        "没有安装 {library}，或加载器不在其目录中查找",
        "find / -name '{library}*' 2>/dev/null；将其目录加入 LD_LIBRARY_PATH，或安装包含它的包",
        "https://man7.org/linux/man-pages/man8/ld.so.8.html",
    ),
    Cause(
        "undefined-symbol-other",
        r"(?<![\w.+-])(?=[\w.+-]{0,200}\.so)(?P<library>[\w.+-]+): undefined symbol: (?P<symbol>\w+)",
        "{library} was built with another version of a library than the one that is loaded: {symbol} is missing",
        "ldd and LD_DEBUG=libs show which library should have it; install builds made for each other, or build it "
        "again",
        "{library} 编译时所用的某个库与当前加载的版本不同：缺少 {symbol}",
        "用 ldd 和 LD_DEBUG=libs 找出应含该符号的库；安装相互匹配的版本，或重新编译",
        "https://man7.org/linux/man-pages/man8/ld.so.8.html",
        confidence="possible",
    ),
)
