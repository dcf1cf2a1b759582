"""A directory is a model: `load_model` reads every format there is, `save_model` writes Hugging Face's.

    model = load_model("runs/pretrain-1")                 # also: a .gguf file, Meta's or gpt-fast's directory, a hub id
    save_model("out", model, load_tokenizer("runs/pretrain-1"))

Loading has three steps: find the files and the config; compare names, shapes and types with what the model needs, and
refuse by name whatever is missing, extra, doubled, cut or of another shape; only then allocate, and copy row by row from
the mapped files. Memory holds the model once and a few megabytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llamalab.config import ModelArgs, end_ids
from llamalab.convert import (
    HARMLESS,
    Part,
    clean_name,
    config_from_name,
    config_from_params,
    guess_layout,
    head_name,
    hf_tensors,
    parts,
    plain_state,
    to_interleaved,
    unwrap,
)
from llamalab.errors import UserError
from llamalab.files import new_directory, temporary_beside, write_atomic
from llamalab.gguf_file import read_gguf
from llamalab.model import Transformer
from llamalab.runtime import pick_dtype
from llamalab.tensor_files import Stored, few, merge_parallel, read_file, read_json, read_shards
from llamalab.tokenizer import Tokenizer

CHUNK = 8_000_000  # bytes copied at a time, or a hundredth of the model if that is more (each read opens the file anew)
SHARD_SIZE = 5_000_000_000  # bytes; larger models are cut into files of at most this size

#: What is fetched from the hub: nothing that could run code, nothing twice.
HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_HUB_SKIP = ("*/*", "consolidated*")  # other formats of the same weights
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_OTHER_FILES = re.compile(r"(generation_|tokenizer_)?config\.json|tokenizer\.json")


# --- load -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found and not read yet: one of convert.LAYOUTS, tensors by their names in the file."""

    path: Path
    config: ModelArgs
    layout: str
    tensors: dict[str, Stored]


def load_model(path: str | Path, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> Transformer:
    """A model ready for `model(idx)`, in train mode (as a fresh nn.Module is).

    Args:
        path: a Hugging Face directory (safetensors or pytorch_model.bin, sharded or not), Meta's (consolidated.*.pth and
            params.json), torchao's or gpt-fast's (model.pth), a directory with one .gguf, one such file, or a hub id "org/name".
        device: default torch's default device.
        dtype: default the one stored; the widest, where matrices differ or a norm would lose digits; float32 for
            quantized GGUF.

    Raises:
        UserError: nothing there, a model this code does not compute, or tensors that are not exactly the model's.
    """
    source = open_source(local_path(path))
    matched = match(source)
    dtype = pick_dtype(dtype) or stored_dtype([stored for _, stored in matched])
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        model = Transformer(source.config)
    for name, p in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device)))
    model.tie_weights()
    params = dict(model.named_parameters())
    chunk = max(CHUNK, sum(p.nbytes for p in params.values()) // 100)
    with torch.no_grad():
        for part, stored in matched:
            copy_rows(stored, params[part.ours][part.start : part.stop], part.heads, chunk)
    model.setup_caches(1, source.config.block_size, training=True)
    return model


def open_source(path: Path) -> Source:
    """Find weights and config at a local path; reads names and sizes only.

    Raises:
        UserError: no weights, no config, or files that contradict each other.
    """
    directory = path if path.is_dir() else path.parent
    files = _find_weights(path) if path.is_dir() else [path]
    if files[0].suffix == ".gguf":
        config, layout, tensors = read_gguf(files[0])
        return Source(files[0], config, layout, tensors)
    if files[0].suffix == ".json":
        tensors = read_shards(files[0])
    elif len(files) > 1:
        tensors = _merge_meta(files)
    else:
        tensors = read_file(files[0])
    tensors = _clean(files[0], tensors)
    layout = guess_layout(tensors)
    shapes = {name: stored.shape for name, stored in tensors.items()}
    if (directory / "config.json").is_file():
        config = _read_config(directory)
    elif layout == "hf":
        raise UserError(f"{directory} has no config.json, so the weights in {files[0].name} cannot be interpreted")
    elif (directory / "params.json").is_file():
        config = config_from_params(read_json(directory / "params.json"), shapes, _is_tied(tensors))
    else:
        config = config_from_name(directory.resolve().name, shapes, _is_tied(tensors))
    return Source(path, config, layout, tensors)


def _find_weights(directory: Path) -> list[Path]:
    """The files of the first format there is; several only for Meta's parallel parts."""
    present = sorted(file.name for file in directory.iterdir())
    for stem in ("model.safetensors", "pytorch_model.bin"):
        single, index = stem in present, f"{stem}.index.json" in present
        if single and index:
            raise UserError(f"{directory} holds both {stem} and {stem}.index.json; remove the one that is out of date")
        if single or index:
            return [directory / (stem if single else f"{stem}.index.json")]
        name, suffix = stem.split(".")
        shards = [file for file in present if re.fullmatch(rf"{name}-\d+-of-\d+\.{suffix}", file)]
        if shards:
            raise UserError(f"{directory} holds shards ({few(shards)}) but lacks {stem}.index.json")
    for pattern in (r"consolidated\.\d+\.pth", r"model\.pth"):
        files = [directory / file for file in present if re.fullmatch(pattern, file)]
        if files:
            return files
    files = [file for file in present if file.endswith(".gguf")]
    if len(files) > 1:
        raise UserError(f"{directory} holds {len(files)} GGUF files; name one: {few(files)}")
    if files:
        return [directory / files[0]]
    holds = f"it holds {few(present)}" if present else "it is empty"
    raise UserError(f"no model in {directory}: expected model.safetensors, pytorch_model.bin, consolidated.00.pth, model.pth or a "
                    f".gguf file; {holds}")


def _read_config(directory: Path) -> ModelArgs:
    """config.json, with the end ids of generation_config.json as well."""
    try:
        config = ModelArgs.from_hf(read_json(directory / "config.json"))
    except KeyError as error:
        raise UserError(f"{directory / 'config.json'} lacks {error}") from None
    except (UserError, TypeError, AttributeError) as error:  # the latter two: values of a wrong JSON type
        raise UserError(f"{directory / 'config.json'}: {error}") from None
    if (directory / "generation_config.json").is_file():
        more = read_json(directory / "generation_config.json").get("eos_token_id")
        try:
            more = end_ids(more)
        except UserError as error:
            raise UserError(f"{directory / 'generation_config.json'}: {error}") from None
        config = dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, *more))
    return config


def _merge_meta(files: list[Path]) -> dict[str, Stored]:
    """Meta's tensor parallelism: rows of wq wk wv w1 w3 and the head are apart, columns of wo and w2, and of the embedding
    columns (Llama 1 and 2) or rows (Llama 3); norms are in each file."""
    params = read_json(files[0].parent / "params.json")

    def whole(name: str, shapes: list[tuple[int, ...]]) -> int | None:
        if len(shapes[0]) != 2:
            return None
        if name.startswith("tok_embeddings."):
            return 0 if shapes[0][1] == params.get("dim") else 1
        return 1 if name.endswith((".wo.weight", ".w2.weight")) else 0

    return merge_parallel(files, whole)


def _clean(file: Path, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Names without the prefixes of wrappers (a checkpoint of a compiled or distributed model)."""
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if clean_name(name) in found:
            raise UserError(f"{file} holds {clean_name(name)} twice, once under the name {name}")
        found[clean_name(name)] = stored
    return found


def _is_tied(tensors: dict[str, Stored]) -> bool:
    """Meta's files have no tie flag: tied is what has one matrix, or two equal ones."""
    both = [tensors[name] for name in ("tok_embeddings.weight", "output.weight") if name in tensors]
    return len(both) < 2 or same_values(*both)


def match(source: Source) -> list[tuple[Part, Stored]]:
    """Each tensor the model needs beside the one that is there.

    Raises:
        UserError: names every tensor that is missing, extra, of another shape or not floating point; or a head and an
            embedding that differ although the config ties them.
    """
    config, tensors = source.config, dict(source.tensors)
    wanted = parts(config, source.layout)
    head, embedding = head_name(source.layout), next(part.name for part in wanted if part.ours == "tok_embeddings.weight")
    if config.tie_word_embeddings and head in tensors:
        if embedding not in tensors:
            tensors[embedding] = tensors.pop(head)
        elif not same_values(tensors[embedding], tensors.pop(head)):
            raise UserError(f"{source.path}: the config ties head and embedding, but {head} and {embedding} differ; "
                            "set tie_word_embeddings to false in config.json to keep both")
    needed = {part.name: part for part in wanted}
    missing = [name for name in needed if name not in tensors]
    extra = [name for name in tensors if name not in needed and not HARMLESS.fullmatch(name)]
    there = [(part, tensors[name]) for name, part in needed.items() if name in tensors]
    shapes = [f"{part.name} is {list(stored.shape)}, not {list(part.shape)}" for part, stored in there if stored.shape != part.shape]
    types = [f"{part.name} is {stored.dtype}" for part, stored in there if isinstance(stored.dtype, str)]
    faults = {"missing": missing, "not part of the model": extra, "of the wrong shape": shapes, "not floating point": types}
    if any(faults.values()):
        raise UserError(f"{source.path} does not hold the model its config describes: "
                        + "; ".join(f"{what}: {few(names)}" for what, names in faults.items() if names))
    return there


def stored_dtype(tensors: list[Stored]) -> torch.dtype:
    """The narrowest dtype that holds every number: that of the matrices, unless a vector needs more (GGUF keeps norms in float32)."""
    dtype = reduce(torch.promote_types, [t.dtype for t in tensors if len(t.shape) > 1])
    for stored in tensors:
        if len(stored.shape) == 1 and torch.promote_types(stored.dtype, dtype) != dtype:
            values = stored.rows(0, stored.shape[0])
            if not torch.equal(values.to(dtype).to(stored.dtype), values):
                dtype = torch.promote_types(stored.dtype, dtype)
    return dtype


def copy_rows(stored: Stored, target: Tensor, heads: int, chunk: int = CHUNK) -> None:
    """Fill target from a file, `chunk` bytes at a time; half-split heads are put in our order."""
    rows, unit = stored.shape[0], stored.shape[0] // heads if heads else 1  # a head is not cut
    step = max(chunk // (target[0].numel() * target.element_size() * unit), 1) * unit
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = stored.rows(start, stop)
        target[start:stop].copy_(to_interleaved(values, (stop - start) // unit) if heads else values)


def same_values(a: Stored, b: Stored) -> bool:
    """Whether two tensors hold the same numbers; stops at the first that differs."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    step = max(CHUNK // 4 // max(a.shape[-1], 1), 1)
    spans = ((start, min(start + step, a.shape[0])) for start in range(0, a.shape[0], step))
    return all(torch.equal(a.rows(*span), b.rows(*span)) for span in spans)


# --- hub ------------------------------------------------------------------------------------------------


def local_path(name: str | Path) -> Path:
    """A path as it is; of a hub id, where its files are after fetching them.

    Raises:
        UserError: neither a path nor a model on the hub that can be reached; or a run directory that has no model yet.
    """
    path = Path(name).expanduser()
    if path.exists():
        if (path / "state").is_dir() and not (path / "config.json").exists():
            raise UserError(f"{name} is a run that was cut off, or still runs: take a state of it, such as "
                            f"{max((path / 'state').glob('step-*'), default='(there is none yet)')}, or --resume it")
        return path
    if _HUB_ID.fullmatch(str(name)):
        return download(str(name))
    raise UserError(f"{name}: no such file or directory, and not a hub id (org/name)")


def download(repo: str, out: str | Path | None = None, revision: str | None = None, gguf: str | None = None) -> Path:
    """Fetch a model from the Hugging Face hub, into its cache or into `out`. Only files that cannot run code are fetched.

    Args:
        gguf: pattern of the GGUF file to fetch instead of safetensors, such as "*Q4_0*".

    Raises:
        UserError: no such model, no access, no connection, or no weights in a format that is fetched.
    """
    from huggingface_hub import snapshot_download

    files = [f"{gguf.removesuffix('.gguf')}.gguf"] if gguf else list(HUB_FILES)
    try:
        path = snapshot_download(repo, revision=revision, local_dir=out, allow_patterns=files, ignore_patterns=list(_HUB_SKIP))
    except Exception as error:  # hub, HTTP and connection errors have no common base
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{repo} is not a local path and could not be fetched from the hub: {type(error).__name__}: {reason}") from error
    if not any(Path(path).glob("*.gguf" if gguf else "*.safetensors")):
        raise UserError(f"{repo} has no {files[0] if gguf else '.safetensors'} file, and no other kind of weights is fetched")
    return Path(path)


# --- save -----------------------------------------------------------------------------------------------


def save_model(path: str | Path, model: nn.Module, tokenizer: Tokenizer | None = None, shard_size: int = SHARD_SIZE) -> Path:
    """Write a Hugging Face directory: all of it, or nothing. `AutoModelForCausalLM.from_pretrained(path)` computes the same.

    What the model is wrapped in (torch.compile, DistributedDataParallel) does not show in the files. An existing directory
    is replaced if it holds nothing but files of this kind.

    Args:
        tokenizer: saved beside the model; its end ids join those of the config.
        shard_size: bytes of one weight file at most (a larger tensor has a file of its own).

    Raises:
        UserError: path holds other files, or a model that Hugging Face's classes would not compute.
    """
    path = Path(path)
    check_target(path)
    with new_directory(path) as tmp:
        write_model_files(tmp, model, tokenizer, shard_size)
    return path


def check_target(path: Path) -> None:
    """Refuse a path where `save_model` would remove what it did not write.

    Raises:
        UserError: path is a file, or a directory that holds other files.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; a model is saved as a directory")
    if path.is_dir():
        others = sorted(f.name for f in path.iterdir() if not (_WEIGHT_FILES.fullmatch(f.name) or _OTHER_FILES.fullmatch(f.name)))
        if others:
            raise UserError(f"{path} holds files that saving a model would remove: {few(others)}; choose another directory")


def write_model_files(directory: Path, model: nn.Module, tokenizer: Tokenizer | None = None, shard_size: int = SHARD_SIZE) -> None:
    """Write the files of a model into a directory that exists and may hold others. Each file appears whole.

    Weight files of an earlier model that the new ones don't replace are removed.

    Raises:
        UserError: as for `save_model`, before anything is written.
    """
    config = unwrap(model).config
    plan = _plan_shards(model, shard_size)
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {config.vocab_size}")
        config = dataclasses.replace(
            config,
            bos_token_id=tokenizer.bos_id if config.bos_token_id is None else config.bos_token_id,
            pad_token_id=tokenizer.pad_id if config.pad_token_id is None else config.pad_token_id,
            eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *tokenizer.eos_ids])),
        )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    described = config.to_hf(dtype)

    names, weight_map, sizes = _shard_names(len(plan)), {}, 0
    tensors = hf_tensors(model)
    for name, wanted in zip(names, plan, strict=True):
        shard = {part: tensor.cpu().contiguous() for part, tensor in (next(tensors) for _ in wanted)}
        sizes += sum(tensor.nbytes for tensor in shard.values())
        weight_map |= dict.fromkeys(shard, name)
        with temporary_beside(directory / name) as tmp:
            save_file(shard, tmp, metadata={"format": "pt"})
    keep = set(names)
    if len(names) > 1:
        keep.add("model.safetensors.index.json")
        index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
        write_atomic(directory / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    generation = {key: described[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if described[key] is not None}
    write_atomic(directory / "config.json", json.dumps(described, indent=2) + "\n")
    write_atomic(directory / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(directory)
    for file in directory.iterdir():
        if _WEIGHT_FILES.fullmatch(file.name) and file.name not in keep:
            file.unlink()


def _plan_shards(model: nn.Module, shard_size: int) -> list[list[Part]]:
    """Parts by file, in order."""
    if shard_size < 1:
        raise UserError(f"shard_size must be at least 1 byte, got {shard_size}")
    state, plan, room = plain_state(model), [[]], shard_size
    for part in parts(unwrap(model).config, "hf"):
        rows = state[part.ours]
        size = (part.stop - part.start) * rows[0].numel() * rows.element_size()
        if size > room and plan[-1]:
            plan.append([])
            room = shard_size
        plan[-1].append(part)
        room -= size
    return plan


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
