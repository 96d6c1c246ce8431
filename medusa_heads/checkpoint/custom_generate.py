"""What makes a checkpoint folder a decoding method of transformers:
`model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

transformers loads `custom_generate/generate.py` of a folder or repository, after checking that what
stands in `custom_generate/requirements.txt` is installed. The file hands on to a public name
of this package, which no later version moves, so that a checkpoint need not be written anew with
every fix; `inference/models/hub_form.py` does the work.
"""

from __future__ import annotations

from pathlib import Path

from medusa_heads.files import refuse_link, replace_file

GENERATE_FOLDER = "custom_generate"
GENERATE_FILE = f"{GENERATE_FOLDER}/generate.py"
REQUIREMENTS_FILE = f"{GENERATE_FOLDER}/requirements.txt"

_GENERATE = '''\
"""Decode with the heads of this folder or repository, through transformers' own generate():

    model.generate(**inputs, custom_generate="FOLDER OR REPOSITORY", trust_remote_code=True)

The model must be the one the heads were trained for; the text stays what it alone would write.
Options of the heads may be passed along: tree="dynamic:16", acceptance="typical", ...
"""

from medusa_heads import custom_generate as generate

__all__ = ["generate"]
'''
# The distribution by name alone: which of its versions reads a checkpoint, the sidecar says.
_REQUIREMENTS = "medusa-heads\n"


CUSTOM_GENERATE = {REQUIREMENTS_FILE: _REQUIREMENTS, GENERATE_FILE: _GENERATE}
"""Both files. Nobody else's are ever taken from a folder or a hub: they would be run."""


def write_custom_generate(folder: Path) -> None:
    """Write both files into a checkpoint folder.

    Raises:
        ValueError: a link stands in the place of their folder.
        OSError: the folder cannot be written.
    """
    refuse_link(folder / GENERATE_FOLDER)
    (folder / GENERATE_FOLDER).mkdir(parents=True, exist_ok=True)
    for name, content in CUSTOM_GENERATE.items():
        replace_file(folder / name, content)
