"""Secrets in what is written down: starred out by the name they stand under, and by their shape.

No list of shapes is ever complete. So records are made by allow-lists first, and masked after.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

MASK = "***"
_DEPTH = 64  # of nested data; what lies deeper is no record of anything

# The last words of a name: hub_token, apiKey, AWS_SECRET_ACCESS_KEY, --password.
_SECRET_NAME = re.compile(
    r"""(^|_)(token|secrets?|password|passwd|passwords|passphrase|pwd|apikey|api_keys?|access_keys?
        |private_keys?|wandb_key|secret_key|signing_key|license_key|account_key|credentials?|auth
        |authorization|bearer|cookies?|sas|pat
        |(hub|hf|auth|access|api|bearer|refresh|session|secret|id)_tokens)$""",
    re.VERBOSE,
)
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{8,} | api_org_[A-Za-z0-9]{8,}                        # Hugging Face
        | sk-(?=[\w-]*\d)[\w-]{8,} | sk-[\w-]{20,} | [sr]k_(?:live|test)_\w{8,}  # OpenAI, Stripe
        | gh[pousr]_\w{10,} | github_pat_\w{10,} | glpat-[\w-]{10,}           # GitHub, GitLab
        | (?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA)[A-Z0-9]{12,}  # AWS
        | xox[abeoprs]-[\w-]{8,} | AIza[\w-]{30,} | ya29\.[\w-]{10,}           # Slack, Google
        | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{16,} | nvapi-[\w-]{16,} | gsk_\w{20,} | r8_\w{20,}
        | wandb_v\d+_\w{20,} | dop_v1_\w{20,} | dckr_pat_[\w-]{16,}
        | (?=[a-z0-9/+]{0,39}[A-Z])(?=[A-Z0-9/+]{0,39}[a-z])(?=[A-Za-z/+]{0,39}\d)
          [A-Za-z0-9/+]{40}(?![\w/+=])
        | eyJ[\w-]{8,}(?:\.[\w-]*){1,4}                                     # JSON web tokens
    ) | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
# A name and password; of a URL that was taken for a path, a slash is lost.
_IN_URL = re.compile(r"(?<=[A-Za-z0-9]{2}:/)(/?)[^/\s]+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)(?=\S*[\d._~+/=-])[^\s\"'`,;]{6,}")
_HEADER = re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?)(?:[a-z]+\s+)?[^\s\"'`,;&]+")
# W&B's keys look like git's commits, which are told by what stands before them.
_FORTY_HEX = re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{40}(?![A-Za-z0-9])")
_COMMIT = re.compile(r"(?i)(@|(revision|commit|sha\d*|git|snapshots|blob|tree|resolve)\W{1,4})$")
_COMMIT_NAME = re.compile(r"(^|_)(sha\d*|revision|commit|commit_hash|oid)$")
# NAME=value, "name": "value", --name value; of which the value is not read yet. From each place a
# name of some length alone is looked for: else that takes the square of the text's length.
_NAMED = re.compile(
    r"""(?<![A-Za-z0-9])(?P<name>-{0,2}[A-Za-z][\w.-]{0,199})
        (?P<between>\\*["']?\s*[=:]\s*\\*["']? | \s+(?!-))""",
    re.VERBOSE,
)
_FLAG = re.compile(r"--?[\w.-]+")
_VALUE = re.compile(r"[^\s\"'&,;}\]\\]+")
_UNSET = {"None", "none", "null", "True", "true", "False", "false", MASK}


def masked(value: Any) -> Any:
    """`value`, plain data, with every secret in it starred out; it is not changed itself."""
    return _masked(value, "", 0)


def masked_text(text: str) -> str:
    """Text with every secret in it starred out: by its shape, or as `NAME=value`."""
    if text.lstrip()[:1] in ("{", "[", '"'):  # an argument that holds JSON
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            without = masked(content)
            return text if without == content else json.dumps(without)
    return _without_values(_without_shapes(text))


def shows_secret(text: str) -> bool:
    """Whether something in a text has the shape of a secret."""
    return _without_shapes(text) != text


def without_passwords(text: str) -> str:
    """Text with names and passwords in its URLs starred out."""
    return _IN_URL.sub(rf"\1{MASK}", text)


def _masked(value: Any, name: str, depth: int) -> Any:
    if depth > _DEPTH:
        return MASK
    if isinstance(value, Mapping):
        return {
            masked_text(key) if isinstance(key, str) else key: (
                _stars(item) if is_secret_name(str(key)) else _masked(item, str(key), depth + 1)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            # The value of a flag of its own: ["--hub_token", "hf_.."].
            _stars(item) if _is_secret_flag(before) else _masked(item, name, depth + 1)
            for before, item in zip(["", *value], value, strict=False)
        ]
    if isinstance(value, str):
        is_commit = _COMMIT_NAME.search(_plain(name)) and _FORTY_HEX.fullmatch(value)
        return value if is_commit else masked_text(value)
    return value


def _stars(value: Any) -> Any:
    """Of what stands under a secret's name nothing is kept but that it is not set."""
    return value if value is None or isinstance(value, bool) or value in ("", {}, []) else MASK


def is_secret_name(name: str) -> bool:
    """Whether what stands under this name is a secret."""
    return _SECRET_NAME.search(_plain(name)) is not None


def _is_secret_flag(flag: Any) -> bool:
    return isinstance(flag, str) and bool(_FLAG.fullmatch(flag)) and is_secret_name(flag)


def _plain(name: str) -> str:
    """hubToken, HUB-TOKEN and --hub_token alike."""
    name = unicodedata.normalize("NFKC", name)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", name).strip("_").lower()


def _without_shapes(text: str) -> str:
    text = _SHAPES.sub(MASK, text)
    text = without_passwords(text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _FORTY_HEX.sub(_unless_commit, text)


def _unless_commit(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 16) : found.start()]
    return found.group() if _COMMIT.search(before) else MASK


def _without_values(text: str) -> str:
    """What follows the name of a secret goes, up to the quote that it began with."""
    parts, read = [], 0
    for found in _NAMED.finditer(text):
        between = found["between"]
        spaced = between.isspace()
        if found.start() < read or (spaced and not found["name"].startswith("--")):
            continue
        if not is_secret_name(found["name"]):
            continue
        quote = between[-1] if between[-1] in "\"'" else None
        start, value = found.end(), None
        if quote is not None and (end := text.find(quote, start)) > start:
            end -= len(text[start:end]) - len(text[start:end].rstrip("\\"))
        elif value := _VALUE.match(text, start):
            end = value.end()
        else:
            continue
        if text[start:end] not in _UNSET:
            parts += [text[read:start], MASK]
            read = end
    return "".join([*parts, text[read:]])
