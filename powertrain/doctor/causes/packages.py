"""Packages, their installers and the files they leave: pip, conda, Windows, file systems, downloads."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt

_FA = "https://github.com/Dao-AILab/flash-attention/issues/"
_TORCH = "https://github.com/pytorch/pytorch/issues/"


def _asked_for(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    """pip lists releases that it passed over for this Python, asked for or not."""
    if "ignored" not in groups:
        return {}
    asked = [version for line in excerpt.below[:4] for version in re.findall(r"==([\w.]+)", line)]
    return {} if any(f"{version} Requires-Python" in groups["ignored"] for version in asked) else None


CAUSES = (
    Cause(
        "dubious-ownership",
        r"detected dubious ownership in repository at '(?P<path>[^']{1,200})'",
        "git refuses {path}, because another user owns it (a mounted folder in a container)",
        "git config --global --add safe.directory {path}",
        "git 拒绝 {path}，因为它属于另一个用户（容器中挂载的目录）",
        "git config --global --add safe.directory {path}",
        _FA + "224",
    ),
    Cause(
        "ssh-key",
        r"Permission denied \(publickey|Host key verification failed",
        "ssh does not let this user in: no key is known there, or the host's key is not known here",
        "use the https address of the repository, or ssh-add your key; ssh-keyscan HOST >> ~/.ssh/known_hosts",
        "ssh 拒绝登录：对方没有您的公钥，或本机不认识对方的主机密钥",
        "改用仓库的 https 地址，或 ssh-add 您的密钥；ssh-keyscan HOST >> ~/.ssh/known_hosts",
        "https://docs.github.com/en/authentication/troubleshooting-ssh",
    ),
    Cause(
        "certificate",
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        "a certificate cannot be verified: a proxy puts its own in, or this Python has no certificates",
        "SSL_CERT_FILE=<the proxy's CA file> (pip: PIP_CERT), or pip install --upgrade certifi; for flash-attn: "
        "download the wheel and pip install the file",
        "无法验证证书：代理替换了证书，或当前 Python 没有证书",
        "SSL_CERT_FILE=<代理的 CA 文件>（pip：PIP_CERT），或 pip install --upgrade certifi；flash-attn 可先下载 wheel "
        "再安装",
        _FA + "756",
    ),
    Cause(
        "network",
        r"Connection error, and we cannot find|you must first locally save the (?:tokenizer|model|text_encoder)|"
        r"Temporary failure in name resolution|Could not resolve host|Failed to establish a new connection|"
        r"Max retries exceeded with url|Failed to connect to \S+ port \d+|ReadTimeoutError|ConnectTimeoutError|"
        r"GnuTLS recv error|RPC failed; (?:curl|HTTP)|unable to access 'https?://|"
        r"We couldn't connect to 'https?://|outgoing traffic has been disabled|urlopen error|Couldn't reach 'https?:|"
        r"Could not reach|Read timed out|SSLError|Network is unreachable|"
        r"(?:Connection|Proxy|ConnectTimeout)Error\W{1,4}(?:HTTPS?Connection|Could|Couldn)",
        "the server could not be reached from here: no network, a proxy, or a firewall",
        "set https_proxy, or an index or mirror that can be reached (pip --index-url, HF_ENDPOINT); offline: bring the "
        "wheels or the folder, HF_HUB_OFFLINE=1",
        "从本机无法访问服务器：没有网络、需要代理，或被防火墙阻止",
        "设置 https_proxy，或可访问的镜像（pip --index-url，HF_ENDPOINT）；离线时自带 wheel 或目录，HF_HUB_OFFLINE=1",
        "https://github.com/haotian-liu/LLaVA/issues/1165",
        also=r"cached path|local_files_only|https?:|HTTPS?Conn|urlopen|\bpip\b|\bgit\b|huggingface|simple/|urllib|"
        r"requests|requirement",
    ),
    Cause(
        "no-distribution",
        r"No matching distribution found for (?P<package>[^\s;]+)|"
        r"Unable to find installation candidates for (?P<candidate>[\w.-]+)",
        "the index has no {package}{candidate} for this Python and platform: such a version does not exist there, or "
        "another index has it",
        "a version that the message lists; torch with +cuXXX: --index-url https://download.pytorch.org/whl/cuXXX; or "
        "another Python version",
        "索引中没有适合当前 Python 和平台的 {package}{candidate}：该版本不存在，或在另一个索引中",
        "使用消息中列出的版本；带 +cuXXX 的 torch：--index-url https://download.pytorch.org/whl/cuXXX；或更换 Python "
        "版本",
        "https://github.com/wusongbai139/controlnet_train_webUI/issues/1",
    ),
    Cause(
        "wheel-platform",
        r"(?P<wheel>[\w.+-]{1,200}\.whl) is not a supported wheel on this platform|"
        r"dependency is incompatible with the current platform: .{0,300}?(?P<file>[\w.+-]{1,200}\.whl)",
        "{wheel}{file} is for another Python version or system",
        "the wheel whose name has this Python's tag (cp312: python -V) and linux_x86_64; pip debug --verbose lists "
        "them",
        "{wheel}{file} 面向另一个 Python 版本或系统",
        "选择名称中含当前 Python 标记（cp312：python -V）和 linux_x86_64 的 wheel；pip debug --verbose 列出可用标记",
        "https://pip.pypa.io/en/stable/cli/pip_debug/",
    ),
    Cause(
        "python-version",
        r"requires a different Python: (?P<have>[\d.]+) not in '(?P<want>[^']{1,60})'|"
        r"requires Python '?[<>=~!][^']{1,40}'? but the running Python is|"
        r"Ignored the following versions that require a different python version: (?P<ignored>.{1,900})",
        "the package does not support this Python version",
        "an environment with a Python that it supports (uv venv --python 3.11), or an older version of the package",
        "该包不支持当前的 Python 版本",
        "使用其支持的 Python 建立环境（uv venv --python 3.11），或安装该包的旧版本",
        "https://pip.pypa.io/en/stable/cli/pip_install/",
        derive=_asked_for,
    ),
    Cause(
        "pip-conflict",
        r"The conflict is caused by:|^\s{2,}[\w.-]{2,60} [\w.+]{1,30} depends on \S|"
        r"ResolutionImpossible|which is incompatible\.|these package versions have conflicting dependencies",
        "the requirements contradict each other: two packages require different versions of a third (often torch)",
        "versions made for each other (powertrain doctor --only versions); the pinned one with --no-deps",
        "依赖互相矛盾：两个包要求第三个包（常为 torch）的不同版本",
        "选择相互匹配的版本（powertrain doctor --only versions）；对固定版本的包使用 --no-deps",
        "https://pip.pypa.io/en/stable/topics/dependency-resolution/",
        confidence="likely",
    ),
    Cause(
        "externally-managed",
        r"externally-managed-environment",
        "this Python belongs to the system, and pip may not install into it",
        "python3 -m venv env && . env/bin/activate, then the same command",
        "当前 Python 属于系统，pip 不能向其中安装",
        "python3 -m venv env && . env/bin/activate，然后执行原命令",
        "https://peps.python.org/pep-0668/",
    ),
    Cause(
        "disk-quota",
        r"Disk quota exceeded",
        "your share of this file system is used up",
        "quota -s; set HF_HOME, TMPDIR, TRITON_CACHE_DIR and PIP_CACHE_DIR to a larger file system",
        "您在该文件系统上的配额已用完",
        "quota -s；将 HF_HOME、TMPDIR、TRITON_CACHE_DIR、PIP_CACHE_DIR 设到更大的文件系统",
        "https://man7.org/linux/man-pages/man1/quota.1.html",
    ),
    Cause(
        "read-only",
        r"Read-only file system:? ?'?(?P<path>[^'\s]{0,200})",
        "the file system may only be read: {path}",
        "TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR, HF_HOME, TMPDIR in a folder that can be "
        "written",
        "文件系统为只读：{path}",
        "将 TRITON_CACHE_DIR、TORCHINDUCTOR_CACHE_DIR、TORCH_EXTENSIONS_DIR、HF_HOME、TMPDIR 设到可写目录",
        "https://github.com/foundation-model-stack/fms-hf-tuning/issues/367",
    ),
    Cause(
        "permission",
        r"\[Errno 13\] Permission denied: '(?P<path>[^']{1,300})'",
        "this user may not write {path}: another user made it, or HOME is / in a container",
        "chown it, or set HOME, TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR, HF_HOME or TMPDIR to a folder of your own; for "
        "pip: an environment of your own",
        "当前用户不能写入 {path}：由其他用户创建，或容器中的 HOME 为 /",
        "修改其所有者，或将 HOME、TRITON_CACHE_DIR、TORCH_EXTENSIONS_DIR、HF_HOME、TMPDIR 设为自己的目录；pip "
        "请使用自己的环境",
        _TORCH + "34238",
    ),
    Cause(
        "conda-unsolvable",
        r"Unsatisfiable(?:Error)?\b|specifications were found to be (?:in conflict|incompatible)|"
        r"Could not solve for environment specs|Found conflicts! Looking for incompatible",
        "conda finds no set of versions that satisfies every requirement: two of them, or the channels, contradict "
        "each other",
        "a new environment with Python and CUDA alone, then torch from pip; fewer exact pins (no build strings); "
        "one channel: -c conda-forge",
        "conda 找不到满足全部要求的版本组合：要求之间或频道之间互相矛盾",
        "新建只含 Python 和 CUDA 的环境，再用 pip 安装 torch；减少精确版本（不写 build 串）；只用一个频道：-c "
        "conda-forge",
        "https://docs.conda.io/projects/conda/en/stable/user-guide/troubleshooting.html",
    ),
    Cause(
        "conda-not-found",
        r"PackagesNotFoundError|ResolvePackageNotFound|CondaValueError: prefix|EnvironmentLocationNotFound",
        "conda's channels have no such package (or environment) for this platform and version",
        "conda search <package> -c conda-forge; the channel that has it (-c nvidia, -c conda-forge); torch from "
        "pip; conda env list",
        "conda 的频道中没有适合该平台和版本的包（或环境）",
        "conda search <包> -c conda-forge；指定含有它的频道（-c nvidia、-c conda-forge）；用 pip 安装 torch；conda "
        "env list",
        "https://docs.conda.io/projects/conda/en/stable/user-guide/troubleshooting.html",
    ),
    Cause(
        "conda-shell",
        r"Your shell has not been properly configured to use 'conda|Run 'conda init' before 'conda activate'|"
        r"\bconda: command not found",
        "this shell does not know conda: its start file was not read, as in scripts, jobs and Docker's RUN",
        "source \"$(conda info --base)/etc/profile.d/conda.sh\" first; or conda run -n ENV <command>",
        "当前 shell 未配置 conda（脚本、作业和 Docker RUN 中不会读取启动文件）",
        "先 source \"$(conda info --base)/etc/profile.d/conda.sh\"；或 conda run -n ENV <命令>",
        "https://docs.conda.io/projects/conda/en/stable/user-guide/troubleshooting.html",
    ),
    Cause(
        "distutils-gone",
        r"No module named '(?P<module>distutils[\w.]*|imp)'|module 'pkgutil' has no attribute 'ImpImporter'",
        "Python 3.12 removed distutils, imp and pkgutil.ImpImporter, which this package or an old setuptools still "
        "uses",
        "pip install --upgrade setuptools wheel; a newer version of the package; or Python 3.11",
        "Python 3.12 移除了 distutils、imp 和 pkgutil.ImpImporter，而该包或旧版 setuptools 仍在使用",
        "pip install --upgrade setuptools wheel；升级该包；或使用 Python 3.11",
        "https://docs.python.org/3/whatsnew/3.12.html",
    ),
    Cause(
        "setuptools-version",
        r"canonicalize_version\(\) got an unexpected keyword|use_2to3 is invalid|has no attribute '(?:msvccompiler|"
        r"_vendor)'|cannot import name '\w+' from 'setuptools[\w.]*'|Multiple top-level (?:packages|"
        r"modules) discovered in a flat-layout|configuration error: `project\.license|setuptools\.extern|"
        r"install_layout",
        "setup.py and the installed setuptools (or packaging) are of different times",
        "pip install --upgrade setuptools packaging wheel; if it is the newest that fails: pip install "
        "'setuptools<70'; with build isolation: a constraint file in PIP_CONSTRAINT",
        "setup.py 与所装 setuptools（或 packaging）的年代不符",
        "pip install --upgrade setuptools packaging wheel；若最新版失败：pip install 'setuptools<70'；"
        "隔离编译时通过 PIP_CONSTRAINT 指定",
        "https://setuptools.pypa.io/en/latest/history.html",
        confidence="likely",
    ),
    Cause(
        "wheel-missing",
        r"invalid command 'bdist_wheel'",
        "setup.py needs the package wheel, which is not in the Python that builds",
        "pip install wheel (and a setuptools from 70.1 on has it built in)",
        "setup.py 需要 wheel 包，而编译用的 Python 没有",
        "pip install wheel（setuptools 70.1 起自带）",
        "https://setuptools.pypa.io/en/latest/history.html",
    ),
    Cause(
        "build-backend",
        r"BackendUnavailable|Cannot import 'setuptools\.build_meta'|Backend '[\w.:]{1,60}' is not available|"
        r"No module named 'setuptools\.build_meta",
        "the package that builds (its backend, often setuptools) is not installed, or too old",
        "pip install --upgrade setuptools wheel, or what [build-system] requires in its pyproject.toml; or leave "
        "--no-build-isolation out",
        "负责编译的后端包（常为 setuptools）未安装或太旧",
        "pip install --upgrade setuptools wheel，或安装其 pyproject.toml 中 [build-system] 要求的包；或去掉 "
        "--no-build-isolation",
        "https://pip.pypa.io/en/stable/reference/build-system/",
    ),
    Cause(
        "package-metadata",
        r"has invalid metadata|has inconsistent (?:version|name|Metadata)|InvalidVersion: Invalid version|"
        r"Invalid version: '|InvalidRequirement|is not a valid editable requirement|Invalid requirement: '|"
        r"expected end or semicolon",
        "pip cannot read a package's version or requirements: newer pips refuse what older ones let through, or a "
        "line is misspelled",
        "a newer version of that package; pip install 'pip<24.1' for an old one; quotes around a name with <, > or "
        "[extras]",
        "pip 无法解析某个包的版本或依赖：新版 pip 拒绝旧写法，或该行有误",
        "升级该包；旧包可用 pip install 'pip<24.1'；带 <、> 或 [extras] 的名称要加引号",
        "https://pip.pypa.io/en/stable/news/",
        confidence="likely",
    ),
    Cause(
        "pip-hashes",
        r"THESE PACKAGES DO NOT MATCH THE HASHES|hash mismatch|md5 mismatch|SHA-?256 mismatch|"
        r"checksum (?:does not match|mismatch)",
        "the downloaded file is not the one that was expected: the download was cut short, a proxy or cache "
        "changed it, or it was replaced",
        "pip cache purge and again (--no-cache-dir); another mirror",
        "下载的文件与预期不符：下载被截断、被代理或缓存改变，或已被替换",
        "pip cache purge 后重试（--no-cache-dir）；更换镜像",
        "https://pip.pypa.io/en/stable/topics/secure-installs/",
        confidence="likely",
    ),
    Cause(
        "not-a-project",
        r"does not appear to be a Python project|Directory '[^']{1,200}' is not installable|"
        r"can't open file '[^']{1,200}setup\.py'",
        "the folder has no setup.py and no pyproject.toml: it is the wrong one, or the repository is not an "
        "installable package",
        "cd to the folder that has them; ls; pip install -r requirements.txt where there is only that",
        "该目录没有 setup.py 或 pyproject.toml：目录不对，或该仓库不能安装",
        "进入含有这些文件的目录；若只有 requirements.txt 则 pip install -r",
        "https://pip.pypa.io/en/stable/topics/local-project-installs/",
    ),
    Cause(
        "pip-uninstall",
        r"Cannot uninstall '?(?P<package>[\w.-]{1,60})|uninstall-no-record-file|uninstall-distutils-installed",
        "pip cannot remove the old version, which the system or conda installed without a list of its files",
        "pip install --ignore-installed <package>, or remove it with what installed it (apt, conda); better: a venv",
        "pip 无法删除旧版本：它由系统或 conda 安装，没有文件清单",
        "pip install --ignore-installed <包>，或用安装它的工具（apt、conda）删除；最好使用 venv",
        "https://pip.pypa.io/en/stable/cli/pip_uninstall/",
    ),
    Cause(
        "git-missing",
        r"Cannot find command 'git'|\bgit: command not found|Error \[(?:WinError 2\]|"
        r"Errno 2\]).{0,120}executing command git|Bad git executable",
        "git is not installed, or not on PATH",
        "apt install git (or conda install git), in the image too",
        "没有安装 git，或不在 PATH 中",
        "apt install git（或 conda install git），镜像中也要安装",
        "https://pip.pypa.io/en/stable/topics/vcs-support/",
    ),
    Cause(
        "archive-broken",
        r"BadZipFile|is not a zip file|has an invalid wheel|IncompleteRead|[Ii]ncomplete[- ]download|"
        r"ContentTooShortError|Connection broken: |tarfile\.ReadError|Error -3 while decompressing",
        "a downloaded archive is not whole: the connection broke, or the disk was full",
        "again, with --no-cache-dir; pip install --resume-retries 5; df -h; delete the half file",
        "下载的压缩包不完整：连接中断或磁盘已满",
        "加 --no-cache-dir 重试；pip install --resume-retries 5；df -h；删除不完整的文件",
        "https://pip.pypa.io/en/stable/cli/pip_install/",
        confidence="likely",
    ),
    Cause(
        "package-version-required",
        r"is required for a normal functioning of this module, but found|Found an incompatible version of|"
        r"only versions? (?:above|between|below|>=)|"
        r"pkg_resources\.(?:Contextual)?VersionConflict|\bVersionConflict\b|"
        r"requires \S{1,60} version [^ ]{1,40}.{0,20}but found",
        "a package found another version of a requirement than it allows",
        "install the version that the line names (pip install 'NAME==VERSION'), or upgrade the package that asks",
        "某个包发现依赖的版本不在其允许范围内",
        "安装该行所示的版本（pip install 'NAME==VERSION'），或升级提出要求的包",
        "https://huggingface.co/docs/transformers/troubleshooting",
    ),
    Cause(
        "package-required",
        r"packages? that were not found in your environment|but it was not found in your environment|"
        r"requires the `?(?P<package>[\w-]+)`? (?:library|package)(?: but|\. Please)|"
        r"Using `[^`]{1,80}`(?: or a `[^`]{1,60}`)? requires|"
        r"DistributionNotFound: The '(?P<distribution>[^']{1,60})|"
        r"PackageNotFoundError: (?:No package metadata was found for )?(?P<metadata>[\w.-]{1,60})|"
        r"\bPlease (?:pip )?install `?(?P<named>(?!apex|it\b|PyTorch with a)[\w.-]{1,40})`? "
        r"(?:to|with|via|using|by|from)\b|"
        r"(?:make sure (?:that )?you have (?:installed )?|requires )`?(?P<least>[\w.-]{1,40} ?>=? ?\d[\d.]*)`?",
        "a package that this step needs is not installed in the Python that runs here, or is too old: "
        "{package}{distribution}{metadata}{named}{least}",
        "python -m pip install --upgrade what the line names, with this very Python",
        "该步骤所需的包没有装在当前运行的 Python 中",
        "用同一个 Python 执行 python -m pip install 安装该行所示的包",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="likely",
    ),
    Cause(
        "python-older",
        r"unsupported operand type\(s\) for \|: '(?:type|_?\w*Meta|NoneType|builtin_function_or_method)'|"
        r"TypeError: '(?:type|ABCMeta|_\w+)' object is not subscriptable|"
        r"dataclass\(\) got an unexpected keyword argument '(?:kw_only|slots)'|cannot import name '(?:Self|"
        r"TypeAlias|ParamSpec|NotRequired|override)' from 'typing'",
        "the package uses Python that is newer than the Python that runs here",
        "a newer Python (3.10 or later: conda create -n new python=3.11), or an older version of the package",
        "该包使用了比当前 Python 更新的语法或库",
        "使用更新的 Python（3.10 以上：conda create -n new python=3.11），或较旧版本的包",
        "https://docs.python.org/3/whatsnew/3.10.html",
        confidence="likely",
    ),
    Cause(
        "pydantic-version",
        r"pydantic\.errors\.\w+|'FieldInfo' object has no attribute|'ModelMetaclass' object has no attribute|"
        r"PydanticImportError|PydanticUserError|`BaseSettings` has been moved|"
        r"cannot import name '\w+' from 'pydantic",
        "pydantic 2 is installed, and a package was written for pydantic 1 (or the other way round)",
        "upgrade that package, or pip install 'pydantic<2'",
        "安装的是 pydantic 2，而某个包面向 pydantic 1（或相反）",
        "升级该包，或 pip install 'pydantic<2'",
        "https://docs.pydantic.dev/latest/migration/",
        confidence="likely",
    ),
    Cause(
        "keras-3",
        r"Your currently installed version of Keras is Keras 3",
        "Transformers' TensorFlow part does not support Keras 3",
        "pip install tf-keras; or pip uninstall tensorflow keras: models on torch do not need them",
        "Transformers 的 TensorFlow 部分不支持 Keras 3",
        "pip install tf-keras；或 pip uninstall tensorflow keras：torch 模型不需要它们",
        "https://huggingface.co/docs/transformers/troubleshooting",
    ),
    Cause(
        "ssl-module",
        r"the ssl module (?:in Python )?is not available|SSL module is not available|No module named '_ssl'",
        "this Python was built without ssl, or its OpenSSL library is not found",
        "another Python (conda, apt, uv); when it is built: apt install libssl-dev first",
        "该 Python 编译时没有 ssl，或找不到 OpenSSL 库",
        "换用其他 Python（conda、apt、uv）；自行编译时先 apt install libssl-dev",
        "https://docs.python.org/3/library/ssl.html",
    ),
    Cause(
        "no-pip",
        r"No module named pip\b|ensurepip is not available|\bpip3?: command not found",
        "there is no pip for this Python",
        "python -m ensurepip --upgrade, or apt install python3-pip python3-venv; in uv's environments: uv pip",
        "该 Python 没有 pip",
        "python -m ensurepip --upgrade，或 apt install python3-pip python3-venv；uv 环境中使用 uv pip",
        "https://pip.pypa.io/en/stable/installation/",
    ),
    Cause(
        "windows-program",
        r"\[WinError 2\]",
        "a program that the build or script starts is not on PATH: on Windows most often nvcc, cl, ninja or git",
        "where nvcc, where cl, where ninja, where git; install the missing one, and start the x64 Native Tools "
        "prompt of Visual Studio; or build in WSL",
        "编译或脚本启动的程序不在 PATH 中：Windows 上多为 nvcc、cl、ninja 或 git",
        "用 where nvcc、where cl、where ninja、where git 检查；安装缺失者，并在 Visual Studio 的 x64 Native Tools "
        "提示符中运行；或在 WSL 中编译",
        "https://github.com/Dao-AILab/flash-attention/issues/203",
        confidence="likely",
    ),
    Cause(
        "windows-dll",
        r"\[WinError (?:126|127|182|193|1114|1455)\]|DLL load failed|Error loading \W\S{1,200}\.dll",
        "Windows cannot load a library: it, one that it needs (CUDA, Visual C++), or enough page file (1455) is "
        "not there, or it is for another Python or torch",
        "install the newest Visual C++ redistributable (x64); reinstall torch and the package for one CUDA; 1455: "
        "a larger page file",
        "Windows 无法加载某个库：它本身、其依赖（CUDA、Visual C++）或足够的页面文件（1455）缺失，或与 Python、"
        "torch 不符",
        "安装最新的 Visual C++ 运行库（x64）；按同一 CUDA 重装 torch 和该包；1455：增大页面文件",
        "https://docs.pytorch.org/docs/stable/notes/windows.html",
        confidence="likely",
    ),
    Cause(
        "windows-path-length",
        r"\[WinError 206\]|filename or extension is too long|Windows Long Path support",
        "a path or a command line is longer than Windows allows",
        "a short folder (C:\\b, TMP=C:\\t); LongPathsEnabled=1 in the registry; git config --system core.longpaths "
        "true; ninja off",
        "路径或命令行超过 Windows 的长度限制",
        "使用短路径（C:\\b，TMP=C:\\t）；注册表 LongPathsEnabled=1；git config --system core.longpaths true",
        "https://pip.pypa.io/warnings/enable-long-paths",
    ),
    Cause(
        "windows-access",
        r"\[WinError (?:5|32|1314)\]",
        "Windows refuses: the file is in use (32), protected (5), or symbolic links are not allowed to this user "
        "(1314)",
        "end the Python (notebook, editor) that uses it; an own venv; Developer Mode for symbolic links",
        "Windows 拒绝：文件被占用（32）、受保护（5），或该用户不能创建符号链接（1314）",
        "结束占用它的 Python（notebook、编辑器）；使用自己的 venv；符号链接需打开开发者模式",
        "https://huggingface.co/docs/huggingface_hub/guides/manage-cache",
    ),
    Cause(
        "no-locks",
        r"Stale file handle|No locks available|\[Errno (?:116|37)\]|unable to lock file",
        "the file system is a network's: it gives no locks, or a file was replaced on its server",
        "caches and build folders on a local disk: HF_HOME, TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR, TMPDIR; "
        "HDF5_USE_FILE_LOCKING=FALSE",
        "这是网络文件系统：不支持锁，或文件在服务器上被替换",
        "缓存和编译目录放在本地磁盘：HF_HOME、TRITON_CACHE_DIR、TORCH_EXTENSIONS_DIR、TMPDIR；"
        "HDF5_USE_FILE_LOCKING=FALSE",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        confidence="likely",
    ),
    Cause(
        "input-output",
        r"\[Errno 5\] Input/output error|Input/output error:",
        "the disk or the network file system did not deliver: a defect, or a mount that was lost",
        "dmesg | tail; another disk; mount again",
        "磁盘或网络文件系统读写失败：硬件故障或挂载断开",
        "dmesg | tail；更换磁盘；重新挂载",
        "https://man7.org/linux/man-pages/man3/errno.3.html",
        confidence="likely",
    ),
    Cause(
        "too-many-requests",
        r"\b429 (?:Client Error|Too Many)|Too Many Requests|toomanyrequests|rate limit (?:exceeded|reached)|"
        r"You have reached your pull rate limit",
        "the server answers no more for now: too many requests from this address or account",
        "wait; log in (hf auth login, docker login), which raises the limit; download once, and share the cache "
        "among ranks",
        "服务器暂时拒绝：该地址或账号请求过多",
        "等待；登录（hf auth login、docker login）可提高上限；只下载一次，各 rank 共用缓存",
        "https://huggingface.co/docs/hub/rate-limits",
    ),
    Cause(
        "forbidden",
        r"\b403 (?:Client Error|Forbidden)|HTTP Error 403|status code 403|AccessDenied\b|access denied by|"
        r"pull access denied|denied: requested access|unauthorized: authentication required|\b401 Unauthorized",
        "the server refuses this account: no right to it, no token, or the address is blocked there",
        "log in (hf auth login, docker login, a token with read access); accept the licence on its page; check the "
        "name",
        "服务器拒绝该账号：没有权限、没有 token，或地址被封锁",
        "登录（hf auth login、docker login，具读权限的 token）；在其页面接受许可；检查名称",
        "https://huggingface.co/docs/hub/security-tokens",
        confidence="likely",
    ),
)  # fmt: skip
