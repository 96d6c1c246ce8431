"""`medusa-heads chat CHECKPOINT`: a conversation with a target that drafts."""

from __future__ import annotations

import difflib
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from medusa_heads.cli.choices import print_choices
from medusa_heads.cli.decoding import describe, load_drafting_model, warn_if_lossy, with_own_drafter
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import (
    DecodingArguments,
    ModelArguments,
    check_encodable,
    decoder_options,
    generation_options,
)
from medusa_heads.plain_yaml import parse_yaml
from medusa_heads.settings import coerce, flag, mapping

if TYPE_CHECKING:
    from medusa_heads.cli.conversation import Conversation
    from medusa_heads.inference.models.assisted import AssistedModel

HELP = """\
/stats             counts and times of the last answer
/reset             forget the conversation
/save FILE         write the conversation as JSON
/set NAME VALUE    change a setting, such as temperature 0.7 (none: as if not given)
/set, /set NAME    list the settings, or show one
/help              this list
/quit              leave, as does Ctrl-D; Ctrl-C stops an answer"""


@dataclass
class ChatArguments(DecodingArguments):
    """Whom to talk to."""

    system: str | None = flag(None, "System message.")
    chat_template_kwargs: str | None = flag(
        None,
        "What the chat template is told besides the messages, as a JSON object, such as "
        "'{\"enable_thinking\": false}'.",
    )


def chat(arguments: ChatArguments) -> None:
    """Read lines and answer them until the input ends."""
    check_encodable(arguments.system or "")
    told = mapping(arguments, "chat_template_kwargs")
    from medusa_heads.cli.conversation import Conversation

    arguments = with_own_drafter(arguments)
    model, tokenizer = load_drafting_model(arguments)
    print_choices()
    warn_if_lossy(model)
    conversation = Conversation(model, tokenizer, arguments.system, told)
    session = Session(arguments, tokenizer, conversation)
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # arrow keys and history at the prompt, where Python has them
            import readline  # noqa: F401
        say(f"Talking to {model.target.name_or_path}. /help lists the commands, Ctrl-D leaves.")
    if not session.conversation.has_template:
        say("The target has no chat template: it continues the text, line after line.")
        say("To talk to it, put its template into its folder as chat_template.jinja.")
    while not session.done:
        try:
            line = input("> " if terminal else "").removeprefix("\ufeff")  # of a file's first line
        except EOFError:
            if terminal:
                say("")
            break
        except KeyboardInterrupt:  # at the prompt: begin the line anew
            say("")
            continue
        try:
            session.take(line)
        except (ValueError, OSError) as error:
            say("error: " + " ".join(str(error).split()))


@dataclass
class Session:
    """The commands and settings around a conversation."""

    arguments: ChatArguments
    tokenizer: Any
    conversation: Conversation
    turns: int = 0
    done: bool = False

    def take(self, line: str) -> None:
        """Answer a line, or follow it if it is a command."""
        if not line.startswith("/"):
            if line.strip():
                self._answer(line)
            return
        command, _, rest = line.strip().partition(" ")
        match command:
            case "/stats":
                self._show_stats()
            case "/reset":
                self.conversation.reset()
            case "/help":
                say(HELP)
            case "/quit":
                self.done = True
            case "/save" if rest:
                self.conversation.save(rest.strip())
                say(f"Written: {rest.strip()}")
            case "/save":
                raise ValueError("/save needs the name of a file")
            case "/set":
                self._set(*rest.split(maxsplit=1))
            case _:
                raise ValueError(f"unknown command {command}; /help lists them")

    def _answer(self, text: str) -> None:
        check_encodable(text)
        import torch

        from medusa_heads.cli.streaming import StepStreamer

        group = self.arguments.group
        streamer = StepStreamer(
            self.tokenizer, skip_prompt=True, group=group, skip_special_tokens=True
        )
        # A turn of its own seed can be had again, whatever was drawn before it.
        torch.manual_seed(self.arguments.seed + self.turns)
        options = generation_options(self.arguments, self.tokenizer)
        if not self.conversation.ask(text, streamer, options):
            streamer.end()
            say("(stopped)")
        self.turns += 1
        if self.arguments.stats:
            self._show_stats()

    def _show_stats(self) -> None:
        if not self.turns:
            raise ValueError("nothing has been answered yet")
        conversation = self.conversation
        if conversation.model.last_stats.total_seconds:  # an answer that was stopped has no total
            say(describe(conversation.model, self.arguments.draft_model))
        say(
            f"prompt: {conversation.prompt_tokens} tokens, {conversation.cached_tokens} of them "
            "in the cache already"
        )

    def _set(self, name: str = "", value: str = "") -> None:
        hints = get_type_hints(ChatArguments)
        fixed = {"system", "chat_template_kwargs", "capture", "draft_model"}
        for name_of_fixed in fixed | set(get_type_hints(ModelArguments)):
            del hints[name_of_fixed]
        hints = {key: hint for key, hint in hints.items() if not key.startswith("compile")}
        if not name:
            say("\n".join(f"{key} {getattr(self.arguments, key)}" for key in hints))
            return
        name = name.replace("-", "_")
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            raise ValueError(
                f"unknown setting {name!r}; "
                + (f"did you mean {close[0]!r}?" if close else "/set lists them")
            )
        if not value:
            say(f"{name} {getattr(self.arguments, name)}")
            return
        check_encodable(value)
        changed = replace(self.arguments, **{name: read_value(value, hints[name], name)})
        generation_options(changed, self.tokenizer)  # refuses at once, not in the next answer
        if decoder_options(changed) != decoder_options(self.arguments):
            self.conversation.model = self._rebuilt(decoder_options(changed))
            warn_if_lossy(self.conversation.model)
        self.arguments = changed

    def _rebuilt(self, options: dict[str, Any]) -> AssistedModel:
        """The same target, with what drafts for it made anew."""
        from medusa_heads.inference.lookup.corpus_files import find_corpus
        from medusa_heads.inference.models.drafted import DraftedModel
        from medusa_heads.inference.models.medusa import MedusaModel
        from medusa_heads.inference.models.training_free import TrainingFreeModel

        model = self.conversation.model
        kinds = {
            MedusaModel: "heads draft",
            DraftedModel: "a draft model drafts",
            TrainingFreeModel: "a drafter drafts",
        }
        if isinstance(model, TrainingFreeModel) == ("tree" in options):
            raise ValueError(f"{kinds[type(model)]} in this chat: begin another one to change that")
        if isinstance(model, DraftedModel):
            deterministic = options.pop("deterministic")
            if "corpus" in options or deterministic:
                what = "deterministic" if deterministic else "a corpus"
                raise ValueError(f"{what} is of heads or a drafter, and here a model drafts")
            return DraftedModel(model.target, model.drafts, **options)
        trusted = self.arguments.trust_remote_code
        corpus = find_corpus(options.get("corpus"), model.target, trust_remote_code=trusted)
        options = options | {"corpus": corpus}
        if isinstance(model, MedusaModel):
            return MedusaModel(model.target, model.heads, statistics=model.statistics, **options)
        assert isinstance(model, TrainingFreeModel)
        modules = model.modules if options["drafter"].startswith("mtp") else None
        return TrainingFreeModel(model.target, modules=modules, **options)


def read_value(text: str, hint: Any, name: str) -> Any:
    """What was typed, as a value of the setting's type."""
    try:
        value = None if text.lower() == "none" else parse_yaml(text)
    except ValueError:
        value = text
    if hint == list[str] and not isinstance(value, list):
        value = [] if value is None else [text]
    if hint is str or not isinstance(value, int | float | list | None):
        value = text
    return coerce(value, hint, name, text)


def say(text: str) -> None:
    """What the program itself has to tell goes to standard error, apart from the answers."""
    print(text, file=sys.stderr, flush=True)


main = command("medusa-heads chat", chat, f"{__doc__}\n\n{HELP}", "checkpoint")
