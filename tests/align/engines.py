"""A tiny Llama that computes log-probabilities in every layout that trainers and engines use."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tensortap as tap

VOCABULARY = 61


@functools.cache
def llama(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, rope_theta=100.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return sharpened(model).to(dtype)


@functools.cache
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return sharpened(GPT2LMHeadModel(config).eval())


def sharpened(model):
    """Make weights so large that attention and distributions are not flat, as after training."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight *= 1.0 if "wte" in name or "embed" in name else 8.0
    return model


@functools.cache
def sequences(count=5, prompt=6, more=9):
    """Prompts of several lengths, and what the model says to them, drawn from its likely tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(1, VOCABULARY, (1, prompt + number), generator=generator)
        for _ in range(more):
            logits = llama()(ids).logits[0, -1].detach()
            best = logits.topk(3).indices
            pick = best[torch.randint(3, (1,), generator=generator)]
            ids = torch.cat([ids, pick[None]], 1)
        found.append(ids[0])
    return tuple(found)


PROMPTS = tuple(range(6, 11))


def logprobs(logits, ids, temperature=1.0, dtype=None):
    """Log-probabilities of ids from the logits before them."""
    logits = logits if dtype is None else logits.to(dtype)
    found = (logits / temperature).log_softmax(-1)
    return found.gather(-1, ids[..., None])[..., 0]


def padded(side):
    """The sequences in one batch, padded at one side: ids, mask and positions."""
    rows = sequences()
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for row, each in enumerate(rows):
        place = slice(0, len(each)) if side == "right" else slice(width - len(each), width)
        ids[row, place], mask[row, place] = each, 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def packed():
    """The sequences in one row: ids, positions, offsets."""
    rows = sequences()
    positions = torch.cat([torch.arange(len(each)) for each in rows])
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.cat(rows)[None], positions[None], ends


class Engine:
    """Runs a model in one layout, and captures log-probabilities, and logits if asked to.

    The other arguments plant a mismatch: `after` changes logits, `score` replaces the computation
    of log-probabilities, `moved` is added to the positions of decoded tokens, `masked` says
    whether padding is hidden, `alone` whether packed sequences are, `late` hides keys.
    """

    def __init__(
        self, model=None, *, score=logprobs, logits=False, moved=0, masked=True, alone=True,
        late=None, shift=0, padded_positions=False,
    ):  # fmt: skip
        self.model = llama() if model is None else model
        self.score, self.logits, self.moved = score, logits, moved
        self.masked, self.alone, self.late, self.shift = masked, alone, late, shift
        self.padded_positions = padded_positions

    @torch.no_grad()
    def run(self, layout):
        if layout in ("right", "left"):
            self._padded(layout)
        elif layout == "packed":
            self._packed()
        else:
            self._cached(1 if layout == "decoded" else 4)

    def _catch(self, logits, ids, **described):
        scores = self.score(logits[:, :-1].float(), ids[:, 1:])
        tap.catch(torch.roll(scores, self.shift, -1), "logprobs", tokens=ids, **described)
        if self.logits:
            tap.catch(logits.float(), "logits", tokens=ids, **described)

    def _padded(self, side):
        ids, mask, positions = padded(side)
        if self.padded_positions:
            positions = torch.arange(ids.shape[1])[None].expand_as(ids)
        seen = mask if self.masked else torch.ones_like(mask)
        logits = self.model(ids, attention_mask=seen, position_ids=positions).logits
        self._catch(logits, ids, mask=mask, positions=positions)

    def _packed(self):
        ids, positions, ends = packed()
        size = ids.shape[1]
        owner = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
        mask = torch.ones(size, size).tril().bool()
        if self.alone:
            mask &= owner[:, None] == owner[None]
        hidden = torch.zeros(1, 1, size, size).masked_fill(~mask, -1e30).to(self.model.dtype)
        logits = self.model(ids, attention_mask=hidden, position_ids=positions).logits
        self._catch(logits, ids, cu_seqlens=ends, positions=positions)

    def _cached(self, chunk):
        """Fill the cache with the prompt, then go on in chunks, one sequence after the other."""
        for number, each in enumerate(sequences()):
            cache, ids, before = DynamicCache(), each[None], None
            prompt = PROMPTS[number]
            steps = [0, *range(prompt, len(each), chunk), len(each)]
            for begin, end in itertools.pairwise(steps):
                positions = torch.arange(begin, end)[None] + self.moved * (begin > 0)
                mask = None
                if self.late is not None and begin > 0:
                    mask = torch.zeros(1, 1, end - begin, end)
                    mask += torch.full((end - begin, end), -1e30).triu(begin + 1)
                    rows = torch.arange(end - begin)
                    mask[0, 0, rows, begin + rows - self.late] = -1e30
                part = ids[:, begin:end]
                output = self.model(
                    part, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True,
                ).logits  # fmt: skip
                logits = output if before is None else torch.cat([before, output], 1)
                scores = self.score(logits[:, :-1].float(), part[:, 1:] if begin == 0 else part)
                described = {"sequence": f"request {number}", "positions": positions}
                scores = torch.roll(scores, self.shift, -1)
                tap.catch(scores, "logprobs", tokens=part, **described)
                if self.logits:
                    tap.catch(output.float(), "logits", tokens=part, **described)
                before = output[:, -1:]


def record(folder, layout, *engines, track=None, **options):
    """Run an engine per training step, and return the run."""
    run = tap.init(folder)
    for step, engine in enumerate(engines or [Engine(**options)]):
        if len(engines) > 1:
            tap.step(step)
        with contextlib.ExitStack() as stack:
            if track:
                stack.enter_context(
                    tap.track(engine.model, tokens=track, only_training=False, kind="activation")
                )
            engine.run(layout)
    tap.finish()
    return run
