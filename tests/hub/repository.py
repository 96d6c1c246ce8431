"""A repository of the local hub, kept in memory as git keeps it: commits of whole trees, and names
that point to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

LARGE = (".safetensors", ".png")


@dataclass
class Repository:
    """Commits by id, each a tree of files, and the branches and pull requests that name them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, tree: dict[str, bytes], message: str) -> str:
        parent = self.refs.get(ref, "")
        listed = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in tree.items()})
        sha = hashlib.sha1(f"{parent} {message} {listed}".encode()).hexdigest()
        self.commits[sha], self.messages[sha], self.refs[ref] = dict(tree), message, sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)

    def tree(self, revision: str = "main") -> dict[str, bytes]:
        """The files at a revision."""
        return self.commits[self.refs.get(revision, revision)]


def git_oid(data: bytes) -> str:
    """What git calls these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
