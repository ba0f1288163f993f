"""Hooks of mkdocs.

`on_files` adds the front page, the examples, the gallery and the reference. `on_post_build` checks
that the reference has every public name.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

GALLERY = reference.ROOT / "dist" / "gallery"
SOURCES = "https://github.com/trainable-candle/trainable-candle/blob/main/"


def page(path: str) -> str:
    """Return the text of a README, with links that work on the site.

    Links to files in `docs/` become links to pages of the site. Links to other files become links
    to the source repository.
    """

    def link(match: re.Match[str]) -> str:
        if match[1].startswith(("http", "#")):
            return match[0]
        target = normpath(join(dirname(path), match[1]))
        # The files of `docs/` are at the top of the site.
        path_on_site = target.removeprefix("docs/")
        is_in_docs = path_on_site != target
        return f"]({path_on_site})" if is_in_docs else f"]({SOURCES}{target})"

    return re.sub(r"\]\(([^)\s]+)\)", link, (reference.ROOT / path).read_text())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages.

    Raises:
        PluginError: If there is no gallery.
    """
    if not (GALLERY / "gallery.md").exists():
        raise PluginError(f"{GALLERY} has no gallery; run `make docs`, which makes it")
    # The texts of the pages by their paths in the site.
    made = {
        "index.md": page("README.md"),
        "examples.md": page("examples/README.md"),
        **reference.pages(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    # The gallery's page and its images.
    for file in sorted(GALLERY.glob("*.*")):
        files.append(File.generated(config, file.name, content=file.read_bytes()))
    config.nav = [*(config.nav or []), {"Reference": [*reference.pages()]}]
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Reject a site whose reference lacks a public name.

    Raises:
        PluginError: If names are missing; the message lists them.
    """
    missing = []
    for path in reference.pages():
        html = (Path(config.site_dir) / path).with_suffix(".html").read_text()
        # The page of a module is named after it, and that of the package itself `trainable_candle`.
        page_name = Path(path).name.removesuffix(".md")
        # `reference` calls the package itself "".
        module = "" if page_name == "trainable_candle" else page_name
        for name in reference.names(module):
            full = ".".join(filter(None, ("trainable_candle", module, name)))
            # The id is the full name, or the name alone if it is a module with a page of its own.
            if f'id="{full}"' not in html and f'id="{name}"' not in html:
                missing.append(full)
    if missing:
        raise PluginError(f"the reference lacks {', '.join(missing)}")
