"""What the papers and articles say, beside what the simulation gives. Nothing here is an input of any run."""

from __future__ import annotations

from collections.abc import Mapping

from chatsvc.sim import modes
from chatsvc.sim.section import Section, Value

Rows = Mapping[str, Mapping[str, Value]]

PAPER = "Kwon et al. 2023"
ARTICLES = "articles on PagedAttention"


def compare(sections: Mapping[str, Section]) -> Section:
    """Claims for which the sections hold numbers."""
    columns = (
        ("claim", "claim", ""),
        ("source", "source", ""),
        ("literature", "literature", ""),
        ("simulated", "simulated", ""),
    )
    section = Section("literature", "Beside the literature", columns)

    def add(claim: str, source: str, literature: str, simulated: str) -> None:
        section.rows.append({"claim": claim, "source": source, "literature": literature, "simulated": simulated})

    kv = _rows(sections.get("kv"), "scenario")
    if kv:
        per_token = int(kv["llama-3-70b"]["per_token"] or 0)
        add("KV of a 70B token (GQA)", ARTICLES, "320 KiB", f"{per_token / 1024:g} KiB")
    chat = _rows(sections.get("saturated/llama-2-7b/sharegpt"), "mode")
    if chat:
        held = [(modes.MAX_2048, "20.4 %"), (modes.POW2, "26.8 %"), (modes.ORACLE, "38.2 %")]
        for mode, says in held:
            if mode.name in chat:
                share = float(chat[mode.name]["tokens"] or 0)
                add(f"pool that is tokens: {mode.name}", PAPER, says, f"{share:.1%}")
        paged, best, worst = (chat[m.name] for m in (modes.PAGED, modes.ORACLE, modes.MAX))
        add("slots held that are tokens: paged", PAPER, "96.3 %", f"{1 - _waste(paged):.1%}")
        low, high = _waste(chat[modes.POW2.name]), _waste(chat[modes.MAX_2048.name])
        add(
            "waste of contiguous reservation", ARTICLES, "60-80 %", f"{_waste(best):.0%} (oracle), {low:.0%}-{high:.0%}"
        )
        add("waste of paging", ARTICLES, "< 4 %", f"{_waste(paged):.1%}")
        add("waste of paging, 500 tokens or more", ARTICLES, "< 4 %", f"{float(paged['long_waste'] or 0):.1%}")
        for machine, key in (("7B, A100-80GB", "llama-2-7b"), ("13B, A100-40GB: the paper's", "opt-13b")):
            rows = _rows(sections.get(f"saturated/{key}/sharegpt"), "mode")
            for name, mode, says in (("oracle", modes.ORACLE, "1.7-2.7x"), ("reserve 2,048", modes.MAX_2048, "2.7-8x")):
                if mode.name in rows:
                    ratio = _speed(rows[modes.PAGED.name]) / _speed(rows[mode.name])
                    add(f"paged over {name} ({machine})", PAPER, says, f"{ratio:.1f}x")
        static = _speed(paged) / _speed(chat[modes.STATIC.name])
        add("throughput against static batches", ARTICLES, "2.5-4.2x, up to 24x", f"{static:.1f}x")
        step = _speed(worst) / _speed(chat[modes.STATIC.name])
        add("of which iteration-level batching", ARTICLES, "-", f"{step:.1f}x")
    fit = _rows(sections.get("fit"), "scenario", trace="sharegpt")
    if fit:
        row = fit["llama-2-7b"]
        add("7B requests that fit into 80 GB", ARTICLES, "12-16 -> 80-120+", f"{row['reserve_max']} -> {row['paged']}")
    return section


def _rows(section: Section | None, key: str, **only: str) -> Rows:
    if section is None:
        return {}
    return {str(r[key]): r for r in section.rows if all(r[k] == v for k, v in only.items())}


def _waste(row: Mapping[str, Value]) -> float:
    return float(row["waste"] or 0)


def _speed(row: Mapping[str, Value]) -> float:
    return float(row["throughput"] or 0)
