"""Everything a run needs to go on exactly where it was: weights, optimizer, step, random numbers, settings.

    run/state/step-00000100/
        model.safetensors       weights under our own names, in the dtype they are trained in, a tied one once
        optimizer.safetensors   "<parameter>/<entry>" (a quantized entry's parts: "<parameter>/<entry>/<part>")
        rng.safetensors         torch's generators
        state.json              step, settings, optimizer groups, what is not a tensor
        config.json ...         of the model, and the tokenizer's files: `load_model` reads a state as it does a model directory

Data needs no position: a batch is a pure function of its index. A state appears whole, by a rename, or not at all,
and older ones go only after it is there, so there is one to resume from whenever the process is killed.
Only plain tensors and JSON are read; nothing in a state can run code.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from llamalab.convert import clean_name, unwrap
from llamalab.errors import UserError
from llamalab.files import new_directory
from llamalab.runtime import versions

if TYPE_CHECKING:
    from llamalab.tokenizer import Tokenizer

#: Settings that change how a run is watched, kept or executed, but not what it computes.
MAY_CHANGE = frozenset(
    {"out", "resume", "keep", "save_every", "eval_every", "eval_tokens", "sample_every", "sample_tokens", "prompt",
     "device", "compile", "checkpoint_activations"}
)

#: Quantized optimizer entries that may be rebuilt, and where their classes live.
_QUANTIZED = {"OptimState8bit": "torchao.optim.subclass_8bit"}


def save_state(
    run_dir: str | Path, step: int, model: nn.Module, optimizer: Any, config: Any, keep: int = 2, tokenizer: Tokenizer | None = None
) -> Path:
    """Write run_dir/state/step-<step>, then remove all but the `keep` newest.

    Args:
        step: optimizer steps done, which is the index of the next one.
        config: the recipe's settings, a dataclass or a dict of plain values; compared when resuming.

    Raises:
        UserError: keep < 1, or an optimizer entry of a kind that can't be written.
    """
    if keep < 1:
        raise UserError(f"keep must be at least 1, got {keep}")
    path = Path(run_dir) / "state" / f"step-{step:08d}"
    if not path.exists():
        tensors, entries = _optimizer_entries(model, optimizer)
        with new_directory(path) as tmp:
            save_file(weights(model), tmp / "model.safetensors")
            save_file(tensors, tmp / "optimizer.safetensors")
            save_file(_rng(), tmp / "rng.safetensors")
            state = {"format": 1, "step": step, "config": _plain(config), "versions": versions()}
            state["optimizer"] = {"class": type(optimizer).__name__, "groups": _groups(optimizer), "state": entries}
            (tmp / "state.json").write_text(json.dumps(state, indent=1))
            (tmp / "config.json").write_text(json.dumps(unwrap(model).config.to_hf(), indent=1))
            if tokenizer is not None:
                tokenizer.save(tmp)
    for old in _complete(run_dir)[:-keep]:
        _remove(old)
    for left in path.parent.glob(".step-*.tmp"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    return path


def newest_state(run_dir: str | Path) -> Path | None:
    """The complete state with the most steps, or None."""
    complete = _complete(run_dir)
    return complete[-1] if complete else None


def load_state(path: str | Path, model: nn.Module, optimizer: Any, config: Any = None) -> int:
    """Put a saved state into a model and an optimizer built with the same settings, and into torch's generators.

    Everything is checked before anything is changed.

    Args:
        path: a state directory, e.g. `newest_state(run_dir)`.
        config: settings of the run that goes on; None skips the comparison.

    Returns:
        The step to go on with.

    Raises:
        UserError: a file is missing or damaged, a setting differs, or model or optimizer have other tensors.
    """
    path = Path(path)
    state = read_state(path)
    if config is not None:
        refuse_changes(state["config"], _plain(config), path)
    saved = {name: _read(path / f"{name}.safetensors") for name in ("model", "optimizer", "rng")}
    own = weights(model)
    _compare(own, saved["model"], path / "model.safetensors")
    if state["optimizer"]["class"] != type(optimizer).__name__:
        raise UserError(f"{path} was saved with optimizer {state['optimizer']['class']}, not {type(optimizer).__name__}")
    rebuilt = _rebuild_entries(model, state["optimizer"]["state"], saved["optimizer"], path)

    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved["model"][name])
    for group, values in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
        for key, value in values.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    for part in _parts(optimizer):
        part.state.clear()
        for p in (p for group in part.param_groups for p in group["params"]):
            if p in rebuilt:
                part.state[p] = rebuilt[p]
    torch.set_rng_state(saved["rng"]["cpu"])
    if "cuda" in saved["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["rng"]["cuda"])
    return state["step"]


def read_state(path: str | Path) -> dict[str, Any]:
    """state.json of a state: step, config, versions.

    Raises:
        UserError: it is missing or not readable.
    """
    try:
        state = json.loads((Path(path) / "state.json").read_text())
        state["step"], state["config"], state["optimizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a complete training state: {error}") from None
    return state


def refuse_changes(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """A resumed run computes what the straight one does, or says why not.

    With a constant schedule `steps` may change, as no step's rate depends on it.

    Raises:
        UserError: names every setting that differs and matters.
    """
    free = MAY_CHANGE | ({"steps"} if saved.get("schedule") == now.get("schedule") == "constant" else set())
    keys = [k for k in {**saved, **now} if k not in free and saved.get(k) != now.get(k)]
    if keys:
        changes = ", ".join(f"{k} was {saved.get(k)!r} and is now {now.get(k)!r}" for k in keys)
        raise UserError(f"cannot resume {path} with other settings: {changes}. Use the old ones, or start a new run")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, each once (state_dict() names a tied parameter twice), whatever wraps the model."""
    model = unwrap(model)
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {clean_name(name): p.detach() for name, p in model.named_parameters()}
    for name, value in model.state_dict().items():
        if name not in every:
            if not isinstance(value, Tensor):
                raise UserError(f"{name} in the model's state is a {type(value).__name__}; only tensors can be saved")
            tensors[clean_name(name)] = value
    return tensors


# --- optimizer --------------------------------------------------------------------------------------------


def _parts(optimizer: Any) -> tuple[Any, ...]:
    return getattr(optimizer, "parts", (optimizer,))


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """What each group holds besides parameters."""
    return [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _optimizer_entries(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors by "<parameter>/<entry>[/<part>]", and a JSON description of every entry by parameter."""
    names = {p: clean_name(name) for name, p in unwrap(model).named_parameters()}
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for part in _parts(optimizer):
        for p, state in part.state.items():
            entries[names[p]] = {key: _describe(f"{names[p]}/{key}", value, p.device, tensors) for key, value in state.items()}
    return tensors, entries


def _describe(name: str, value: Any, device: torch.device, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """File a value's tensors under `name` and say in JSON what it is."""
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    kind = type(value).__name__
    if type(value) in (Tensor, nn.Parameter):
        tensors[name] = value.detach().contiguous()
        return {"on_cpu": value.device.type == "cpu" != device.type}  # a step count that stays on the CPU
    if kind not in _QUANTIZED:
        raise UserError(f"optimizer entry {name} is a {kind}, which cannot be saved; saved are plain tensors and {', '.join(_QUANTIZED)}")
    parts, attributes = value.__tensor_flatten__()
    for part in parts:
        tensors[f"{name}/{part}"] = getattr(value, part).contiguous()
    return {"quantized": kind, "parts": parts, "attributes": [str(a) if isinstance(a, torch.dtype) else a for a in attributes]}


def _rebuild_entries(model: nn.Module, entries: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's state by parameter, on the parameters' devices."""
    params = {clean_name(name): p for name, p in unwrap(model).named_parameters()}
    unknown = sorted(set(entries) - set(params))
    if unknown:
        raise UserError(f"{path} has optimizer state of parameters the model lacks: {', '.join(unknown[:5])}")
    rebuilt: dict[Tensor, dict[str, Any]] = {}
    for owner, state in entries.items():
        p = params[owner]
        rebuilt[p] = {key: _rebuild(f"{owner}/{key}", what, p.device, tensors, path) for key, what in state.items()}
    return rebuilt


def _rebuild(name: str, what: dict[str, Any], device: torch.device, tensors: dict[str, Tensor], path: Path) -> Any:
    if "value" in what:
        return what["value"]
    wanted = [f"{name}/{part}" for part in what["parts"]] if "quantized" in what else [name]
    missing = [key for key in wanted if key not in tensors]
    if missing:
        raise UserError(f"{path / 'optimizer.safetensors'} lacks {', '.join(missing)}")
    if "quantized" not in what:
        return tensors[name].to("cpu" if what["on_cpu"] else device)
    if what["quantized"] not in _QUANTIZED:
        raise UserError(f"{path}: optimizer entry {name} is of unknown kind {what['quantized']!r}")
    import importlib

    cls = getattr(importlib.import_module(_QUANTIZED[what["quantized"]]), what["quantized"])
    attributes = [getattr(torch, a.removeprefix("torch.")) if isinstance(a, str) else a for a in what["attributes"]]
    return cls.__tensor_unflatten__({part: tensors[f"{name}/{part}"].to(device) for part in what["parts"]}, attributes)


# --- files ------------------------------------------------------------------------------------------------


def _complete(run_dir: str | Path) -> list[Path]:
    """States by rising step. A directory has this name only once it is whole."""
    return sorted(p for p in (Path(run_dir) / "state").glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name))


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.old.tmp")  # renamed first, so that half a state never has a state's name
    path.rename(hidden)
    shutil.rmtree(hidden)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _compare(own: dict[str, Tensor], saved: dict[str, Tensor], path: Path) -> None:
    odd = sorted(set(own) ^ set(saved))
    if odd:
        raise UserError(f"{path} and the model have different tensors: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            have, want = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (saved[name], tensor))
            raise UserError(f"{path}: {name} is {have}, the model's is {want}")


def _rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _plain(config: Any) -> dict[str, Any]:
    """Settings as JSON gives them back, so that saved and current ones compare."""
    fields = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    return json.loads(json.dumps(fields))
