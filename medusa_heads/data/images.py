"""Images of a conversation: where each lies, and how it is read when its row is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import url2pathname

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.errors import first_line
from medusa_heads.files import half_character

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image as Picture

IMAGES_COLUMN = "images"
"""Of a table of conversations: the images of those parts that do not say where theirs lies."""

Source = dict[str, Any]
"""Where an image lies, in the form of `datasets`: a `path`, or the `bytes` of a file."""

_KEYS = ("path", "url", "image")  # of a part, any of which may say it
_FILE = "file://"
_MARK = "<image>"  # in place of parts, in texts
_SHOWN = 80  # characters of a name, which may be a whole image in base64
_LONGEST = 200  # of a path


def with_images(
    messages: Sequence[dict[str, Any]], given: Any, folder: str | None
) -> tuple[list[dict[str, Any]], list[Source]]:
    """Messages whose parts say no more than that there is an image, and where these lie, in order:
    in the parts, or in the column beside the messages. Without parts each `<image>` in a text of
    somebody else than the assistant is one. Relative paths start in `folder`. A BadRow where there
    are more or fewer images than parts, or one lies where nothing is read from: but where there is
    no part at all, the column may hold whatever else."""
    more = given if isinstance(given, list) else [given] if given else []
    more = [one for one in more if one is not None]
    if more and not has_parts(messages):
        messages = [_marked(message) for message in messages]
    if not has_parts(messages):
        with suppress(BadRow):
            return [*messages], [_source(one, folder) for one in more]
        return [*messages], []
    left, blank, found, told = iter(more), 0, [], []
    for message in messages:
        if isinstance(message["content"], list):
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    own = next((part[key] for key in _KEYS if part.get(key) is not None), None)
                    if own is None:
                        blank, own = blank + 1, next(left, None)
                    found.append(own)
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        told.append(message)
    if blank != len(more):
        raise BadRow(unlike(len(more), blank))
    return told, [_source(one, folder) for one in found]


def has_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some message of a conversation has an image."""
    return any(isinstance(message["content"], list) for message in messages)


def unlike(images: int, parts: int) -> str:
    """The sentence for rows with more or fewer images than parts that take them."""
    return f"{IMAGES_COLUMN!r} holds {images} images, and the messages have parts for {parts}"


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """A message with parts in place of marks."""
    first, *others = message["content"].split(_MARK)
    if not others or message["role"] == "assistant":
        return message
    pieces = [first, *(piece for other in others for piece in (None, other))]
    parts = [
        {"type": "image"} if piece is None else {"type": "text", "text": piece}
        for piece in pieces
        if piece != ""
    ]
    return {**message, "content": parts}


def _source(value: Any, folder: str | None) -> Source:
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    if isinstance(value, str):
        return {"path": _path(value, folder), "bytes": None}
    from datasets import Image

    try:
        return {"path": None, "bytes": Image().encode_example(value)["bytes"]}
    except Exception as error:  # of whatever a user has put there
        raise BadRow(f"an image is of type {type(value).__name__}, expected a path") from error


def _path(value: str, folder: str | None) -> str:
    """The absolute path of a file. A relative one stays in the folder of the data file, so that a
    corpus of somebody else reads nothing but what came with it; links are followed, since folders
    of images often lie on another disk."""
    shown = repr(value[:_SHOWN])
    if value.startswith(_FILE):
        _, _, rest = value.removeprefix(_FILE).partition("/")  # behind the name of a host, or none
        value = url2pathname(f"/{rest}")
    elif "://" in value or value.startswith("data:"):
        raise BadRow(
            f"the image {shown} is no file, and nothing is fetched: save it, and give its path"
        )
    if half_character(value) is not None or "\0" in value:
        raise BadRow(f"the image {shown} has a name that no file has")
    if os.path.isabs(value):
        return value
    if folder is None:
        raise BadRow(f"the image {shown} lies in no known folder: give its whole path")
    inner = os.path.normpath(value)
    if inner.split(os.sep)[0] == os.pardir:
        raise BadRow(
            f"the image {shown} lies outside the folder of its data file: give its whole path"
        )
    return os.path.join(folder, inner)


def read_image(source: Source) -> bytes:
    """The bytes of an image's file; a BadRow where there is none, or it cannot be read."""
    if source["bytes"] is not None:
        return bytes(source["bytes"])
    path = source["path"]
    if not os.path.isfile(path):  # nor a device, which may never end
        raise BadRow(f"there is no image {path[:_LONGEST]!r}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadRow(f"the image {path!r} cannot be read ({error.strerror})") from error


def picture(content: bytes, source: Source) -> Picture:
    """What a file shows, in the colours and the orientation in which transformers shows it to
    models; a BadRow where that is no image, or a damaged one."""
    from datasets import Image
    from transformers.image_utils import load_image

    try:
        shown: Picture = load_image(Image().decode_example({"bytes": content, "path": None}))
    except Exception as error:  # of damaged files Pillow raises whatever comes of them
        name = f"the image {source['path']!r}" if source["path"] else "an image of the row"
        raise BadRow(f"{name} is none that can be read ({_reason(error)})") from error
    return shown


def _reason(error: Exception) -> str:
    return "no known format" if "identify" in str(error) else first_line(error)


def stored_images() -> Any:
    """The type of a column of them: paths of files, or the bytes of such."""
    from datasets import Image, List

    return List(Image(decode=False))


def may_hold_images(rows: Dataset, columns: Sequence[str]) -> bool:
    """Whether conversations in these columns of a table ask for images, at a glance: rows of others
    begin as a tokenizer begins them."""
    names = [name for name in columns if name in rows.column_names and name != "text"]
    mark = f"|{_MARK}" if IMAGES_COLUMN in rows.column_names and _has_some(rows) else ""
    return any(_asks(rows.data.column(name), '"image"' + mark, mark) for name in names)


def _has_some(rows: Dataset) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    given = rows.data.column(IMAGES_COLUMN)
    if pa.types.is_list(given.type) or pa.types.is_large_list(given.type):
        return bool(pc.any(pc.greater(pc.list_value_length(given), 0)).as_py())
    return bool(given.null_count < len(given))


def _asks(values: Any, pattern: str, mark: str) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, within = values.type, ("^image$" + mark, mark)
    if pa.types.is_struct(kind):
        fields = ((field.name, pc.struct_field(values, field.name)) for field in kind)
        return any(
            _asks(one, *within) or (name == "image" and one.null_count < len(one))
            for name, one in fields
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _asks(pc.list_flatten(values), *within)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())
    return False


def undecoded(rows: Dataset) -> Dataset:
    """The same table, whose images are read when somebody asks for them."""
    from datasets import Dataset

    features = _undecoded(rows.features)
    if features == rows.features:
        return rows
    info = rows.info.copy()
    info.features = features
    return Dataset(rows.data, info, indices_table=rows._indices, fingerprint=rows._fingerprint)


def _undecoded(feature: Any) -> Any:
    from datasets import Image

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, dict):
        return type(feature)({name: _undecoded(one) for name, one in feature.items()})
    if hasattr(feature, "feature"):
        within = copy(feature)  # which may have a length
        within.feature = _undecoded(feature.feature)
        return within
    return feature
