"""What mkdocs asks while it builds the site: the changelog, which lies beside ``docs``, is a page of it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    text = Path(config.config_file_path).with_name("CHANGELOG.md").read_text(encoding="utf-8")
    text = text.replace("[docs/LOG.md](docs/LOG.md)", "`docs/LOG.md`").replace("](docs/", "](")
    files.append(File.generated(config, "changes.md", content=text))
    return files
