"""Logs that end without an error: hangs and killed processes."""

from powertrain.doctor.causes.cause import Cause

_TE = "https://github.com/NVIDIA/TransformerEngine/issues/"

CAUSES = (
    Cause(
        "fused-kernels-stuck",
        r"compiling and loading fused kernels|Building extension module (?P<module>\w+)|"
        r"Using \S+ as PyTorch extensions root|Allowing ninja to set a default number of workers",
        "the log stops where torch builds an extension: it waits for a `lock` file whose maker was killed, or it "
        "compiles",
        "powertrain doctor --only builds --fix, in the folder of the training: it tells which of the two, and "
        "renames a "
        "lock that nobody holds; the waiting ranks then go on",
        "日志停在 torch 编译扩展处：它在等待已被杀死的进程留下的 lock 文件，或正在编译",
        "在训练目录中执行 powertrain doctor --only builds --fix：它会判断是哪一种，并重命名无人持有的 lock，等待的"
        "进程随即继续",
        "https://github.com/EleutherAI/gpt-neox/issues/1334",
        last=True,
        unless=r"Loading extension module|Time to load \w+ op|ninja: no work to do",
        confidence="likely",
    ),
    Cause(
        "wheel-stuck",
        r"Building wheel for (?P<package>[\w.-]+) \((?:setup\.py|pyproject\.toml)\)(?!.*(?:error|done|finished))",
        "pip shows nothing while {package} compiles: for an hour or more, or for ever when memory ran out",
        "powertrain build -- <the same command>   # shows each file, its time and memory, and does not run out of it",
        "pip 在编译 {package} 时不显示任何输出：可能要一小时以上；内存耗尽时会永远卡住",
        "powertrain build -- <原命令>   # 显示每个文件的时间和内存，且不会耗尽内存",
        _TE + "976",
        last=True,
        unless=r"finished with status|Created wheel for|Successfully (?:built|installed)",
        confidence="likely",
    ),
)  # fmt: skip
