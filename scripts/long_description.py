"""README.md as the long description of the package: a hook of hatchling's metadata.

A package index resolves no link between files, so such links become text, or absolute where pyproject.toml gives the
repository's address: [project.urls] Repository.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str = "") -> str:
    """Markdown whose relative links lead into `repository`, or are text where that is empty."""
    to = rf"[\1]({repository}/blob/main/\2)" if repository else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)", to, text)


class LongDescription(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text()
        repository = metadata.get("urls", {}).get("Repository", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository)}
