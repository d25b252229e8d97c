"""What mkdocs calls: it puts the pages that come from the sources among those of docs/."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from builder import pages  # noqa: E402 - found by the path above


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's places for made pages."""
    made = pages.navigation()

    def fill(node: Any) -> Any:
        if isinstance(node, list):  # an entry that stands for several becomes these
            entries = [made[each] if isinstance(each, str) and each in made else [fill(each)] for each in node]
            return [entry for several in entries for entry in several]
        if isinstance(node, dict):
            return {name: fill(each) for name, each in node.items()}
        return made.get(node, node)

    config.nav = fill(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add made pages and the pictures."""
    for path, text in pages.generated().items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted((ROOT / pages.PICTURES).iterdir()):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in lists, take out what is for tests."""
    return pages.filled(markdown, page.file.src_uri)
