"""Train the built-in storyteller: a small Qwen3 that learns from stories sampled from a teacher.

    python -m bench.quality.train_storyteller sample   --teacher FOLDER --out stories.jsonl --stories 40000
    python -m bench.quality.train_storyteller fit      --stories stories.jsonl --out FITTED --minutes 60
    python -m bench.quality.train_storyteller sharpen  --model FITTED --out MODEL --by 1.5
    python -m bench.quality.train_storyteller evaluate --teacher FOLDER --model MODEL

Needs `pip install npuserve[transformers]` and a teacher in Hugging Face format, such as karpathy/tinyllamas'
stories15M. The student is transformers' Qwen3ForCausalLM, so that no code of the server makes the weights that it is
tested with.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

END = "<|endoftext|>"
VOCABULARY = 2048
CONTEXT = 512
HELD_OUT = 200


def sample_teacher(folder: str, count: int, temperature: float, batch: int, seed: int, opening: int = 0):
    """Yield (text, ended) of `count` stories, sampled from the teacher's beginning-of-text token.

    temperature: temperature of the teacher's softmax after the first `opening` tokens.
    opening: number of tokens that are drawn at temperature 1, for varied beginnings.

    `ended` is False for a story cut off by the teacher's context.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    length = model.config.max_position_embeddings - 1
    torch.manual_seed(seed)
    while count > 0:
        rows = min(batch, count)
        step = cached_step(model, rows, length)
        ids = torch.full((rows,), bos)
        story = torch.full((rows, length), eos)
        done = torch.zeros(rows, dtype=torch.bool)
        for position in range(length):
            top, candidates = step(ids, position).topk(128, dim=-1)
            sharpness = 1.0 if position < opening else 1.0 / temperature
            choice = torch.multinomial((top.float() * sharpness).softmax(-1), 1)
            ids = candidates.gather(1, choice)[:, 0]
            ids[done] = eos
            story[:, position] = ids
            done |= (ids == bos) | (ids == eos)
            if done.all():
                break
        for row, ended in zip(story.tolist(), done.tolist(), strict=True):
            ends = [i for i, token in enumerate(row) if token in (bos, eos)]
            yield tokenizer.decode(row[: ends[0]] if ends else row).strip(), ended
        count -= rows


def cached_step(model, rows: int, length: int):
    """Return a Llama's decode step for `rows` sequences: (ids [rows], position) -> logits [rows, vocabulary].

    The cache is fp32 [rows, heads, length, head_dim]. Only its filled part is read, which makes the step several times
    faster than generate() with a static cache.
    """
    config, base = model.config, model.model
    heads, size = config.num_attention_heads, config.head_dim
    keys, values = (torch.empty(config.num_hidden_layers, rows, config.num_key_value_heads, length, size)
                    for _ in range(2))

    @torch.no_grad()
    def step(ids: torch.Tensor, position: int) -> torch.Tensor:
        x = base.embed_tokens(ids)
        cos, sin = base.rotary_emb(x.float()[:, None], torch.tensor([[position]]))

        def rotate(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, -1)
            return t * cos[0, 0] + torch.cat((-second, first), -1) * sin[0, 0]

        for i, layer in enumerate(base.layers):
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (projection(h).float().view(rows, -1, size) for projection in projections)
            keys[i, :, :, position], values[i, :, :, position] = rotate(k), v
            o = F.scaled_dot_product_attention(
                rotate(q)[:, :, None], keys[i, :, :, : position + 1], values[i, :, :, : position + 1],
                enable_gqa=heads != config.num_key_value_heads)
            x = x + attention.o_proj(o.reshape(rows, -1).to(x.dtype))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.lm_head(base.norm(x))

    return step


def command_sample(args: argparse.Namespace) -> None:
    began, written = time.time(), 0
    with open(args.out, "a") as out:
        for text, ended in sample_teacher(
            args.teacher, args.stories, args.temperature, args.batch, args.seed, args.opening
        ):
            if not loops(text):
                out.write(json.dumps({"text": text, "ended": ended}) + "\n")
            written += 1
            if written % args.batch == 0:
                out.flush()
                print(f"{written} stories, {time.time() - began:.0f} s", flush=True)


def make_tokenizer(texts: list[str], out: Path) -> None:
    """Train a byte-level BPE of VOCABULARY entries with Qwen3's pre-tokenizer, and save it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    split = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    # A prompt begins after END, as the stories of the training data do.
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END, "pad_token": END,
        "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT}, indent=2) + "\n")


def make_student():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        bos_token_id=0, eos_token_id=0, pad_token_id=0, attention_bias=False))


def read_stories(file: str, tokenizer) -> list[list[int]]:
    """Return the stories' ids. END begins each story, since its first token needs one before it."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    encoded = tokenizer.encode_batch([row["text"] for row in rows])
    return [[0, *e.ids, 0] if row["ended"] else [0, *e.ids] for e, row in zip(encoded, rows, strict=True)]


def pack(read, length: int, seed: int):
    """Yield windows of [length + 1] ids without end: concatenated stories, the last one cut off.

    read: returns the stories of an epoch; it is called for each epoch, so that the file may grow.
    """
    generator = torch.Generator().manual_seed(seed)
    row: list[int] = []
    while True:
        stories = read()
        for index in torch.randperm(len(stories), generator=generator).tolist():
            row = row + stories[index]
            if len(row) > length:
                yield row[: length + 1]
                row = []


def command_fit(args: argparse.Namespace) -> None:
    """Train for a fixed number of minutes: Muon for the matrices, AdamW for the rest, warm-up and linear decay."""
    from tokenizers import Tokenizer

    out = Path(args.out)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if args.base:
        from transformers import Qwen3ForCausalLM

        out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (out / name).write_bytes((Path(args.base) / name).read_bytes())
        model = Qwen3ForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    else:
        texts = [json.loads(line)["text"] for line in Path(args.stories).read_text().splitlines()[:20000]]
        make_tokenizer(texts, out)
        model = make_student()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    held = read_stories(args.stories, tokenizer)[:HELD_OUT]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    base = [args.muon_lr, args.lr]
    windows = pack(lambda: read_stories(args.stories, tokenizer)[HELD_OUT:], args.length, args.seed)
    validation = pack(lambda: held, args.length, 0)
    check = torch.tensor([next(validation) for _ in range(48)])

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    began, step, seen = time.time(), 0, 0
    while (done := (time.time() - began) / (args.minutes * 60)) < 1:
        for optimizer, rate in zip(optimizers, base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 50, (1 - done) / args.decay)
        batch = torch.tensor([next(windows) for _ in range(args.rows)])
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + batch[:, 1:].numel()
        if step % 50 == 0:
            with torch.no_grad():
                held_loss = loss_of(check)
            print(f"step {step}  {seen / 1e6:.2f} M tokens  {time.time() - began:.0f} s  loss {loss.item():.3f}  "
                  f"held out {held_loss.item():.3f}", flush=True)
            if step % 1000 == 0:
                save(model, out)
    save(model, out)


def save(model, out: Path, sharpness: float = 1.0) -> None:
    """Write weights in bf16, config and generation config, as a Hugging Face folder.

    sharpness: factor of the final norm, and so of all logits; the same as a temperature divided by it.
    """
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.model.norm.weight.mul_(sharpness)
    made.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    (out / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 1.0, "eos_token_id": 0}, indent=2) + "\n")


def command_sharpen(args: argparse.Namespace) -> None:
    """Write a model with scaled logits, which samples with less variation."""
    from transformers import AutoModelForCausalLM

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((Path(args.model) / name).read_bytes())
    save(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), out, args.by)


def loops(text: str) -> bool:
    """Return True if a sequence of 8 words occurs three times or more."""
    words = text.split()
    grams = [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
    return any(grams.count(g) >= 3 for g in set(grams))


def command_evaluate(args: argparse.Namespace) -> None:
    """Print the loss in nats per teacher token, of the teacher's and the student's samples, at one temperature."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(args.teacher)
    student = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    spoken = AutoTokenizer.from_pretrained(args.model)
    torch.manual_seed(args.seed)

    def teacher_loss(texts: list[str]) -> float:
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([[words.bos_token_id, *words.encode(text, add_special_tokens=False)]])[:, : args.length]
            with torch.no_grad():
                logits = teacher(ids).logits[0, :-1]
            total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
        return total / count

    own = [text for text, _ in sample_teacher(args.teacher, args.samples, args.temperature, args.samples, args.seed)]
    start = torch.zeros((args.samples, 1), dtype=torch.long)
    with torch.inference_mode():
        made = student.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, top_p=1.0,
                                temperature=args.temperature, max_new_tokens=args.length, pad_token_id=0)
    texts = [spoken.decode(row[1:], skip_special_tokens=True).strip() for row in made]
    ours, theirs = teacher_loss(texts), teacher_loss(own)
    for text in texts[:3]:
        print("---", text)
    print(json.dumps({"temperature": args.temperature, "student": round(ours, 4), "teacher": round(theirs, 4),
                      "ratio": round(ours / theirs, 4), "perplexities": [math.exp(ours), math.exp(theirs)],
                      "looping": sum(map(loops, texts)), "samples": len(texts)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sample = commands.add_parser("sample", help="sample stories from the teacher")
    sample.add_argument("--teacher", required=True)
    sample.add_argument("--out", required=True)
    sample.add_argument("--stories", type=int, default=40000)
    sample.add_argument("--batch", type=int, default=512)
    sample.add_argument("--temperature", type=float, default=0.8)
    sample.add_argument("--opening", type=int, default=0, help="number of first tokens sampled at temperature 1")
    sample.add_argument("--seed", type=int, default=0)
    sample.set_defaults(run=command_sample)
    fit = commands.add_parser("fit", help="train the student on sampled stories")
    fit.add_argument("--stories", required=True)
    fit.add_argument("--out", required=True)
    fit.add_argument("--base", help="continue from this model")
    fit.add_argument("--decay", type=float, default=0.5, help="final share of the time, of decay to 0")
    fit.add_argument("--minutes", type=float, default=60)
    fit.add_argument("--rows", type=int, default=16, help="windows per step")
    fit.add_argument("--length", type=int, default=400, help="tokens per window")
    fit.add_argument("--lr", type=float, default=3e-3)
    fit.add_argument("--muon-lr", type=float, default=0.02)
    fit.add_argument("--threads", type=int, default=2)
    fit.add_argument("--seed", type=int, default=0)
    fit.set_defaults(run=command_fit)
    sharpen = commands.add_parser("sharpen", help="scale the logits of a fitted model")
    sharpen.add_argument("--model", required=True)
    sharpen.add_argument("--out", required=True)
    sharpen.add_argument("--by", type=float, required=True)
    sharpen.set_defaults(run=command_sharpen)
    evaluate = commands.add_parser("evaluate", help="loss of the student's samples under the teacher")
    evaluate.add_argument("--teacher", required=True)
    evaluate.add_argument("--model", required=True)
    evaluate.add_argument("--samples", type=int, default=64)
    evaluate.add_argument("--length", type=int, default=250)
    evaluate.add_argument("--temperature", type=float, default=0.8)
    evaluate.add_argument("--seed", type=int, default=1)
    evaluate.set_defaults(run=command_evaluate)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
