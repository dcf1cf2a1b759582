"""Our models in EleutherAI's lm-evaluation-harness.

    import lm_eval
    lm_eval.simple_evaluate(LlamaLabLM(model, tokenizer), tasks=["arc_easy"])

Importing this needs lm-eval: pip install 'llamalab[lm-eval]'.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from llamalab.errors import UserError
from llamalab.evaluate import continuation_scores, score, split_encoding
from llamalab.generate import generate, stream_text
from llamalab.tokenizer import Tokenizer

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise UserError("--lm-eval needs lm-eval: pip install 'llamalab[lm-eval]'") from None

_SAMPLING = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


class LlamaLabLM(TemplateLM):
    """A model and its tokenizer, as lm-eval asks for them.

    Contexts longer than the model's limit lose their beginning, as in lm-eval's own models; how many did is said once.

    Args:
        batch: rows computed at once.
        max_new_tokens: for generation tasks that name no number.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, batch: int = 8, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch, self.max_new_tokens = model, tokenizer, batch, max_new_tokens
        if tokenizer.bos_id is None and not tokenizer.eos_ids:
            raise UserError("lm-eval needs a start or end token to put before texts without a context; this tokenizer has neither")

    @property
    def max_length(self) -> int:
        """Most input tokens; dynamic RoPE scaling sets no limit, so the length it was trained at."""
        return self.model.config.max_length or self.model.config.block_size

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else self.tokenizer.bos_id

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text that has no context: BOS, or the end of a text before."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokenizer.encode(string, bos=add_special_tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        spaces = len(context) - len(context.rstrip())  # lm-eval: a space at the border belongs to the word after it
        return split_encoding(self.tokenizer, context[: len(context) - spaces], context[len(context) - spaces :] + continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs, cut = [], 0
        for (text, _), context, continuation in requests:
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
            if room < 1:
                raise UserError(f"a continuation of {len(continuation)} tokens (after {text[-40:]!r}) is beyond {self.max_length}")
            cut += len(context) > room
            pairs.append((context[-room:], continuation))
        self._say_cut(cut)
        return continuation_scores(self.model, pairs, self.batch, progress=not disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [[self.prefix_token_id, *self.tokenizer.encode(request.args[0], bos=False)] for request in requests]
        return [-score(self.model, ids, self.max_length, batch=self.batch).nll if len(ids) > 1 else 0.0 for ids in texts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers, cut = [], 0
        for request in requests:
            context, options = request.args
            new, stops, sampling = self._generation(dict(options))
            ids = self.tokenizer.encode(context) or [self.prefix_token_id]
            room = self.max_length - new
            if room < 1:
                raise UserError(f"{new} new tokens leave no room for a prompt: the model's limit is {self.max_length}")
            cut += len(ids) > room
            tokens = generate(self.model, ids[-room:], new, tokenizer=self.tokenizer, **sampling)
            answers.append("".join(stream_text(self.tokenizer, tokens, stops, after=ids)))
        self._say_cut(cut)
        return answers

    def _generation(self, options: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
        """New tokens, stop strings, sampling settings: from a task's `generation_kwargs`."""
        stops = options.pop("until", None) or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        named = [options.pop(name) for name in ("max_gen_toks", "max_new_tokens") if name in options]
        unknown = options.keys() - _SAMPLING
        if unknown:
            raise UserError(f"generation settings that are not offered: {', '.join(sorted(unknown))}")
        if options.pop("do_sample", options.get("temperature", 0) > 0):
            sampling = {"temperature": 1.0, "seed": 0, **options}
        else:
            sampling = {name: value for name, value in options.items() if name == "repetition_penalty"}
        return named[0] if named else self.max_new_tokens, stops, sampling

    def _say_cut(self, count: int) -> None:
        if count:
            print(f"note: {count} contexts were longer than {self.max_length} tokens and lost their beginning", file=sys.stderr)


def find_tasks(tasks: Sequence[str], include_path: str | None = None) -> TaskManager:
    """lm-eval's list of tasks, with those of a folder of your own.

    Raises:
        UserError: no such folder, or a task that is in neither.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path}: no such folder")
    manager = TaskManager(include_path=include_path)
    unknown = set(tasks) - set(manager.all_tasks)
    if unknown:
        raise UserError(f"lm-eval has no task {', '.join(sorted(unknown))}; your own are found with --include-path")
    return manager


def run_tasks(
    model: nn.Module, tokenizer: Tokenizer, tasks: Sequence[str], manager: TaskManager, batch: int = 8, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Run tasks; their numbers under lm-eval's names.

    Args:
        limit: only the first questions of each task.
    """
    adapter = LlamaLabLM(model, tokenizer, batch)
    found = lm_eval.simple_evaluate(adapter, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    return {
        f"lm-eval {task}": {name.removesuffix(",none"): value for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in found["results"].items()
    }
