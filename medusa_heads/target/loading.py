"""A causal LM, or its tokenizer, by name: one sentence where there is none, soon where no hub
answers, and the commit it came from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from medusa_heads.contents import refuse_heads, refuse_judges, refuse_settings, said_of
from medusa_heads.errors import NoModel
from medusa_heads.files import at_home, expanded, is_path, read_json
from medusa_heads.hub_probe import asking_hub, on_hub
from medusa_heads.machine.choice import Choice, as_dtype, choose
from medusa_heads.machine.devices import find_device
from medusa_heads.machine.products import Shape, Use

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# What a configuration is asked for with.
_ASKED = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")


class StoredForm(NamedTuple):
    """What the configuration says of the weights: the dtype they are stored in, None where they are
    quantised, and sizes."""

    dtype: torch.dtype | None
    shape: Shape


def load_causal_lm(
    name: str,
    *,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    device: str | torch.device | None = None,
    use: Use | None = None,
    on_choice: Callable[[Choice], object] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal LM onto a device and in a dtype that are chosen for a use, where there is one
    and they are not given; see `TargetModel.from_pretrained`. Quantised weights, which have a dtype
    and a place of their own, are no question for that choice. Raises ValueError: nothing loadable
    stands there, or heads, or there is no such device or dtype here."""
    where = None if device is None else find_device(device)
    if any(kwargs.get(key) is not None for key in ("device_map", "quantization_config")):
        use = None
    refuse_heads(name)
    if expanded(name).is_file():
        raise NoModel(
            f"expected a causal language model (a hub id or a local folder) at {name!r}, found a "
            "file: name the folder of a model in transformers' format"
        )
    if is_path(name):
        name = str(expanded(name))
        if not Path(name).is_dir():
            raise NoModel(f"expected a causal language model in a folder {name!r}, found none")
    laid = kwargs.get("device_map")
    if isinstance(laid, Mapping):
        _check_devices(laid)
    model: Any
    trusted = {"trust_remote_code": trust_remote_code}
    with asking_hub(name, never=bool(kwargs.get("local_files_only"))) as options:
        kwargs |= options  # over a `local_files_only` that was left off
        form = None if use is None else _stored_form(name, **options | kwargs | trusted)
        if use is not None and form is not None and form.dtype is not None:
            choice = choose(
                use,
                device=where,
                dtype=dtype,
                stored=form.dtype,
                shape=form.shape,
                count_threads=on_choice is not None,
            )
            where, dtype = choice.device, choice.dtype
            if on_choice is not None:
                on_choice(choice)
        if options:  # handed on to all but the search for an adapter
            options = options | {"adapter_kwargs": dict(options)}
        try:
            if isinstance(laid, Mapping):
                _check_modules(laid, name, options | kwargs | trusted)
            model, read = _loader(name, options | kwargs | trusted).from_pretrained(
                name, dtype=dtype, output_loading_info=True, **trusted, **options | kwargs
            )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # of damaged files libraries raise whatever comes of them
            raise NoModel(
                f"expected a causal language model (a hub id or a local folder) at {name!r}: "
                + said_of(error, name)
            ) from error
    refuse_judges(model.config, name)
    refuse_settings(getattr(model, "generation_config", None), name)
    _refuse_made_up(model, read["missing_keys"], name)
    if on_hub(name):
        model.config._commit_hash = _commit(name, kwargs)
    if getattr(model, "_hf_peft_config_loaded", False):  # an adapter's, which says another name
        model.config._name_or_path, model.config._commit_hash = name, None
    if where is None and use is not None and getattr(model, "hf_quantizer", None) is None:
        where = find_device()
    if where is not None:
        model.to(where)
    return model


def _refuse_made_up(model: PreTrainedModel, missing: Collection[str], name: str) -> None:
    """Raises ValueError: weights were not read from the model's files, in whose place transformers
    puts random numbers, as where a classifier has no lm_head."""
    made_up = sorted({part for part, _ in model.named_parameters()} & set(missing))
    if made_up:
        adapted = getattr(model, "_hf_peft_config_loaded", False)
        raise NoModel(
            f"expected a causal language model at {name!r}, and transformers does not find "
            f"{made_up[0]!r} of a {type(model).__name__} in its files: "
            + ("merge the adapter into its model with peft, and " if adapted else "")
            + "name a model that was saved whole, with its lm_head"
        )


def stored_form(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> StoredForm | None:
    """How a causal LM is stored; None where no configuration can be read."""
    name, at = at_home(name), {} if revision is None else {"revision": revision}
    with asking_hub(name) as options:
        return _stored_form(name, trust_remote_code=trust_remote_code, **options, **at)


def _stored_form(name: str, **kwargs: Any) -> StoredForm | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, **{k: kwargs[k] for k in _ASKED if k in kwargs})
        # What says nothing is old, from when nothing was stored shorter.
        dtype = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
        if getattr(config, "quantization_config", None) is not None:
            return StoredForm(None, Shape.of(config))
        return StoredForm(as_dtype(dtype), Shape.of(config))
    except Exception:  # a repository's own code may raise anything
        return None


def loader_of(config: Any) -> Any:
    """What transformers loads a model with: as a causal LM, or as one that reads images too where
    it is known as nothing else."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loaders = AutoModelForCausalLM, AutoModelForImageTextToText
    known = (loader for loader in loaders if type(config) in loader._model_mapping)
    return next(known, AutoModelForCausalLM)


def _loader(name: str, kwargs: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with suppress(Exception):  # of what cannot be read loading says more
        asked = {key: kwargs[key] for key in _ASKED if key in kwargs}
        return loader_of(AutoConfig.from_pretrained(name, **asked))
    return AutoModelForCausalLM


def _check_devices(device_map: Mapping[str, Any]) -> None:
    """Raises ValueError: it names a device that is not here."""
    for place in device_map.values():
        if place is None or (place != "disk" and find_device(place).type == "meta"):
            raise ValueError(
                f"device_map lays modules on devices, cpu and disk, got {place!r}: name one of them"
            )


def _check_modules(device_map: Mapping[str, Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError: it names what a causal LM does not have, and transformers passes over."""
    from transformers import AutoConfig

    trusted = {"trust_remote_code": kwargs["trust_remote_code"]}
    try:
        config = AutoConfig.from_pretrained(name, **{k: kwargs[k] for k in _ASKED if k in kwargs})
    except (OSError, ValueError):
        return  # an adapter's folder has none of its own; of all others loading says what is amiss
    with torch.device("meta"):
        model: Any = loader_of(config).from_config(config, **trusted)
    named = model.named_modules, model.named_parameters, model.named_buffers
    known = {part for of in named for part, _ in of()}
    if unknown := [part for part in device_map if part not in known]:
        close = get_close_matches(str(unknown[0]), known, n=1)
        raise ValueError(
            f"device_map names {unknown[0]!r}, and the model has no such part"
            + (f": did you mean {close[0]!r}?" if close else "")
        )


def refuse_code_of(target: Mapping[str, Any]) -> None:
    """Raises ValueError for a target that a checkpoint's sidecar names, and the user does not:
    whoever made the checkpoint chose it, and with it the code that would be run."""
    name, revision = str(target.get("name_or_path")), target.get("revision")
    known_as = f"{name}@{revision}" if revision else name
    raise ValueError(
        "trust_remote_code runs the code that comes with the target, which the checkpoint's author "
        f"has named, and not you: pass target={known_as!r} (--target) as well, if you trust it"
    )


def _commit(repo_id: str, where: dict[str, Any]) -> str | None:
    """The commit that a model was just loaded at, which transformers 5.23 no longer says: the name
    of its folder in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    kwargs = {name: where[name] for name in ("revision", "cache_dir") if where.get(name)}
    found = try_to_load_from_cache(repo_id, "config.json", **kwargs)
    return Path(found).parent.name if isinstance(found, str) else None


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a causal LM, by hub id or local path; an adapter may have none
    but its target's. Raises OSError, ValueError: there is none."""
    name = at_home(name)
    try:
        return _tokenizer_at(name, revision, trust_remote_code)
    except (OSError, ValueError):
        with asking_hub(name) as options:
            adapted = adapted_by(name, revision, **options)
        if adapted is None:
            raise
    return _tokenizer_at(adapted, None, trust_remote_code)


def _tokenizer_at(name: str, revision: str | None, trusted: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase
    with asking_hub(name) as options:
        try:
            found = AutoTokenizer.from_pretrained(
                name, revision=revision or "main", trust_remote_code=trusted, **options
            )
        except (OSError, MemoryError, ImportError):  # the last says what to install
            raise
        except Exception as error:  # tokenizers raises a bare one of a file that is damaged
            said = " ".join(str(error).split()) or type(error).__name__
            cannot = f"the tokenizer of {name!r} cannot be loaded: {said}"
            if options and isinstance(error, ValueError):
                cannot = f"no tokenizer of {name!r} is in the local cache, and no hub can be asked"
            raise ValueError(cannot) from error
    longest: Any = found.model_max_length  # of what its configuration says, whatever that is
    if not isinstance(longest, int | float):
        raise ValueError(
            f"the tokenizer of {name!r} says model_max_length {longest!r}, expected a number: mend "
            "its tokenizer_config.json"
        )
    return found


def adapted_by(name: str, revision: str | None = None, **options: Any) -> str | None:
    """The model that an adapter of this name belongs to; None where the name is of no adapter."""
    from transformers.utils import find_adapter_config_file

    found = find_adapter_config_file(name, revision=revision, **options) if name else None
    base = None if found is None else read_json(found).get("base_model_name_or_path")
    return base if isinstance(base, str) and base != name else None


def find_tokenizer(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The same; None where there is none, or the model has no name."""
    with suppress(OSError, ValueError):
        if name:
            return load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    return None


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model inside wrappers: of several devices, of torch.compile (what is
    compiled is said here), and of peft, whose layers stay active within it. Raises ValueError: the
    adapter adds prompt tokens."""
    if hasattr(model, "_orig_mod") or hasattr(model, "module"):
        from accelerate.utils import extract_model_from_parallel

        model = extract_model_from_parallel(model, keep_torch_compile=False)
    if not hasattr(model, "peft_config"):
        return model
    active = getattr(model, "active_peft_config", None)
    if getattr(active, "is_prompt_learning", False):
        raise ValueError(
            f"the target's adapter ({type(active).__name__}) adds prompt tokens, which heads "
            "cannot follow: merge it or use a LoRA-style adapter"
        )
    base: Any = getattr(model, "get_base_model", None)
    return base() if callable(base) else model
