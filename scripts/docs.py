"""`python scripts/docs.py`: build the documentation with mkdocs into ./site, offline.

The pages are copied to build/site-pages at the paths they have in the repository: mkdocs takes pages from one folder
only, and docs/ links to the README, CONTRIBUTING.md and benchmarks/results beside it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
SOURCES = ("*.md", "examples/*.*", "docs/**/*.md", "docs/**/*.css", "benchmarks/**/*.md", "benchmarks/**/*.svg")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in SOURCES:
        for source in ROOT.glob(pattern):
            target = PAGES / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".md":
                # `no-run` is for tests/test_docs.py; the fences of pymdownx take a language alone
                target.write_text(source.read_text().replace("```python no-run\n", "```python\n"))
            else:
                shutil.copyfile(source, target)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    sys.exit(subprocess.call([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, env=environment))


if __name__ == "__main__":
    main()
