"""Links of the pages that lead out of docs/, for MkDocs: to the reference, or to a copy of the file.

In the repository [`Encoder`](../transformer_jax/nn/stacks.py) leads to a file. In the site it leads to the entry of
`Encoder` in the reference; a link to any other file of the repository leads to a copy of it under files/.
"""

import ast
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<to>[^)\s:]+)\)")
ROOT = pathlib.Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links out of docs/ rewritten."""

    def rewritten(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link["to"]))
        if path.startswith("docs/") or link["to"].startswith("#"):
            return link[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {link['to']} leads to no file.")
        if path.startswith("transformer_jax/") and path.endswith(".py"):
            return f"[{link['text']}][{identifier(path, link['text'].strip('`'))}]"
        copy = f"files/{path}" + (".txt" if path.endswith(".md") else "")  # what ends with .md would be a page
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
        depth = page.file.src_uri.count("/")
        return f"[{link['text']}]({'../' * depth}{copy})"

    return LINK.sub(rewritten, markdown)


def identifier(path: str, text: str) -> str:
    """The name in the reference of what a link's text names in a file: a symbol, a method of a class, or the module."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    names = [*_definitions(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)]
    for name in sorted(names, key=lambda name: name.count(".")):
        if name.split(".")[-1] == text:
            return f"{module}.{name}"
    return module


def _definitions(body: list[ast.stmt], prefix: str = ""):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
