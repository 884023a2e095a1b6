"""Frames of a traceback: whose code asked for what failed."""

import re

# Python's, IPython's and rich's way to name a frame's file
_FRAME = re.compile(
    r"File \"?(?P<python>[^\"\n]{1,400}?)\"?, line \d|"
    r"(?:^|\s)(?P<ipython>[~\w./\\:-]{1,400}\.py)(?:[ :]\d*)? in |"
    r"[│|] ?(?P<rich>[\w./\\:-]{1,400}\.py):\d"
)
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?P<package>\w[\w-]{0,80})")
# frames of code that only hands a call on: nn.Module's __call__ and __getattr__
_FORWARDING = re.compile(
    r"torch[/\\]nn[/\\]modules[/\\]module\.py|torch[/\\]utils[/\\]_contextlib\.py|accelerate[/\\]hooks\.py"
)
_LIBRARY = re.compile(r"[/\\]python3?\.?\d*[/\\](?P<module>\w+)")


def caller(above: list[str]) -> str:
    """The package, or the file, of the last frame in these lines; "the code that asks for it" where there is none.

    In "cannot import name", "has no attribute" and "unexpected keyword" that frame is the one that asked.
    """
    for line in reversed(above):
        if match := _FRAME.search(line):
            path = match["python"] or match["ipython"] or match["rich"]
            if _FORWARDING.search(path):
                continue
            if package := _PACKAGE.search(path):
                return package["package"].removesuffix(".py")
            if _LIBRARY.search(path) or path.startswith("<"):
                continue
            return re.split(r"[/\\]", path)[-1]
    return "the code that asks for it"


def called(above: list[str]) -> str | None:
    """The name that the line of code above the message calls: "Trainer" of `trainer = Trainer(`."""
    for line in reversed(above):
        code = re.sub(r"^[\s>│❱|-]*\d*\s*", "", line)
        if match := re.search(r"(?:^|[=\s.(])([A-Za-z_]\w{0,80})\($", code.rstrip()) or re.search(
            r"(?:^|= ?|return )(?:\w+\.)*([A-Za-z_]\w{0,80})\(", code
        ):
            return match[1] if match[1] != "super" else None
        if _FRAME.search(line):
            return None
    return None


def packages(above: list[str]) -> list[str]:
    """The packages of the frames in these lines, outermost first, each once in a row; Python's own are left out."""
    found: list[str] = []
    for line in above:
        match = _FRAME.search(line)
        package = match and _PACKAGE.search(match["python"] or match["ipython"] or match["rich"])
        if package and found[-1:] != [package["package"]]:
            found.append(package["package"])
    return found


def remote_code(above: list[str]) -> bool:
    """Whether the last frame is of code that a model brought along."""
    last = next((line for line in reversed(above) if _FRAME.search(line)), "")
    return "transformers_modules" in last


# names that programs give to folders of their own, and no package on the index that is used here has
_OWN = {
    "utils", "util", "src", "lib", "libs", "model", "models", "modules", "config", "configs", "common", "dataloader",
    "losses", "networks", "tools", "scripts", "options", "helpers",
}  # fmt: skip


def own_module(root: str, above: list[str]) -> bool:
    """Whether a missing module is a folder of the program itself: a part of the last frame's path, or named as such."""
    for line in reversed(above):
        if match := _FRAME.search(line):
            path = match["python"] or match["ipython"] or match["rich"]
            if _PACKAGE.search(path) or _LIBRARY.search(path) or path.startswith("<"):
                return False
            return root in _OWN or root in re.split(r"[/\\]", path)[:-1]
    return root in _OWN


_LOGGED = re.compile(r"Warning: |^\W{0,3}(?:WARN(?:ING)?|INFO|DEBUG|ERROR)\b|\d\d:\d\d:\d\d")
_CODE = re.compile(r"[=(.]|^(?:return|assert|raise) ")


def code_line(above: list[str]) -> str:
    """The line of the program that the last frame shows, at most 100 characters; "" where none is shown."""
    for line in reversed(above[-4:]):
        code = re.sub(r"^(?:\[\w+\d*\]:|\(\w+ pid=\d+\))?[\s>│❱|-]*\d*\s*", "", line).strip(" │")
        # a warning's line, or a log's, is no code of this error
        if _FRAME.search(line) or _LOGGED.search(line):
            return ""
        if _CODE.search(code) and not re.fullmatch(r"[\s^~]*", code) and not code.startswith("raise "):
            return code if len(code) <= 100 else code[:97] + "..."
    return ""
