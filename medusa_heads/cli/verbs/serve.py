"""`medusa-heads serve CHECKPOINT`: completions by HTTP, as OpenAI's clients ask for them."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass

from medusa_heads.cli.choices import print_choices
from medusa_heads.cli.decoding import load_drafting_model, warn_if_lossy
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import DraftingArguments
from medusa_heads.settings import at_least, flag


@dataclass
class ServeArguments(DraftingArguments):
    """Where to listen, and how much to do at a time."""

    host: str = flag("127.0.0.1", "Address to listen at; the default is this machine alone.")
    port: int = flag(8000, "Port to listen at; 0: a free one.")
    max_rows: int = flag(8, "Texts that are written at a time.")
    queue: int = flag(64, "Requests that may wait; more are answered with 429.")
    cache_gb: float | None = flag(
        None, "Gigabytes that keys and values may take. Default: as many as max_rows texts need."
    )
    kept_gb: float = flag(
        1.0,
        "Gigabytes that keys and values of ended texts may take besides, which are kept for "
        "prompts that begin alike, such as a conversation's next turn; 0: none are.",
    )
    api_key_variable: str | None = flag(
        None, "Environment variable that holds an API key, without which nobody is answered."
    )
    allowed_origins: list[str] = flag(
        [],
        "Web pages that may ask, such as https://page.example, or '*': all; may be given again. "
        "Default: none.",
        action="extend",
    )
    model_name: str | None = flag(
        None, "Name of the model for clients. Default: the target's hub id or path."
    )


def serve(arguments: ServeArguments) -> None:
    at_least(arguments, 1, "max_rows", "queue")
    at_least(arguments, 0, "port")
    if arguments.cache_gb is not None and not 0 < arguments.cache_gb < math.inf:
        raise ValueError(f"cache_gb must be above 0 and finite, got {arguments.cache_gb}")
    if not 0 <= arguments.kept_gb < math.inf:
        raise ValueError(f"kept_gb must be at least 0 and finite, got {arguments.kept_gb}")
    api_key = None
    if arguments.api_key_variable is not None:
        api_key = os.environ.get(arguments.api_key_variable, "").strip()  # as headers are
        if not api_key:
            raise ValueError(
                f"the environment variable {arguments.api_key_variable} holds no API key: set it, "
                "or leave --api_key_variable out"
            )
    from medusa_heads.inference.models.assisted import find_server

    # Before seconds of loading.
    find_server().check_place(arguments.host, arguments.port, arguments.allowed_origins)
    model, tokenizer = load_drafting_model(arguments)
    warn_if_lossy(model)
    as_given = ("host", "port", "max_rows", "queue", "allowed_origins")
    server = model.server(
        tokenizer,
        **{name: getattr(arguments, name) for name in as_given},
        cache_bytes=None if arguments.cache_gb is None else round(arguments.cache_gb * 1e9),
        kept_bytes=round(arguments.kept_gb * 1e9),
        api_key=api_key,
        name=arguments.model_name,
    )
    print_choices()
    if server.alone is not None:
        print(f"Texts are written one at a time: {server.alone}.", file=sys.stderr)
    print(f"Listening at {server.url}/v1. Ctrl-C ends.", file=sys.stderr, flush=True)
    server.run()


main = command("medusa-heads serve", serve, __doc__, "checkpoint")
