"""`python -m benchmarks.build [--units N] [--rounds N] [-- COMMAND]`: what `powertrain build` costs a clean build.

The same command with and without it in turns, from an empty build folder each time; CPU time (user and system) of the
whole tree, launchers, watchdog and the builder's start included. By default ninja and g++ compile N units of templates
of a few seconds each; -- COMMAND measures another build, which must do all its work again each time.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

UNIT = """
#include <functional>
#include <map>
#include <regex>
#include <string>
template <int N> std::string match(const std::string &text) {{
    std::regex pattern("(a|b)*c" + std::to_string(N), std::regex::extended);
    std::map<std::string, std::function<std::string(std::string)>> table{{{{text, [](std::string s) {{ return s; }}}}}};
    return std::regex_replace(text, pattern, table[text]("x"));
}}
std::string unit{number}(const std::string &text) {{ return match<{number}>(text) + match<{number} + 1000>(text); }}
"""


def write_units(folder: Path, count: int) -> list[str]:
    """A build of `count` units, and the command that runs it from the start."""
    lines = ["rule cxx", "  command = g++ -O3 -std=c++17 -c $in -o $out"]
    for number in range(count):
        (folder / f"unit{number}.cpp").write_text(UNIT.format(number=number))
        lines.append(f"build unit{number}.o: cxx unit{number}.cpp")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    return ["sh", "-c", f"rm -f *.o .ninja_log && ninja -j {os.cpu_count()}"]


def cpu_seconds(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = asked.command or write_units(Path(folder), asked.units)
        place = Path.cwd() if asked.command else Path(folder)
        root = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "XDG_DATA_HOME": f"{folder}/data", "PYTHONPATH": str(root)}
        governed = [sys.executable, "-m", "powertrain", "build", "--", *command]
        times: dict[str, list[float]] = {"bare": [], "governed": []}
        for _ in range(asked.rounds):
            for name, each in (("bare", command), ("governed", governed)):
                times[name].append(cpu_seconds(each, place, environment))
                print(f"{name:9} {times[name][-1]:.2f} s CPU", flush=True)
    bare, ours = (statistics.median(times[name]) for name in ("bare", "governed"))
    print(f"medians: bare {bare:.2f}, governed {ours:.2f} s CPU: {100 * (ours / bare - 1):+.2f}%")


if __name__ == "__main__":
    main()
