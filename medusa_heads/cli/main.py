"""The command `medusa-heads`: a table of verbs, each a file of its own, imported when it runs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

_PURPOSES = {
    "generate": "continue a prompt with a heads checkpoint",
    "chat": "talk to a target with a heads checkpoint",
    "serve": "answer requests for completions by HTTP",
    "tune": "measure which tree this machine decodes fastest with",
    "analyze": "expected speed-up, break-even batch size, memory",
    "calibrate": "measure heads on text, and store what they guess",
    "benchmark": "measure a heads checkpoint against transformers",
    "regenerate": "have the target answer prompts, to train on",
    "prepare-hidden": "write the target's hidden states, to train from",
    "env": "what this machine is, and what is chosen on it",
    "push": "put a heads checkpoint on a hub, with a model card",
    "pull": "bring a heads checkpoint from a hub into a folder",
    "convert": "read the heads of another project",
    "export": "write a heads checkpoint for another engine",
}
VERBS = {
    verb: (f"medusa_heads.cli.verbs.{verb.replace('-', '_')}", said)
    for verb, said in _PURPOSES.items()
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code, 2 for a verb that does not exist."""
    verb, *rest = (list(sys.argv[1:]) if argv is None else list(argv)) or ["--help"]
    if verb in ("-h", "--help"):
        print(_help())
        return 0
    if verb == "--version":
        print(f"medusa-heads {metadata.version('medusa-heads')}")
        return 0
    if verb not in VERBS:
        print(f"medusa-heads: error: unknown verb {verb!r}; {_hint(verb)}", file=sys.stderr)
        return 2
    return import_module(VERBS[verb][0]).main(rest)


def _hint(verb: str) -> str:
    if "train" in verb:
        return "heads are trained with the command train-heads, draft models with train-draft"
    close = difflib.get_close_matches(verb, VERBS, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(VERBS)}"


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {purpose}" for verb, purpose in _PURPOSES.items())
    return (
        "usage: medusa-heads VERB [arguments]\n\n"
        "Decode faster with trained heads, token for token the same text.\n\n"
        f"verbs:\n{verbs}\n\n"
        "medusa-heads VERB --help lists a verb's arguments; --version prints the version.\n"
        "Two more commands: train-heads trains heads, train-draft a draft model."
    )


if __name__ == "__main__":
    sys.exit(main())
